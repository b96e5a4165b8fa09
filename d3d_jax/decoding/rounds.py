"""What a launch leaves on the device for the host to read later, and what the host makes of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.config import AttentionConfig, ModelConfig
from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.placement import Settings
from d3d_jax.decoding.policies import PLAIN, Tactic
from d3d_jax.decoding.programs import verify
from d3d_jax.decoding.sampling import Sampling
from d3d_jax.decoding.state import Outcome, Progress, PromptChunk, Round, Stop
from d3d_jax.models.attention import AUTO
from d3d_jax.models.cache import KVCache
from d3d_jax.models.qwen3 import Params


class Until(NamedTuple):
    """When a loop on the device returns: after so many rounds, or when so many rows are done. int32 scalars."""

    rounds: Any
    rows_done: Any

    def go_on(self, number: jax.Array, done_B: jax.Array) -> jax.Array:
        return ~jnp.all(done_B) & (number < self.rounds) & (done_B.sum() < self.rows_done)


class Launched(NamedTuple):
    """A launch in flight: arrays on the device that the host will want, and how it reads them, a Progress a row."""

    arrays: Any
    read: Callable[[Any], list[Progress]]


class Runner(Protocol):
    """A mode at work: the device state of all rows. Rows are free until they are prefilled.

    compiled_loop: a launch is many rounds, which the device counts itself; otherwise it is one.
    """

    compiled_loop: bool

    def prefill(self, chunk: PromptChunk, settings: Settings) -> tuple[Launched, Any]:
        """Enqueue a chunk of a row's prompt. The second value is ready when all devices are through with it."""
        ...

    def launch(self, number: int, settings: Settings, until: Until, observer: Observer) -> Launched:
        """Enqueue round `number`, or a loop of them."""
        ...

    def rehearsal(self) -> AbstractContextManager[int]:
        """While it is open, as many rounds as it says run every program that a round may use."""
        ...

    def rates(self) -> dict[Tactic, float]:
        """Tokens a second of the tactics between which a policy chooses; empty where there is no choice."""
        ...

    def release(self, slot: int) -> None:
        """The row is free: its request was cancelled."""
        ...


def end_row(outcome: Outcome, slot: jax.Array) -> Outcome:
    """The row is done."""
    return outcome._replace(done=outcome.done.at[slot].set(True))


def read_first(slot: int) -> Callable[[Any], list[Progress]]:
    """Reads the first token of a row, from its prefill; every row before it gets nothing."""

    def read(arrays: Any) -> list[Progress]:
        (token, logprob), done = arrays
        nothing = [Progress() for _ in range(slot)]
        return [*nothing, Progress([int(token[0])], [float(logprob[0])], [], bool(done[slot]))]

    return read


def verify_recorded(
    params: Params,
    block_BG: jax.Array,
    hit_B: jax.Array,
    outcome: Outcome,
    cache: KVCache,
    sampling: Sampling | None,
    stop: Stop,
    config: ModelConfig,
    attention: AttentionConfig = AUTO,
) -> tuple[KVCache, Outcome, jax.Array]:
    """`programs.verify` of the block that follows `outcome`, with the round's record as one int32 [B, 2G + 4].

    Columns: the tokens, their log-probabilities as bits, drafts accepted, hit, done before, done after.
    """
    cache, after, (own, logprob) = verify(params, block_BG, outcome.done, cache, sampling, stop, config, attention)
    columns = jnp.stack([after.accepted, hit_B, outcome.done, after.done], axis=1, dtype=jnp.int32)
    bits = jax.lax.bitcast_convert_type(logprob, jnp.int32)
    return cache, after, jnp.concatenate([own, bits, columns], axis=1)


def read_round(tactic: Tactic) -> Callable[[np.ndarray], list[Progress]]:
    """Reads a record of `verify_recorded`, or of `autoregressive.decode_block_alone`, of a round of this tactic."""
    alone, foreseen = tactic == PLAIN, tactic.drafts_ahead

    def read(record: np.ndarray) -> list[Progress]:
        size = (record.shape[1] - 4) // 2
        logprobs = record[:, size : 2 * size].view(np.float32)
        found = []
        for row, (accepted, hit, before, after) in enumerate(record[:, 2 * size :].tolist()):
            if before:
                found.append(Progress(done=True))
                continue
            emitted = slice(0, accepted + 1)
            again = foreseen and tactic.redraft and not hit
            rounds = [Round(accepted, bool(hit) if foreseen else None, again)]
            if alone:
                rounds = [Round(0, drafted=False)] * (accepted + 1)
            tokens = record[row, :size][emitted].tolist()
            found.append(Progress(tokens, logprobs[row, emitted].tolist(), rounds, bool(after)))
        return found

    return read


class Written(NamedTuple):
    """What a loop on the device has emitted: tokens and the bits of their log-probabilities, int32 [B, 2, S], and
    how many of each row count, int32 [B].
    """

    emitted: jax.Array
    count: jax.Array

    @classmethod
    def empty(cls, batch: int, size: int) -> Written:
        return cls(jnp.zeros((batch, 2, size), jnp.int32), jnp.zeros(batch, jnp.int32))

    def add(self, tokens_BG: jax.Array, logprobs_BG: jax.Array, count_B: jax.Array) -> Written:
        """Append the first `count` of each row's tokens; the buffer has room for the rest, overwritten next time."""
        new = jnp.stack([tokens_BG, jax.lax.bitcast_convert_type(logprobs_BG, jnp.int32)], axis=1)
        emitted = self.emitted
        for row in range(emitted.shape[0]):
            emitted = jax.lax.dynamic_update_slice(emitted, new[row : row + 1], (row, 0, self.count[row]))
        return Written(emitted, self.count + count_B)


def read_loop(arrays: Any) -> list[Progress]:
    """Reads `(Written, accepted [B, S], rounds [B], done [B])` of a loop; a loop without drafts has no rounds."""
    (emitted, count), accepted, rounds, done = arrays
    logprobs = emitted[:, 1].view(np.float32)
    found = []
    for row, n in enumerate(count.tolist()):
        verified = [Round(int(a)) for a in accepted[row, : rounds[row]]] if accepted is not None else []
        found.append(Progress(emitted[row, 0, :n].tolist(), logprobs[row, :n].tolist(), verified, bool(done[row])))
    return found

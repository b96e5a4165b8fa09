"""Plain autoregressive decoding: one `lax.while_loop`, nothing of drafting in its way.

This is the baseline of every speed-up, so the whole loop is one program: no host between tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from d3d_jax.config import AttentionConfig, ModelConfig
from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.placement import Placed, Settings
from d3d_jax.decoding.policies import Tactic
from d3d_jax.decoding.programs import prefill_target
from d3d_jax.decoding.rounds import Launched, Until, Written, end_row, read_first, read_loop
from d3d_jax.decoding.sampling import Sampling, choose, log_probability
from d3d_jax.decoding.state import Outcome, PromptChunk, Stop
from d3d_jax.models.attention import AUTO
from d3d_jax.models.cache import KVCache
from d3d_jax.models.qwen3 import Params, append, logits


def decode_autoregressively(
    params: Params,
    cache: KVCache,
    outcome: Outcome,
    sampling: Sampling | None,
    stop: Stop,
    until: Until,
    config: ModelConfig,
    attention: AttentionConfig = AUTO,
) -> tuple[Written, Outcome, KVCache]:
    """From each row's last token until every row is done, or `until`."""

    def body(carry: tuple) -> tuple:
        cache, (_, token, done), written, number = carry
        hidden, cache = append(params, token[:, None], cache, config, attention)
        length = cache.length + ~done
        scores = logits(params, hidden)
        following = choose(scores, length[:, None], sampling)
        written = written.add(following, log_probability(scores, following), (~done).astype(jnp.int32))
        ended = done | stop.ends(following)[:, 0] | (length + 1 >= stop.limit)
        following = jnp.where(done, token, following[:, 0])
        outcome = Outcome(jnp.zeros_like(following), following, ended)
        return cache._replace(length=length), outcome, written, number + 1

    batch, size = outcome.bonus.shape[0], cache.capacity
    if batch == 1:
        cache = cache.single_row()
    carry = (cache, outcome, Written.empty(batch, size), jnp.zeros((), jnp.int32))
    cache, outcome, written, _ = jax.lax.while_loop(lambda carry: until.go_on(carry[3], carry[1].done), body, carry)
    return written, outcome, cache.with_batch_axis() if batch == 1 else cache


def decode_block_alone(
    params: Params,
    outcome: Outcome,
    cache: KVCache,
    sampling: Sampling | None,
    stop: Stop,
    size: int,
    config: ModelConfig,
    attention: AttentionConfig = AUTO,
) -> tuple[jax.Array, KVCache, Outcome, jax.Array]:
    """`size` further tokens of each row, or up to its end, in the shape of a verified block.

    Returns the block int32 [B, G] as if drafts had been accepted to the last, the cache, the outcome, and the record of
    `rounds.verify_recorded`: so the drafter can go on from there as from any round.
    """
    until = Until(size, outcome.done.size + 1)
    written, after, cache = decode_autoregressively(params, cache, outcome, sampling, stop, until, config, attention)
    tokens, bits = written.emitted[:, 0, :size], written.emitted[:, 1, :size]
    accepted = jnp.maximum(written.count - 1, 0)
    block = jnp.concatenate([outcome.bonus[:, None], tokens[:, :-1]], axis=1)
    columns = jnp.stack([accepted, jnp.zeros_like(accepted), outcome.done, after.done], axis=1, dtype=jnp.int32)
    return block, cache, after._replace(accepted=accepted), jnp.concatenate([tokens, bits, columns], axis=1)


class Autoregressive:
    """Mode `ar`."""

    compiled_loop = True

    def __init__(self, placed: Placed):
        self._target = placed.target
        fixed = placed.target.fixed()
        self._prefill = placed.target.compiled(partial(prefill_target, **fixed), donate_argnums=2)
        self._loop = placed.target.compiled(partial(decode_autoregressively, **fixed), donate_argnums=1)
        self._end_row = placed.target.compiled(end_row)
        self._cache = placed.target.cache(placed.rows)
        self._outcome = jax.device_put(Outcome.of_free_rows(placed.rows), placed.target.home)

    def prefill(self, chunk: PromptChunk, settings: Settings) -> tuple[Launched, Any]:
        placed, device = self._target, self._target.home
        self._cache, self._outcome, first = self._prefill(
            placed.params,
            jax.device_put(chunk, device),
            self._cache,
            self._outcome,
            settings.sampling(device),
            settings.stop(device),
        )
        return Launched((first, self._outcome.done), read_first(int(chunk.slot))), first

    def launch(self, number: int, settings: Settings, until: Until, observer: Observer) -> Launched:
        device = self._target.home
        written, self._outcome, self._cache = self._loop(
            self._target.params,
            self._cache,
            self._outcome,
            settings.sampling(device),
            settings.stop(device),
            jax.device_put(until, device),
        )
        observer.launched("loop", "target", number, written)
        return Launched((written, None, None, self._outcome.done), read_loop)

    def rehearsal(self) -> AbstractContextManager[int]:
        return nullcontext(1)

    def rates(self) -> dict[Tactic, float]:
        return {}

    def release(self, slot: int) -> None:
        self._outcome = self._end_row(self._outcome, jax.device_put(slot, self._target.home))

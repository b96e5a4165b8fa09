"""Rounds as the host sees them: launched ahead, read late (docs/algorithm.md 4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.config import ModelConfig
from d3d_jax.decoding.programs import verify
from d3d_jax.decoding.sampling import Sampling
from d3d_jax.decoding.state import Outcome, Round, Stop
from d3d_jax.models.cache import KVCache
from d3d_jax.models.qwen3 import Params


class RoundRecord(NamedTuple):
    """What the host reads of a round; one small array on the device.

    emitted [B, G]: `accepted` drafts, then the bonus, then leftovers. hit [B]: the bonus had been foreseen.
    done [B]: the row had ended before this round, which then counts for nothing.
    """

    emitted: np.ndarray
    accepted: np.ndarray
    hit: np.ndarray
    done: np.ndarray


def verify_recorded(
    params: Params,
    block_BG: jax.Array,
    hit_B: jax.Array,
    outcome: Outcome,
    cache: KVCache,
    sampling: Sampling | None,
    stop: Stop,
    config: ModelConfig,
) -> tuple[KVCache, Outcome, jax.Array]:
    """`programs.verify` of the block that follows `outcome`, with the round's record as int32 [B, G + 4]."""
    cache, after, own = verify(params, block_BG, outcome.done, cache, sampling, stop, config)
    columns = jnp.stack([after.accepted, hit_B, outcome.done, after.done], axis=1, dtype=jnp.int32)
    return cache, after, jnp.concatenate([own, columns], axis=1)


def drive(launch: Callable[[int], jax.Array], lookahead: int) -> list[RoundRecord]:
    """Launch rounds until every row is done; return the records of the rounds up to there.

    `launch(number)` enqueues a round and returns its record, unread. The host stays `lookahead` rounds ahead
    of what it reads, so a device never waits for it.
    """
    unread: deque[jax.Array] = deque()
    records: list[RoundRecord] = []
    number = 0
    with jax.transfer_guard("disallow"):  # only the transfers that are written out
        while True:
            record = launch(number)
            record.copy_to_host_async()
            unread.append(record)
            number += 1
            if len(unread) >= lookahead:
                *emitted, accepted, hit, done, ended = jax.device_get(unread.popleft()).T
                records.append(RoundRecord(np.stack(emitted, axis=1), accepted, hit.astype(bool), done.astype(bool)))
                if ended.all():
                    return records


def collect(
    first: Sequence[int], records: Sequence[RoundRecord], *, foreseen: bool, redraft: bool
) -> tuple[list[list[int]], list[tuple[Round, ...]]]:
    """Tokens and rounds of each row. `foreseen`: drafting was ahead of the bonus token, so that `hit` means
    something; `redraft`: missed blocks were drafted again.
    """
    texts, traces = [[int(token)] for token in first], [[] for _ in first]
    for record in records:
        for row, text in enumerate(texts):
            if record.done[row]:
                continue
            accepted = int(record.accepted[row])
            hit = bool(record.hit[row]) if foreseen else None
            text.extend(int(token) for token in record.emitted[row, : accepted + 1])
            traces[row].append(Round(accepted, hit, redraft and hit is False))
    return texts, [tuple(trace) for trace in traces]

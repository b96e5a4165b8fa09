"""Plain autoregressive decoding: one `lax.while_loop`, nothing of drafting in its way.

This is the baseline of every speed-up, so the whole loop is one program: no host between tokens.
"""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from d3d_jax.config import ModelConfig
from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.placement import Placed, PromptBatch
from d3d_jax.decoding.programs import prefill_target
from d3d_jax.decoding.sampling import Sampling, choose
from d3d_jax.decoding.state import Decoded, Outcome, Stop
from d3d_jax.models.cache import KVCache
from d3d_jax.models.qwen3 import Params, append, logits


class Written(NamedTuple):
    """Tokens that a loop on the device has emitted: int32 [B, size], and how many of each row count, int32 [B]."""

    tokens: jax.Array
    count: jax.Array

    def rows(self) -> list[list[int]]:
        tokens, count = jax.device_get(self)
        return [[int(token) for token in row[:n]] for row, n in zip(tokens, count, strict=True)]


def start_writing(first_B: jax.Array, size: int) -> Written:
    """A buffer that holds the first token, which prefill gave."""
    tokens = jnp.zeros((first_B.shape[0], size), jnp.int32)
    return Written(tokens.at[:, 0].set(first_B), jnp.ones_like(first_B))


def write_tokens(written: Written, tokens_BG: jax.Array, count_B: jax.Array) -> Written:
    """Append the first `count` of each row's tokens; the buffer has room for the rest, overwritten next time."""
    tokens = written.tokens
    for row in range(tokens.shape[0]):
        tokens = jax.lax.dynamic_update_slice(tokens, tokens_BG[row : row + 1], (row, written.count[row]))
    return Written(tokens, written.count + count_B)


def decode_autoregressively(
    params: Params,
    cache: KVCache,
    outcome: Outcome,
    sampling: Sampling | None,
    stop: Stop,
    config: ModelConfig,
) -> tuple[Written, KVCache]:
    """From the first token to the end of every row."""

    def body(carry: tuple[KVCache, Outcome, Written]) -> tuple[KVCache, Outcome, Written]:
        cache, (_, token, done), written = carry
        hidden, cache = append(params, token[:, None], cache, config)
        length = cache.length + ~done
        following = choose(logits(params, hidden), length[:, None], sampling)
        written = write_tokens(written, following, (~done).astype(jnp.int32))
        following = following[:, 0]
        ended = done | jnp.isin(following, stop.ids) | (length + 1 >= stop.limit)
        return cache._replace(length=length), Outcome(jnp.zeros_like(following), following, ended), written

    alone = outcome.bonus.shape[0] == 1
    if alone:
        cache = cache.single_row()
    carry = (cache, outcome, start_writing(outcome.bonus, cache.capacity))
    cache, _, written = jax.lax.while_loop(lambda carry: ~jnp.all(carry[1].done), body, carry)
    return written, cache.with_batch_axis() if alone else cache


class Autoregressive:
    """Mode `ar`."""

    def __init__(self, placed: Placed):
        self._target = placed.target
        config = placed.target.config
        self._prefill = jax.jit(partial(prefill_target, config=config), donate_argnums=2)
        self._loop = jax.jit(partial(decode_autoregressively, config=config), donate_argnums=1)

    def __call__(self, batch: PromptBatch, observer: Observer) -> Decoded:
        begin = time.perf_counter()
        side = self._target
        cache = side.cache(batch.tokens.shape[0])
        cache, outcome = self._prefill(side.params, batch[:2], cache, batch.sampling, batch.stop)
        jax.block_until_ready(outcome)
        ready = time.perf_counter()
        written, cache = self._loop(side.params, cache, outcome, batch.sampling, batch.stop)
        observer.launched("loop", "target", 0, written)
        rows = written.rows()
        return Decoded(rows, [()] * len(rows), ready - begin, time.perf_counter() - ready)

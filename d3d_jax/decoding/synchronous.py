"""Synchronous speculative decoding: draft from the anchor, then verify.

On one device the whole loop is one program; on two, or step by step, a round is two programs: draft, verify.
"""

from __future__ import annotations

import time
from functools import partial

import jax
import jax.numpy as jnp

from d3d_jax.config import ModelConfig
from d3d_jax.decoding.autoregressive import Written, start_writing, write_tokens
from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.placement import Placed, PromptBatch
from d3d_jax.decoding.prefill import PairPrefill
from d3d_jax.decoding.programs import (
    Drafting,
    advance,
    anchored_draft,
    in_flight_at_prompt_end,
    verify,
)
from d3d_jax.decoding.rounds import collect, drive, verify_recorded
from d3d_jax.decoding.sampling import Sampling
from d3d_jax.decoding.state import Decoded, Outcome, Round, Stop
from d3d_jax.models.cache import KVCache
from d3d_jax.models.qwen3 import Params


def draft(
    params: Params,
    previous_BG: jax.Array,
    outcome: Outcome,
    cache: KVCache,
    sampling: Sampling | None,
    how: Drafting,
) -> tuple[jax.Array, KVCache]:
    """The next block, from the previous one and its outcome.

    The cache lacks the previous block's tokens; they are written here, rejected ones too, which the new
    length leaves out.
    """
    following = advance(cache, outcome)
    block, _, cache = anchored_draft(params, previous_BG, outcome.bonus, following.length, cache, sampling, how)
    return block, cache._replace(length=following.length)


def decode_synchronously(
    target: Params,
    drafter: Params,
    target_cache: KVCache,
    drafter_cache: KVCache,
    previous_BG: jax.Array,
    outcome: Outcome,
    sampling: Sampling | None,
    stop: Stop,
    config: ModelConfig,
    how: Drafting,
) -> tuple[Written, jax.Array, jax.Array, tuple[KVCache, KVCache]]:
    """The whole loop on one device.

    Returns the tokens, the drafts accepted in each round int32 [B, S], the rounds of each row int32 [B], and the
    caches, so that those passed in can be donated.
    """
    size = target_cache.capacity

    def body(carry: tuple) -> tuple:
        target_cache, drafter_cache, previous, outcome, written, trace, rounds, number = carry
        done = outcome.done
        block, drafter_cache = draft(drafter, previous, outcome, drafter_cache, sampling, how)
        target_cache, outcome, own = verify(target, block, done, target_cache, sampling, stop, config)
        written = write_tokens(written, own, jnp.where(done, 0, outcome.accepted + 1))
        trace = jax.lax.dynamic_update_slice(trace, outcome.accepted[:, None], (0, number))
        return target_cache, drafter_cache, block, outcome, written, trace, rounds + ~done, number + 1

    alone = outcome.bonus.shape[0] == 1
    if alone:
        target_cache, drafter_cache = target_cache.single_row(), drafter_cache.single_row()
    rounds = jnp.zeros_like(outcome.bonus)
    trace = jnp.zeros((rounds.shape[0], size), jnp.int32)
    written = start_writing(outcome.bonus, size)
    carry = (target_cache, drafter_cache, previous_BG, outcome, written, trace, rounds, jnp.zeros((), jnp.int32))
    carry = jax.lax.while_loop(lambda carry: ~jnp.all(carry[3].done), body, carry)
    caches = (carry[0].with_batch_axis(), carry[1].with_batch_axis()) if alone else carry[:2]
    return carry[4], carry[5], carry[6], caches


class Synchronous:
    """Mode `sync`."""

    def __init__(self, placed: Placed):
        drafter, how = placed.drafting()
        self._target, self._drafter, self._decode = placed.target, drafter, placed.decode
        self._one_program = placed.target.device == drafter.device and not placed.decode.step_by_step
        config = placed.target.config
        self._prefill = PairPrefill(placed)
        self._previous = jax.jit(partial(in_flight_at_prompt_end, how=how))
        self._loop = jax.jit(partial(decode_synchronously, config=config, how=how), donate_argnums=(2, 3))
        self._draft = jax.jit(partial(draft, how=how), donate_argnums=3)
        self._verify = jax.jit(partial(verify_recorded, config=config), donate_argnums=4)

    def __call__(self, batch: PromptBatch, observer: Observer) -> Decoded:
        target, drafter = self._target, self._drafter
        filled = self._prefill(batch)
        there, outcome, known = filled.there, filled.outcome, filled.known
        cache, draft_cache = filled.target_cache, filled.state.cache
        previous = self._previous(*there[:2])
        if self._one_program:
            written, trace, rounds, _ = self._loop(
                target.params,
                drafter.params,
                cache,
                draft_cache,
                previous,
                outcome,
                batch.sampling,
                batch.stop,
            )
            observer.launched("loop", "target", 0, written)
            rows = written.rows()
            accepted, rounds = jax.device_get((trace, rounds))
            traces = [tuple(Round(int(a)) for a in row[:n]) for row, n in zip(accepted, rounds, strict=True)]
            return Decoded(rows, traces, filled.ready - filled.begin, time.perf_counter() - filled.ready)

        nothing_foreseen = jax.device_put(jnp.zeros(len(filled.first), bool), target.device)

        def launch(number: int) -> jax.Array:
            nonlocal cache, draft_cache, previous, outcome, known
            previous, draft_cache = self._draft(drafter.params, previous, known, draft_cache, there.sampling)
            observer.launched("draft", "drafter", number, previous)
            block = jax.device_put(previous, target.device)
            cache, outcome, record = self._verify(
                target.params, block, nothing_foreseen, outcome, cache, batch.sampling, batch.stop
            )
            observer.launched("verify", "target", number, record)
            known = jax.device_put(outcome, drafter.device)
            return record

        observer.restart()
        records = drive(launch, self._decode.lookahead)
        rows, traces = collect(filled.first, records, foreseen=False, redraft=False)
        return Decoded(rows, traces, filled.ready - filled.begin, time.perf_counter() - filled.ready)

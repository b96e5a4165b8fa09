"""The asynchronous loop: the drafter drafts every outcome's successor while the target verifies (docs/algorithm.md 4).

The host only launches. In round t both devices start from the successors and the outcome of round t-1; what
crosses between them is the successors (or the chosen block) one way and the outcome the other way.

Programs of a round, by miss policy:

    keep       target: verify(select(S, outcome))      drafter: packed(select(S, outcome))
    redraft    drafter: choose -> block                target: verify(block)      drafter: packed(block)
"""

from __future__ import annotations

import time
from functools import partial

import jax

from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.placement import Placed, PromptBatch
from d3d_jax.decoding.prefill import PairPrefill
from d3d_jax.decoding.programs import (
    Drafting,
    advance,
    packed_draft,
    redraft_missed,
    select,
    selected_confidence,
)
from d3d_jax.decoding.rounds import collect, drive, verify_recorded
from d3d_jax.decoding.sampling import Sampling
from d3d_jax.decoding.state import Decoded, DraftState, Outcome, Successors
from d3d_jax.models.qwen3 import Params


def packed_after(
    params: Params,
    block_BG: jax.Array,
    confidence_BG: jax.Array,
    outcome: Outcome,
    state: DraftState,
    sampling: Sampling | None,
    how: Drafting,
) -> tuple[DraftState, Successors]:
    """The packed pass over the block that follows `outcome`."""
    return packed_draft(params, block_BG, confidence_BG, advance(state.cache, outcome), sampling, how)


class Asynchronous:
    """Mode `async`, on two devices or one."""

    def __init__(self, placed: Placed):
        drafter, how = placed.drafting()
        self._target, self._drafter, self._decode = placed.target, drafter, placed.decode
        config = placed.target.config

        def select_verify(params, successors, outcome, *rest):
            block, hit = select(successors, outcome)
            return verify_recorded(params, block, hit, outcome, *rest, config=config)

        def select_packed(params, successors, outcome, state, sampling):
            block, _ = select(successors, outcome)
            return packed_after(params, block, selected_confidence(state, outcome), outcome, state, sampling, how)

        self._prefill = PairPrefill(placed)
        # A donated argument's memory becomes the result's: the caches, which no other program reads.
        self._select_verify = jax.jit(select_verify, donate_argnums=3)
        self._select_packed = jax.jit(select_packed, donate_argnums=3)
        self._choose = jax.jit(partial(redraft_missed, how=how))
        self._verify = jax.jit(partial(verify_recorded, config=config), donate_argnums=4)
        self._packed = jax.jit(partial(packed_after, how=how), donate_argnums=4)

    def __call__(self, batch: PromptBatch, observer: Observer) -> Decoded:
        target, drafter = self._target, self._drafter
        filled = self._prefill(batch)
        there, outcome, known = filled.there, filled.outcome, filled.known
        cache, state, successors = filled.target_cache, filled.state, filled.successors

        def keep(number: int) -> jax.Array:
            nonlocal cache, outcome, state, successors, known
            offered = jax.device_put(successors, target.device)
            cache, outcome, record = self._select_verify(
                target.params, offered, outcome, cache, batch.sampling, batch.stop
            )
            observer.launched("verify", "target", number, record)
            state, successors = self._select_packed(drafter.params, successors, known, state, there.sampling)
            observer.launched("packed", "drafter", number, successors)
            known = jax.device_put(outcome, drafter.device)
            return record

        def redraft(number: int) -> jax.Array:
            nonlocal cache, outcome, state, successors, known
            block, confidence, hit = self._choose(drafter.params, successors, known, state, there.sampling)
            observer.launched("choose", "drafter", number, hit)
            offered, foreseen = jax.device_put((block, hit), target.device)
            cache, outcome, record = self._verify(
                target.params, offered, foreseen, outcome, cache, batch.sampling, batch.stop
            )
            observer.launched("verify", "target", number, record)
            state, successors = self._packed(drafter.params, block, confidence, known, state, there.sampling)
            observer.launched("packed", "drafter", number, successors)
            known = jax.device_put(outcome, drafter.device)
            return record

        observer.restart()
        again = self._decode.miss == "redraft"
        records = drive(redraft if again else keep, self._decode.lookahead)
        rows, traces = collect(filled.first, records, foreseen=True, redraft=again)
        return Decoded(rows, traces, filled.ready - filled.begin, time.perf_counter() - filled.ready)

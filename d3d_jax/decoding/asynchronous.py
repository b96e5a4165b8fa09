"""The asynchronous loop: the drafter drafts every outcome's successor while the target verifies (docs/algorithm.md 4).

The host only launches. In round t both devices start from the successors and the outcome of round t-1; what
crosses between them is the successors (or the chosen block) one way and the outcome the other way.

Programs of a round, by miss policy (which a `policies.Policy` may choose anew for each round):

    keep       target: verify(select(S, outcome))      drafter: packed(select(S, outcome))
    redraft    drafter: choose -> block                target: verify(block)      drafter: packed(block)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import jax

from d3d_jax.decoding.branches import select, selected_odds
from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.placement import Placed, Settings
from d3d_jax.decoding.policies import InTurn, Tactic, policy_for, tactics
from d3d_jax.decoding.programs import (
    Drafting,
    advance,
    no_successors,
    packed_draft,
    prefill_drafter,
    prefill_target,
    redraft_missed,
)
from d3d_jax.decoding.rounds import Launched, Until, end_row, read_first, read_round, verify_recorded
from d3d_jax.decoding.sampling import Sampling
from d3d_jax.decoding.state import DraftState, Odds, Outcome, Progress, PromptChunk, Successors
from d3d_jax.models.qwen3 import Params


def packed_after(
    params: Params,
    block_BG: jax.Array,
    odds: Odds,
    outcome: Outcome,
    state: DraftState,
    sampling: Sampling | None,
    how: Drafting,
    outcomes: Literal["all"] | int,
) -> tuple[DraftState, Successors]:
    """The packed pass over the block that follows `outcome`."""
    return packed_draft(params, block_BG, odds, advance(state.cache, outcome), sampling, how, outcomes)


class Asynchronous:
    """Mode `async`, on two devices or one."""

    compiled_loop = False

    def __init__(self, placed: Placed):
        drafter, how = placed.drafting()
        self._target, self._drafter = placed.target, drafter
        self._tactics = tactics(placed.decode)
        self._policy = policy_for(self._tactics)
        self._read_at, self._interrupted = 0.0, True
        fixed = placed.target.fixed()

        def select_verify(params, successors, outcome, *rest):
            block, hit = select(successors, outcome)
            return verify_recorded(params, block, hit, outcome, *rest, **fixed)

        def select_packed(params, successors, outcome, state, sampling, outcomes):
            block, _ = select(successors, outcome)
            odds = selected_odds(state.odds, successors, outcome)
            return packed_after(params, block, odds, outcome, state, sampling, how, outcomes)

        self._prefill_target = jax.jit(partial(prefill_target, **fixed), donate_argnums=2)
        self._prefill_drafter = jax.jit(partial(prefill_drafter, how=how), donate_argnums=2)
        # A donated argument's memory becomes the result's: the caches, which no other program reads.
        self._select_verify = jax.jit(select_verify, donate_argnums=3)
        self._select_packed = jax.jit(select_packed, donate_argnums=3, static_argnums=5)
        self._choose = jax.jit(partial(redraft_missed, how=how))
        self._verify = jax.jit(partial(verify_recorded, **fixed), donate_argnums=4)
        self._packed = jax.jit(partial(packed_after, how=how), donate_argnums=4, static_argnames="outcomes")
        self._end_row = jax.jit(end_row)

        self._cache = placed.target.cache(placed.rows)
        self._outcome = jax.device_put(Outcome.of_free_rows(placed.rows), placed.target.device)
        odds, successors = no_successors(how, placed.rows)
        state = DraftState(drafter.cache(placed.rows), odds)
        self._state, self._successors = jax.device_put((state, successors), drafter.device)

    def prefill(self, chunk: PromptChunk, settings: Settings) -> tuple[Launched, Any]:
        target, drafter = self._target, self._drafter
        self._cache, self._outcome, first = self._prefill_target(
            target.params,
            jax.device_put(chunk, target.device),
            self._cache,
            self._outcome,
            settings.sampling(target.device),
            settings.stop(target.device),
        )
        self._state, self._successors = self._prefill_drafter(
            drafter.params,
            jax.device_put(chunk, drafter.device),
            self._state,
            self._successors,
            settings.sampling(drafter.device),
        )
        self._interrupted = True
        return Launched((first, self._outcome.done), read_first(int(chunk.slot))), (first, self._successors)

    def launch(self, number: int, settings: Settings, until: Until, observer: Observer) -> Launched:
        known, tactic = jax.device_put(self._outcome, self._drafter.device), self._policy.next()
        round_of = self._redrafting if tactic.redraft else self._keeping
        record = round_of(number, known, settings, observer, tactic.outcomes)
        read = self._timed(tactic, self._interrupted, read_round(foreseen=True, redraft=tactic.redraft))
        self._interrupted = False
        return Launched(record, read)

    @contextmanager
    def rehearsal(self) -> Iterator[int]:
        usual, self._policy = self._policy, InTurn(self._tactics)
        yield len(self._tactics)
        self._policy = usual

    def _timed(self, tactic: Tactic, interrupted: bool, read: Callable[[Any], list[Progress]]) -> Callable:
        """Rounds are read one after the other, so a round takes from one reading to the next, unless a chunk of a
        prompt came before it.
        """

        def read_timed(record: Any) -> list[Progress]:
            found, before, self._read_at = read(record), self._read_at, time.perf_counter()
            if not interrupted:
                self._policy.observe(tactic, sum(len(row.tokens) for row in found), self._read_at - before)
            return found

        return read_timed

    def _keeping(
        self, number: int, known: Outcome, settings: Settings, observer: Observer, outcomes: Literal["all"] | int
    ) -> jax.Array:
        target, drafter = self._target, self._drafter
        offered = jax.device_put(self._successors, target.device)
        self._cache, self._outcome, record = self._select_verify(
            target.params,
            offered,
            self._outcome,
            self._cache,
            settings.sampling(target.device),
            settings.stop(target.device),
        )
        observer.launched("verify", "target", number, record)
        self._state, self._successors = self._select_packed(
            drafter.params, self._successors, known, self._state, settings.sampling(drafter.device), outcomes
        )
        observer.launched("packed", "drafter", number, self._successors)
        return record

    def _redrafting(
        self, number: int, known: Outcome, settings: Settings, observer: Observer, outcomes: Literal["all"] | int
    ) -> jax.Array:
        target, drafter = self._target, self._drafter
        there = settings.sampling(drafter.device)
        block, odds, hit = self._choose(drafter.params, self._successors, known, self._state, there)
        observer.launched("choose", "drafter", number, hit)
        offered, foreseen = jax.device_put((block, hit), target.device)
        self._cache, self._outcome, record = self._verify(
            target.params,
            offered,
            foreseen,
            self._outcome,
            self._cache,
            settings.sampling(target.device),
            settings.stop(target.device),
        )
        observer.launched("verify", "target", number, record)
        self._state, self._successors = self._packed(
            drafter.params, block, odds, known, self._state, there, outcomes=outcomes
        )
        observer.launched("packed", "drafter", number, self._successors)
        return record

    def release(self, slot: int) -> None:
        self._outcome = self._end_row(self._outcome, jax.device_put(slot, self._target.device))

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


MOSTLY_THERE = 0.2  # of a round's time the host may be elsewhere, for the time to count


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

        self._prefill_target = placed.target.compiled(partial(prefill_target, **fixed), donate_argnums=2)
        self._prefill_drafter = drafter.compiled(partial(prefill_drafter, how=how), donate_argnums=2)
        # A donated argument's memory becomes the result's: the caches, which no other program reads.
        self._select_verify = placed.target.compiled(select_verify, donate_argnums=3)
        self._select_packed = drafter.compiled(select_packed, donate_argnums=3, static_argnums=5)
        self._choose = drafter.compiled(partial(redraft_missed, how=how))
        self._verify = placed.target.compiled(partial(verify_recorded, **fixed), donate_argnums=4)
        self._packed = drafter.compiled(partial(packed_after, how=how), donate_argnums=4, static_argnames="outcomes")
        self._end_row = placed.target.compiled(end_row)

        self._cache = placed.target.cache(placed.rows)
        self._outcome = jax.device_put(Outcome.of_free_rows(placed.rows), placed.target.home)
        odds, successors = no_successors(how, placed.rows)
        state = DraftState(drafter.cache(placed.rows), odds)
        self._state, self._successors = jax.device_put((state, successors), drafter.home)

    def prefill(self, chunk: PromptChunk, settings: Settings) -> tuple[Launched, Any]:
        target, drafter = self._target, self._drafter
        self._cache, self._outcome, first = self._prefill_target(
            target.params,
            jax.device_put(chunk, target.home),
            self._cache,
            self._outcome,
            settings.sampling(target.home),
            settings.stop(target.home),
        )
        self._state, self._successors = self._prefill_drafter(
            drafter.params,
            jax.device_put(chunk, drafter.home),
            self._state,
            self._successors,
            settings.sampling(drafter.home),
        )
        self._interrupted = True
        return Launched((first, self._outcome.done), read_first(int(chunk.slot))), (first, self._successors)

    def launch(self, number: int, settings: Settings, until: Until, observer: Observer) -> Launched:
        away = time.perf_counter() - self._read_at
        known, tactic = jax.device_put(self._outcome, self._drafter.home), self._policy.next()
        round_of = self._redrafting if tactic.redraft else self._keeping
        record = round_of(number, known, settings, observer, tactic.outcomes)
        away_s, self._interrupted = (None if self._interrupted else away), False
        read = self._timed(tactic, away_s, read_round(foreseen=True, redraft=tactic.redraft))
        return Launched(record, read)

    @contextmanager
    def rehearsal(self) -> Iterator[int]:
        usual, self._policy = self._policy, InTurn(self._tactics)
        try:
            yield len(self._tactics)
        finally:
            self._policy = usual

    def _timed(self, tactic: Tactic, away_s: float | None, read: Callable[[Any], list[Progress]]) -> Callable:
        """Rounds are read one after the other, so a round takes from one reading to the next; unless a chunk of a
        prompt came before it, or the host was `away` for much of that time, with someone who reads a stream slowly.
        """

        def read_timed(record: Any) -> list[Progress]:
            found, before, self._read_at = read(record), self._read_at, time.perf_counter()
            took = self._read_at - before
            told = away_s is not None and away_s < MOSTLY_THERE * took and any(row.rounds for row in found)
            self._policy.observe(tactic, sum(len(row.tokens) for row in found), took if told else None)
            return found

        return read_timed

    def _keeping(
        self, number: int, known: Outcome, settings: Settings, observer: Observer, outcomes: Literal["all"] | int
    ) -> jax.Array:
        target, drafter = self._target, self._drafter
        offered = jax.device_put(self._successors, target.home)
        self._cache, self._outcome, record = self._select_verify(
            target.params,
            offered,
            self._outcome,
            self._cache,
            settings.sampling(target.home),
            settings.stop(target.home),
        )
        observer.launched("verify", "target", number, record)
        self._state, self._successors = self._select_packed(
            drafter.params, self._successors, known, self._state, settings.sampling(drafter.home), outcomes
        )
        observer.launched("packed", "drafter", number, self._successors)
        return record

    def _redrafting(
        self, number: int, known: Outcome, settings: Settings, observer: Observer, outcomes: Literal["all"] | int
    ) -> jax.Array:
        target, drafter = self._target, self._drafter
        there = settings.sampling(drafter.home)
        block, odds, hit = self._choose(drafter.params, self._successors, known, self._state, there)
        observer.launched("choose", "drafter", number, hit)
        offered, foreseen = jax.device_put((block, hit), target.home)
        self._cache, self._outcome, record = self._verify(
            target.params,
            offered,
            foreseen,
            self._outcome,
            self._cache,
            settings.sampling(target.home),
            settings.stop(target.home),
        )
        observer.launched("verify", "target", number, record)
        self._state, self._successors = self._packed(
            drafter.params, block, odds, known, self._state, there, outcomes=outcomes
        )
        observer.launched("packed", "drafter", number, self._successors)
        return record

    def release(self, slot: int) -> None:
        self._outcome = self._end_row(self._outcome, jax.device_put(slot, self._target.home))

"""The asynchronous loop: the drafter drafts every outcome's successor while the target verifies (docs/algorithm.md 4).

The host only launches. In round t both devices start from the successors and the outcome of round t-1; what
crosses between them is the successors (or the chosen block) one way and the outcome the other way.

Programs of a round, by miss policy (which a `policies.Policy` may choose anew for each round):

    keep       target: verify(select(S, outcome))      drafter: packed(select(S, outcome))
    redraft    drafter: choose -> block                target: verify(block)      drafter: packed(block)

and where drafting ahead, or drafting at all, does not pay (`policies.WITH_BONUS`, `policies.PLAIN`):

    with bonus drafter: choose -> block                target: verify(block)      drafter: feed(block)
    plain      target: plain -> block                  drafter: feed(block)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax

from d3d_jax.decoding.autoregressive import decode_block_alone
from d3d_jax.decoding.branches import select, selected_odds
from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.placement import Placed, Settings
from d3d_jax.decoding.policies import PLAIN, Steering, Tactic, tactics
from d3d_jax.decoding.programs import (
    Drafting,
    advance,
    feed,
    no_successors,
    packed_draft,
    prefill_drafter,
    prefill_target,
    redraft_missed,
)
from d3d_jax.decoding.rounds import Launched, Until, end_row, read_first, read_round, verify_recorded
from d3d_jax.decoding.sampling import Sampling
from d3d_jax.decoding.state import DraftState, Odds, Outcome, PromptChunk, Successors
from d3d_jax.models.qwen3 import Params


def packed_after(
    params: Params,
    block_BG: jax.Array,
    odds: Odds,
    outcome: Outcome,
    state: DraftState,
    sampling: Sampling | None,
    how: Drafting,
    tactic: Tactic,
) -> tuple[DraftState, Successors]:
    """The packed pass over the block that follows `outcome`."""
    return packed_draft(params, block_BG, odds, advance(state.cache, outcome), sampling, how, tactic)


def feed_after(
    params: Params, block_BG: jax.Array, outcome: Outcome, state: DraftState, successors: Successors, how: Drafting
) -> tuple[DraftState, Successors]:
    """`programs.feed` of the block that follows `outcome`."""
    return feed(params, block_BG, state._replace(cache=advance(state.cache, outcome)), successors, how)


class Asynchronous:
    """Mode `async`, on two devices or one."""

    compiled_loop = False

    def __init__(self, placed: Placed):
        drafter, how = placed.drafting()
        self._target, self._drafter = placed.target, drafter
        self.steering = Steering(tactics(placed.decode))
        fixed = placed.target.fixed()

        def select_verify(params, successors, outcome, *rest):
            block, hit = select(successors, outcome)
            return verify_recorded(params, block, hit, outcome, *rest, **fixed)

        def select_packed(params, successors, outcome, state, sampling, tactic):
            block, _ = select(successors, outcome)
            odds = selected_odds(state.odds, successors, outcome)
            return packed_after(params, block, odds, outcome, state, sampling, how, tactic)

        self._prefill_target = placed.target.compiled(partial(prefill_target, **fixed), donate_argnums=2)
        self._prefill_drafter = drafter.compiled(partial(prefill_drafter, how=how), donate_argnums=2)
        # A donated argument's memory becomes the result's: the caches, which no other program reads.
        self._select_verify = placed.target.compiled(select_verify, donate_argnums=3)
        self._select_packed = drafter.compiled(select_packed, donate_argnums=3, static_argnums=5)
        self._choose = drafter.compiled(partial(redraft_missed, how=how))
        self._verify = placed.target.compiled(partial(verify_recorded, **fixed), donate_argnums=4)
        self._packed = drafter.compiled(partial(packed_after, how=how), donate_argnums=4, static_argnames="tactic")
        self._feed = drafter.compiled(partial(feed_after, how=how), donate_argnums=3)
        alone = partial(decode_block_alone, size=how.drafter.block_size, **fixed)
        self._plain = placed.target.compiled(alone, donate_argnums=2)
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
        self.steering.interrupt()
        return Launched((first, self._outcome.done), read_first(int(chunk.slot))), (first, self._successors)

    def launch(self, number: int, settings: Settings, until: Until, observer: Observer) -> Launched:
        known = jax.device_put(self._outcome, self._drafter.home)
        tactic, away_s = self.steering.next()
        if tactic == PLAIN:
            record = self._alone(number, known, settings, observer)
        else:
            round_of = self._redrafting if tactic.redraft else self._keeping
            record = round_of(number, known, settings, observer, tactic)
        return Launched(record, self.steering.timed(tactic, away_s, read_round(tactic)))

    def rehearsal(self) -> AbstractContextManager[int]:
        return self.steering.rehearsal()

    def rates(self) -> dict[Tactic, float]:
        return self.steering.rates()

    def _keeping(
        self, number: int, known: Outcome, settings: Settings, observer: Observer, tactic: Tactic
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
            drafter.params, self._successors, known, self._state, settings.sampling(drafter.home), tactic
        )
        observer.launched("packed", "drafter", number, self._successors)
        return record

    def _redrafting(
        self, number: int, known: Outcome, settings: Settings, observer: Observer, tactic: Tactic
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
        if tactic.drafts_ahead:
            self._state, self._successors = self._packed(
                drafter.params, block, odds, known, self._state, there, tactic=tactic
            )
            observer.launched("packed", "drafter", number, self._successors)
        else:
            self._take_note(block, known, number, observer)
        return record

    def _alone(self, number: int, known: Outcome, settings: Settings, observer: Observer) -> jax.Array:
        target = self._target
        block, self._cache, self._outcome, record = self._plain(
            target.params, self._outcome, self._cache, settings.sampling(target.home), settings.stop(target.home)
        )
        observer.launched("plain", "target", number, record)
        self._take_note(jax.device_put(block, self._drafter.home), known, number, observer)
        return record

    def _take_note(self, block: jax.Array, known: Outcome, number: int, observer: Observer) -> None:
        self._state, self._successors = self._feed(self._drafter.params, block, known, self._state, self._successors)
        observer.launched("feed", "drafter", number, self._successors)

    def release(self, slot: int) -> None:
        self._outcome = self._end_row(self._outcome, jax.device_put(slot, self._target.home))

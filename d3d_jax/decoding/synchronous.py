"""Synchronous speculative decoding: draft from the anchor, then verify.

On one device the whole loop is one program; on two, or step by step, a round is two programs: draft, verify.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.config import AttentionConfig, ModelConfig
from d3d_jax.decoding.autoregressive import decode_block_alone
from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.placement import Placed, Settings
from d3d_jax.decoding.policies import PLAIN, Steering, Tactic, tactics
from d3d_jax.decoding.programs import Drafting, advance, anchored_draft, prefill_previous, prefill_target, verify
from d3d_jax.decoding.rounds import (
    Launched,
    Until,
    Written,
    end_row,
    read_first,
    read_loop,
    read_round,
    verify_recorded,
)
from d3d_jax.decoding.sampling import Sampling
from d3d_jax.decoding.state import Outcome, PromptChunk, Stop
from d3d_jax.models.attention import AUTO
from d3d_jax.models.cache import KVCache
from d3d_jax.models.qwen3 import Params, append

ROUNDS_BETWEEN_CHOICES = 4  # of a loop on the device, where there is a tactic to choose


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


def take_note(params: Params, previous_BG: jax.Array, outcome: Outcome, cache: KVCache, how: Drafting) -> KVCache:
    """As :func:`draft`, with nothing drafted: the drafter's cache once the outcome of `previous` is known."""
    _, written = append(params, previous_BG, cache, how.model, how.attention)
    return written._replace(length=advance(cache, outcome).length)


def decode_synchronously(
    target: Params,
    drafter: Params,
    target_cache: KVCache,
    drafter_cache: KVCache,
    previous_BG: jax.Array,
    outcome: Outcome,
    sampling: Sampling | None,
    stop: Stop,
    until: Until,
    config: ModelConfig,
    how: Drafting,
    attention: AttentionConfig = AUTO,
) -> tuple[tuple[Written, jax.Array, jax.Array], jax.Array, Outcome, tuple[KVCache, KVCache]]:
    """The loop on one device, until every row is done, or `until`.

    Returns what was emitted, with the drafts accepted in each round int32 [B, S] and the rounds of each row int32
    [B]; the last block; its outcome; and the caches, so that those passed in can be donated.
    """
    batch, size = outcome.bonus.shape[0], target_cache.capacity

    def body(carry: tuple) -> tuple:
        target_cache, drafter_cache, previous, outcome, written, trace, rounds, number = carry
        done = outcome.done
        block, drafter_cache = draft(drafter, previous, outcome, drafter_cache, sampling, how)
        target_cache, outcome, own = verify(target, block, done, target_cache, sampling, stop, config, attention)
        written = written.add(*own, jnp.where(done, 0, outcome.accepted + 1))
        trace = jax.lax.dynamic_update_slice(trace, outcome.accepted[:, None], (0, number))
        return target_cache, drafter_cache, block, outcome, written, trace, rounds + ~done, number + 1

    if batch == 1:
        target_cache, drafter_cache = target_cache.single_row(), drafter_cache.single_row()
    zero = jnp.zeros((), jnp.int32)
    trace, rounds = jnp.zeros((batch, size), jnp.int32), jnp.zeros(batch, jnp.int32)
    written = Written.empty(batch, size)
    carry = (target_cache, drafter_cache, previous_BG, outcome, written, trace, rounds, zero)
    carry = jax.lax.while_loop(lambda carry: until.go_on(carry[7], carry[3].done), body, carry)
    caches = (carry[0].with_batch_axis(), carry[1].with_batch_axis()) if batch == 1 else carry[:2]
    return carry[4:7], carry[2], carry[3], caches


class Synchronous:
    """Mode `sync`."""

    def __init__(self, placed: Placed):
        drafter, how = placed.drafting()
        self._target, self._drafter = placed.target, drafter
        self.compiled_loop = placed.target.home == drafter.home and not placed.decode.step_by_step
        fixed = placed.target.fixed()
        self._prefill_target = placed.target.compiled(partial(prefill_target, **fixed), donate_argnums=2)
        self._prefill_drafter = drafter.compiled(partial(prefill_previous, how=how), donate_argnums=2)
        self._loop = placed.target.compiled(partial(decode_synchronously, how=how, **fixed), donate_argnums=(2, 3))
        self._draft = drafter.compiled(partial(draft, how=how), donate_argnums=3)
        self._verify = placed.target.compiled(partial(verify_recorded, **fixed), donate_argnums=4)
        self._feed = drafter.compiled(partial(take_note, how=how), donate_argnums=3)
        alone = partial(decode_block_alone, size=how.drafter.block_size, **fixed)
        self._plain = placed.target.compiled(alone, donate_argnums=2)
        self.steering = Steering(tactics(placed.decode))
        self._end_row = placed.target.compiled(end_row)
        self._cache, self._draft_cache = placed.target.cache(placed.rows), drafter.cache(placed.rows)
        self._outcome = jax.device_put(Outcome.of_free_rows(placed.rows), placed.target.home)
        self._previous = jax.device_put(jnp.zeros((placed.rows, how.drafter.block_size), jnp.int32), drafter.home)
        self._nothing_foreseen = jax.device_put(jnp.zeros(placed.rows, bool), placed.target.home)

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
        self._draft_cache, self._previous = self._prefill_drafter(
            drafter.params, jax.device_put(chunk, drafter.home), self._draft_cache, self._previous
        )
        self.steering.interrupt()
        return Launched((first, self._outcome.done), read_first(int(chunk.slot))), (first, self._previous)

    def launch(self, number: int, settings: Settings, until: Until, observer: Observer) -> Launched:
        target, drafter = self._target, self._drafter
        sampling, stop = settings.sampling(target.home), settings.stop(target.home)
        tactic, away_s = self.steering.next()
        if tactic == PLAIN:
            record = self._alone(number, settings, observer)
            return Launched(record, self.steering.timed(tactic, away_s, read_round(tactic)))
        if self.compiled_loop:
            if self.steering.chooses:
                until = until._replace(rounds=np.minimum(until.rounds, ROUNDS_BETWEEN_CHOICES))
            emitted, self._previous, self._outcome, (self._cache, self._draft_cache) = self._loop(
                target.params,
                drafter.params,
                self._cache,
                self._draft_cache,
                self._previous,
                self._outcome,
                sampling,
                stop,
                jax.device_put(until, target.home),
            )
            observer.launched("loop", "target", number, emitted)
            return Launched((*emitted, self._outcome.done), self.steering.timed(tactic, away_s, read_loop))
        known = jax.device_put(self._outcome, drafter.home)
        self._previous, self._draft_cache = self._draft(
            drafter.params, self._previous, known, self._draft_cache, settings.sampling(drafter.home)
        )
        observer.launched("draft", "drafter", number, self._previous)
        block = jax.device_put(self._previous, target.home)
        self._cache, self._outcome, record = self._verify(
            target.params, block, self._nothing_foreseen, self._outcome, self._cache, sampling, stop
        )
        observer.launched("verify", "target", number, record)
        return Launched(record, self.steering.timed(tactic, away_s, read_round(tactic)))

    def _alone(self, number: int, settings: Settings, observer: Observer) -> jax.Array:
        target, drafter = self._target, self._drafter
        known = jax.device_put(self._outcome, drafter.home)
        self._draft_cache = self._feed(drafter.params, self._previous, known, self._draft_cache)
        observer.launched("feed", "drafter", number, self._draft_cache.length)
        block, self._cache, self._outcome, record = self._plain(
            target.params, self._outcome, self._cache, settings.sampling(target.home), settings.stop(target.home)
        )
        observer.launched("plain", "target", number, record)
        self._previous = jax.device_put(block, drafter.home)
        return record

    def rehearsal(self) -> AbstractContextManager[int]:
        return self.steering.rehearsal()

    def rates(self) -> dict[Tactic, float]:
        return self.steering.rates()

    def release(self, slot: int) -> None:
        self._outcome = self._end_row(self._outcome, jax.device_put(slot, self._target.home))

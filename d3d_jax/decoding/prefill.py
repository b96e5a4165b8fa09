"""Prompts into both caches: what every mode that drafts starts from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import jax

from d3d_jax.decoding.placement import Placed, PromptBatch
from d3d_jax.decoding.programs import prefill_drafter, prefill_target
from d3d_jax.decoding.state import DraftState, Outcome, Successors
from d3d_jax.models.cache import KVCache


@dataclass(frozen=True)
class Prefilled:
    """Both models after the prompts, with the first token known.

    there: the prompts on the drafter's device. outcome, known: the first outcome on the target's and on the
    drafter's device. first: its bonus tokens on the host. begin, ready: `time.perf_counter` before and after.
    """

    there: PromptBatch
    target_cache: KVCache
    outcome: Outcome
    known: Outcome
    first: list[int]
    state: DraftState
    successors: Successors
    begin: float
    ready: float


class PairPrefill:
    """Prefill of target and drafter, each on its device; the two run side by side."""

    def __init__(self, placed: Placed):
        self._target = placed.target
        self._drafter, how = placed.drafting()
        self._run_target = jax.jit(partial(prefill_target, config=placed.target.config), donate_argnums=2)
        self._run_drafter = jax.jit(partial(prefill_drafter, how=how), donate_argnums=2)

    def __call__(self, batch: PromptBatch) -> Prefilled:
        begin = time.perf_counter()
        target, drafter, count = self._target, self._drafter, batch.tokens.shape[0]
        there = jax.device_put(batch, drafter.device)
        cache, outcome = self._run_target(target.params, batch[:2], target.cache(count), batch.sampling, batch.stop)
        state, successors = self._run_drafter(drafter.params, there[:2], drafter.cache(count), there.sampling)
        jax.block_until_ready((outcome, successors))
        ready = time.perf_counter()
        first = jax.device_get(outcome.bonus).tolist()
        known = jax.device_put(outcome, drafter.device)
        return Prefilled(there, cache, outcome, known, first, state, successors, begin, ready)

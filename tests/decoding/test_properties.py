"""Whatever is asked, in whatever company: the tokens are those of AR alone, and overlapping changes no round."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from d3d_jax.config import DecodeConfig, SamplingParams

from .conftest import TOKEN_IDS, shared

pytestmark = pytest.mark.slow

ROOM = 60
POLICIES = [
    {"mode": "ar"},
    {"mode": "sync", "block_size": 4},
    {"mode": "async", "block_size": 4, "miss": "keep"},
    {"mode": "async", "block_size": 4, "miss": "redraft"},
    {"mode": "async", "block_size": 4, "miss": "redraft", "bonus": "both", "outcomes": 2, "row_budget": 20},
    {"mode": "async", "block_size": 4, "miss": "keep", "bonus": "anchored", "candidates": 1},
    {"mode": "async", "block_size": 4, "miss": "auto", "outcomes": "auto", "drafting": "auto"},  # rounds depend on time
]
QUIET = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

prompts = st.lists(st.integers(0, TOKEN_IDS - 1), min_size=1, max_size=80)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 1.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.4, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**32 - 1),
    max_tokens=st.integers(1, ROOM),
    stop_token_ids=st.lists(st.integers(0, TOKEN_IDS - 1), max_size=3).map(tuple),
) | st.builds(SamplingParams, max_tokens=st.integers(1, ROOM))
asked = st.lists(st.tuples(prompts, params), min_size=1, max_size=5)


@QUIET
@given(asked)
def test_every_mode_gives_the_tokens_of_ar_alone(asked):
    alone = shared(0, DecodeConfig(mode="ar", block_size=4))
    expected = [alone.generate([prompt], setting)[0] for prompt, setting in asked]
    for policy in POLICIES:
        engine = shared(0, DecodeConfig(**policy), 2, rows=3)
        found = engine.generate([prompt for prompt, _ in asked], [setting for _, setting in asked])
        assert [c.ids for c in found] == [c.ids for c in expected]
        assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]


@QUIET
@given(prompts, params)
def test_overlapped_and_step_by_step_have_the_same_rounds(prompt, setting):
    for policy in POLICIES[2:-1]:
        decode = DecodeConfig(**policy)
        stepped = dataclasses.replace(decode, step_by_step=True)
        a, b = (shared(0, how, 2).generate([prompt], setting)[0] for how in (decode, stepped))
        assert (a.ids, a.rounds) == (b.ids, b.rounds)

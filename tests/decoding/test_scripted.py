"""Scripted drafters: an oracle shows what the loop loses, an adversary that its drafts never show in the output."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from d3d_jax.config import DecodeConfig
from d3d_jax.decoding.scripted import Script

from .conftest import GREEDY, PROMPTS, SAMPLED, SMALL, TOKEN_IDS, build, random_model, run, scripted

NEW = 40
LANES = [
    ({"mode": "sync"}, 1),
    ({"mode": "sync"}, 2),
    ({"mode": "async", "miss": "keep"}, 1),
    ({"mode": "async", "miss": "keep"}, 2),
    ({"mode": "async", "miss": "redraft"}, 2),
]
lanes = pytest.mark.parametrize(
    ("policy", "devices"), LANES, ids=lambda lane: str(lane) if isinstance(lane, int) else "-".join(lane.values())
)


def texts(outputs) -> list[list[int]]:
    return [[*prompt, *ids] for prompt, ids in zip(PROMPTS, outputs, strict=True)]


def test_what_a_script_drafts():
    script = Script.of_texts([[5, 6, 7, 8], [1, 2]], 64, wrong=lambda position: position == 2, slack=2)
    tokens, odds = script.drafts(np.array([0, 1]), np.array([[1, 2], [0, 9]]), 3, 2)
    assert tokens.tolist() == [[[6, 8, 8], [8, 8, 0]], [[1, 2, 1], [0, 0, 0]]]  # past the end: its last token
    assert (odds.confidence[0, 0] > 0.5).tolist() == [True, False, True]
    assert odds.candidates[0, 0, 0].tolist() == [7, 8]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@lanes
def test_an_oracle_is_always_right_and_an_adversary_never(target, ar_tokens, policy, devices, sampling):
    expected = ar_tokens(sampling, new=NEW + 20)
    for make, accepted in ((Script.oracle, 3), (Script.adversary, 0)):
        drafter = dataclasses.replace(random_model(SMALL, 3, 4), script=make(texts(expected), TOKEN_IDS))
        engine = build(target, drafter, DecodeConfig(block_size=4, **policy), devices, rows=3)
        for completion, ids in zip(run(engine, PROMPTS, NEW, (), sampling), expected, strict=True):
            assert completion.ids == ids[:NEW]
            assert completion.rounds and all(verified.accepted == accepted for verified in completion.rounds)
            foreseen = [verified.hit for verified in completion.rounds]  # an adversary's bonus tokens are wrong as well
            assert set(foreseen) == ({None} if policy["mode"] == "sync" else {accepted > 0})


@lanes
def test_an_oracle_meets_every_budget_to_the_token(target, ar_tokens, policy, devices):
    """Budgets around the block: the whole last block counts, or a part of it."""
    expected = ar_tokens(GREEDY, new=NEW)
    engine = build(target, scripted(PROMPTS, expected, 4), DecodeConfig(block_size=4, **policy), devices, rows=3)
    for budget in (1, 3, 4, 5, 9):
        assert [c.ids for c in run(engine, PROMPTS, budget)] == [ids[:budget] for ids in expected]


@lanes
def test_a_stop_token_that_was_drafted_and_refused_ends_nothing(target, ar_tokens, policy, devices):
    """The drafter errs by drafting the stop token at each place of a block in turn."""
    expected = ar_tokens(GREEDY, new=NEW + 20)
    stop = next(token for token in range(TOKEN_IDS) if all(token not in ids for ids in expected))
    right = Script.oracle(texts(expected), TOKEN_IDS)
    errs = np.arange(right.tokens.shape[1]) % 5 == 0
    script = dataclasses.replace(right, tokens=np.where(errs, stop, right.tokens), sure=right.sure & ~errs)
    drafter = dataclasses.replace(random_model(SMALL, 3, 4), script=script)
    engine = build(target, drafter, DecodeConfig(block_size=4, **policy), devices, rows=3)
    completions = run(engine, PROMPTS, NEW, (stop,))
    assert [c.ids for c in completions] == [ids[:NEW] for ids in expected]
    assert all(c.finish_reason == "length" for c in completions)
    assert {verified.accepted for c in completions for verified in c.rounds} == {0, 1, 2, 3}

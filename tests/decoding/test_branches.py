"""Branches: which are drafted, which is picked, and that each is the very block that a pass of its own would draft."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax.config import DecodeConfig
from d3d_jax.decoding.branches import NO_OUTCOME, choose_branches, num_branches, outcome_odds, pick, select
from d3d_jax.decoding.policies import Tactic, tactics
from d3d_jax.decoding.programs import Drafting, anchored_draft, feed, no_successors, packed_draft
from d3d_jax.decoding.state import DraftState, Odds, Outcome, Successors
from d3d_jax.decoding.synchronous import draft, take_note
from d3d_jax.errors import ConfigError
from d3d_jax.models.cache import empty_cache
from d3d_jax.models.qwen3 import append, for_decoding

from .conftest import CONFIG, MASK, TOKEN_IDS, random_model

G = 4
BOTH = DecodeConfig(block_size=G, bonus="both", candidates=2)
ODDS = Odds(  # one row; the drafts at 1, 2, 3 are trusted with .9, .5, .2
    jnp.array([[1.0, 0.9, 0.5, 0.2]]),
    jnp.array([[[0, 0], [11, 12], [21, 22], [31, 32]]]),
    jnp.array([[[0.0, 0.0], [0.06, 0.01], [0.3, 0.1], [0.4, 0.3]]]),
)


def chosen(decode: DecodeConfig) -> list[tuple[int, int, bool]]:
    [tactic] = tactics(decode)
    found = choose_branches(ODDS, decode, tactic, MASK)
    assert found.outcome.shape == (1, num_branches(decode))
    return [(int(a), int(first), bool(given)) for a, first, given in zip(*(leaf[0] for leaf in found), strict=True)]


def test_how_likely_each_outcome_is():
    reached, stopped = outcome_odds(ODDS.confidence)
    np.testing.assert_allclose(reached[0], [1, 0.9, 0.45, 0.09], rtol=1e-6)
    np.testing.assert_allclose(stopped[0], [0.1, 0.5, 0.8, 1], rtol=1e-6)
    assert float(jnp.sum(reached * stopped)) == pytest.approx(1)


def test_branches_of_every_setting():
    open_ones = [(a, MASK, False) for a in range(G)]
    assert chosen(replace(BOTH, bonus="masked")) == open_ones
    assert chosen(DecodeConfig(block_size=G, outcomes=2)) == [(1, MASK, False), (2, MASK, False)]
    # reached x chance: .9 x .3, .45 x .4, .45 x .3, .9 x .1, 1 x .06, 1 x .01
    likeliest = [(1, 21, True), (2, 31, True), (2, 32, True), (1, 22, True), (0, 11, True), (0, 12, True)]
    assert chosen(BOTH) == open_ones + likeliest
    assert chosen(replace(BOTH, row_budget=27)) == open_ones + likeliest[:2]
    assert chosen(replace(BOTH, outcomes=1, row_budget=12)) == [(1, MASK, False), *likeliest[:2]]
    assert chosen(replace(BOTH, bonus="anchored")) == [(G - 1, MASK, False), *likeliest]
    assert chosen(replace(BOTH, bonus="anchored", row_budget=8)) == [(G - 1, MASK, False), likeliest[0]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bonus": "masked", "row_budget": 40}, "row_budget=40 is for anchored successors"),
        ({"bonus": "anchored", "outcomes": 2}, "outcomes=2 counts open successors; bonus='anchored' takes row_budget"),
        ({"row_budget": 19}, "row_budget=19: 4 masked and one anchored successor of 4 tokens take 20 rows"),
        ({"candidates": 0}, "candidates=0 must be"),
        ({"bonus": "given"}, "bonus"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, said):
    from d3d_jax.config import from_mapping

    with pytest.raises(ConfigError, match=said):
        from_mapping(DecodeConfig, {"block_size": G, "bonus": "both", **changes})


def test_the_branch_that_knew_most_is_picked():
    successors = Successors(
        jnp.arange(5)[None, :, None] + jnp.array([5, 10, 20, 30])[None, None],
        jnp.array([[0, 1, 1, 1, NO_OUTCOME]]),
        jnp.array([[False, False, True, True, False]]),
    )
    first = np.array([5, 6, 7, 8, 9])  # of each branch

    def found(accepted: int, bonus: int) -> tuple[int, bool]:
        outcome = Outcome(jnp.array([accepted]), jnp.array([bonus]), jnp.array([False]))
        branch, hit = pick(successors, outcome)
        block, same = select(successors, outcome)
        assert bool(same[0]) == bool(hit[0]) and int(block[0, 0]) == bonus
        return int(branch[0]), bool(hit[0])

    assert found(0, first[0]) == (0, True)
    assert found(1, first[1]) == (1, True)  # the drafter foresaw it itself
    assert found(1, first[3]) == (3, True)  # given as a candidate
    assert found(1, 63) == (1, False)  # nobody: the one that left it open
    assert found(2, 63) == (-1, False)  # an outcome without a branch
    nothing = select(successors, Outcome(jnp.array([2]), jnp.array([63]), jnp.array([False])))[0]
    assert nothing.tolist() == [[63, 0, 0, 0]]
    twice = successors._replace(tokens=successors.tokens.at[0, 1, 0].set(7))
    assert int(pick(twice, Outcome(jnp.array([1]), jnp.array([7]), jnp.array([False])))[0][0]) == 2


@pytest.mark.parametrize("changes", [{}, {"row_budget": 32}, {"bonus": "anchored", "candidates": 3}, {"outcomes": 2}])
def test_every_branch_is_what_a_pass_of_its_own_drafts(changes):
    decode = replace(BOTH, **changes)
    model = random_model(CONFIG, 5, G)
    how = Drafting(CONFIG, model.drafter, decode, TOKEN_IDS)
    alone = replace(how, decode=replace(decode, ban_rejected=False))
    params = for_decoding(model.params)
    prefix = jnp.array([[5, 9, 33, 7, 1, 2]])
    _, cache = append(params, prefix, empty_cache(CONFIG, 1, 40), CONFIG)
    cache = cache._replace(length=jnp.array([6]))
    nothing = jnp.zeros((1, 0), jnp.int32)
    block, odds, _ = anchored_draft(params, nothing, jnp.array([17]), jnp.array([6]), cache, None, how)
    assert not np.any(np.asarray(odds.candidates) == np.asarray(block)[..., None])  # the draft itself is no candidate
    state, successors = packed_draft(params, block, odds, cache, None, how, *tactics(decode))
    assert successors.tokens.shape == (1, num_branches(decode), G)
    given = 0
    for branch, (outcome, anchored) in enumerate(
        zip(successors.outcome[0].tolist(), successors.anchored[0], strict=True)
    ):
        context = jnp.array([6 + outcome + 1])
        accepted = block[:, : outcome + 1]
        if anchored:
            given += 1
            first = successors.tokens[:, branch, 0]
            expected, sure, _ = anchored_draft(params, accepted, first, context, cache, None, alone)
            np.testing.assert_allclose(state.odds.confidence[0, branch, 1:], sure.confidence[0, 1:], rtol=1e-4)
        else:
            one = replace(alone, decode=DecodeConfig(block_size=G, outcomes=1, ban_rejected=False))
            short = jnp.pad(accepted, ((0, 0), (0, G - outcome - 1)))
            certain = jnp.where(jnp.arange(G) <= outcome, 1.0, 0.0)[None]
            lonely = Odds(certain, jnp.zeros((1, G, 0), jnp.int32), jnp.zeros((1, G, 0)))
            _, found = packed_draft(params, short, lonely, cache, None, one, Tactic(True, 1))
            assert found.outcome.tolist() == [[outcome]]
            expected = found.tokens[:, 0]
        banned = outcome < G - 1 and not anchored and int(expected[0, 0]) == int(block[0, outcome + 1])
        assert banned or np.array_equal(expected[0], successors.tokens[0, branch])
    assert given == num_branches(decode) - (1 if decode.bonus == "anchored" else 2 if "outcomes" in changes else G)


def test_what_the_drafter_takes_note_of_is_what_it_would_have_drafted_from():
    """Without drafting, the drafter's cache is the very one that drafting leaves."""
    drafter = random_model(CONFIG, 3, G)
    params = for_decoding(drafter.params)
    how = Drafting(CONFIG, drafter.drafter, DecodeConfig(block_size=G), TOKEN_IDS)
    _, cache = append(params, jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]), empty_cache(CONFIG, 2, 32), CONFIG)
    cache = cache._replace(length=jnp.array([5, 3]))
    block, outcome = (
        jnp.array([[8, 9, 7, 9], [3, 2, 3, 8]]),
        Outcome(jnp.array([3, 1]), jnp.array([4, 6]), jnp.zeros(2, bool)),
    )

    odds, successors = no_successors(how, 2)
    of_block = Odds(*(leaf[:, 0] for leaf in odds))
    state, _ = packed_draft(params, block, of_block, cache, None, how, Tactic(True, "all"))
    fed, forgotten = feed(params, block, DraftState(cache, odds), successors, how)
    _, drafted = draft(params, block, outcome, cache, None, how)
    noted = take_note(params, block, outcome, cache, how)
    assert noted.length.tolist() == drafted.length.tolist() == [9, 5]
    assert fed.cache.length.tolist() == state.cache.length.tolist() == [5, 3]
    assert not jnp.any(forgotten.outcome != NO_OUTCOME)
    for one, other in ((fed.cache, state.cache), (noted, drafted)):
        for mine, theirs in zip((*one.k, *one.v), (*other.k, *other.v), strict=True):
            for row, end in enumerate((9, 7)):
                np.testing.assert_allclose(mine[row, :, :end], theirs[row, :, :end], atol=1e-5)
                assert jnp.any(mine[row, :, end - 1] != 0)

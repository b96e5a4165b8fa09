"""The definitions of BENCHMARKS.md, by hand-counted examples."""

from __future__ import annotations

import pytest

from d3d_jax.acceptance.metrics import Sample, measure
from d3d_jax.decoding.state import Round

BLOCK = 8


def sample(accepted: list[int], hits: list[bool | None] | None = None, cut: int = 0) -> Sample:
    """An output of these rounds, the first token before them; `cut` tokens of the last round were cut off."""
    hits = hits or [None] * len(accepted)
    rounds = [Round(a, hit, hit is False) for a, hit in zip(accepted, hits, strict=True)]
    return Sample(rounds, 1 + sum(a + 1 for a in accepted) - cut)


def test_tau_counts_the_bonus_and_not_the_token_of_prefill():
    found = measure([sample([3, 0, 7])], BLOCK)
    assert found.rounds == 3
    assert found.tau == pytest.approx(13 / 3)
    assert found.tau_without_bonus == pytest.approx(10 / 3)


def test_global_tau_is_weighed_by_rounds_and_the_mean_of_samples_is_not():
    found = measure([sample([7]), sample([0, 0, 0])], BLOCK)
    assert found.tau == pytest.approx((8 + 1 + 1 + 1) / 4)
    assert found.tau_mean_of_samples == pytest.approx((8 + 1) / 2)
    assert found.tau_without_bonus_mean_of_samples == pytest.approx(3.5)


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_round_that_runs_past_the_end_is_left_out(cut):
    assert measure([sample([3, 0, 7], cut=cut)], BLOCK) == measure([sample([3, 0])], BLOCK)


def test_rounds_behind_the_end_are_left_out_as_well():
    trace = sample([3, 0, 7, 7, 7])
    assert measure([Sample(trace.rounds, 6)], BLOCK) == measure([sample([3, 0])], BLOCK)


def test_histogram_and_positions():
    found = measure([sample([3, 0, 7, 3])], BLOCK)
    assert found.histogram == (1, 0, 0, 2, 0, 0, 0, 1)
    assert found.by_position == (0.75, 0.75, 0.75, 0.25, 0.25, 0.25, 0.25)
    assert sum(share for share in found.by_position if share) == pytest.approx(found.tau_without_bonus)


def test_hits_are_split_by_what_the_round_before_accepted():
    found = measure([sample([7, 0, 7, 2], [True, True, False, True]), sample([7, 1], [False, False])], BLOCK)
    assert found.hit_rate == pytest.approx(3 / 6)
    assert found.hit_rate_after_full_acceptance == pytest.approx(2 / 3)
    assert found.hit_rate_after_rejection == 0
    assert found.hit_rate_by_accepted[0] == 0 and found.hit_rate_by_accepted[7] == pytest.approx(2 / 3)
    assert found.hit_rate_by_accepted[1] is None
    assert found.redraft_rate == pytest.approx(3 / 6)


def test_what_nothing_is_known_of_is_none():
    nothing = measure([Sample((), 5)], BLOCK)
    assert (nothing.rounds, nothing.tau, nothing.hit_rate, nothing.redraft_rate) == (0, None, None, None)
    assert measure([sample([1, 2])], BLOCK).hit_rate is None


def test_more_drafts_than_a_block_holds_are_refused():
    with pytest.raises(ValueError, match="7"):
        measure([sample([8])], BLOCK)

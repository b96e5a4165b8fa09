"""The cost model (docs/algorithm.md 6): what a round and a speed-up should be, from the times of the parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """A predicted round beside the measured one. Seconds; errors are shares: predicted / measured - 1."""

    round_s: float
    measured_round_s: float
    speedup: float | None
    measured_speedup: float

    @property
    def round_error(self) -> float:
        return self.round_s / self.measured_round_s - 1

    @property
    def speedup_error(self) -> float | None:
        return None if self.speedup is None else self.speedup / self.measured_speedup - 1


def synchronous_round(verify_s: float, draft_s: float) -> float:
    """Seconds of a round that drafts, then verifies."""
    return verify_s + draft_s


def asynchronous_round(verify_s: float, packed_s: float, choose_s: float = 0.0, hop_s: float = 0.0) -> float:
    """Seconds of a round that verifies and drafts ahead at once: `max(t_verify, t_packed) + t_hop + (1-h) r t_redraft`.

    choose_s: mean time of choosing the next block before both start; it holds the redrafts of missed rounds, so it
    is the last term of the sum. hop_s: transfers and gaps in which neither device works.
    """
    return max(verify_s, packed_s) + choose_s + hop_s


def speedup(tau: float | None, round_s: float, ar_step_s: float) -> float | None:
    """How much faster than one token every `ar_step_s`; None where no round was counted."""
    return None if tau is None else tau * ar_step_s / round_s


def hidden_share(round_s: float, verify_s: float, draft_s: float) -> float | None:
    """Share of the drafting time that ran behind verification: 1 - (round - verify) / draft, within [0, 1].

    verify_s, draft_s: times of the parts alone, everything that the drafter does in a round in the second.
    """
    if draft_s <= 0:
        return None
    return min(1.0, max(0.0, 1 - (round_s - verify_s) / draft_s))

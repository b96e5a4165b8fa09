"""What acceptance means, in one place: tau, hit rate and all that is counted in rounds (docs/algorithm.md 1).

Which rounds count: those that lie wholly inside the output. The first token comes from prefill and belongs to no
round. A last round that runs past the stop token or the budget is left out altogether: its tokens past the end must
not count, and the rest of it alone would be a round that the drafter never lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Round:
    """One verification: drafts accepted, whether the bonus token had been foreseen, whether its tail was
    drafted again. `hit` is None where nothing was foreseen (synchronous drafting). `drafted` is False for a token that
    the target made alone, which is a round in name only.
    """

    accepted: int
    hit: bool | None = None
    redrafted: bool = False
    drafted: bool = True


@dataclass(frozen=True)
class Sample:
    """One output: its rounds in order, and its tokens, the first one and a stop token included."""

    rounds: Sequence[Round]
    num_tokens: int

    def whole_rounds(self) -> tuple[Round, ...]:
        """The rounds that lie wholly inside the output."""
        kept, tokens = [], 1
        for verified in self.rounds:
            tokens += verified.accepted + 1
            if tokens > self.num_tokens:
                break
            kept.append(verified)
        return tuple(kept)


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over samples, of rounds with drafts alone; a share of nothing is None.

    tau: mean of accepted + 1 over all rounds: the bonus token counts. tau_without_bonus: mean of accepted.
    *_mean_of_samples: the same per sample first, then the mean over samples that have a round.
    histogram: rounds by drafts accepted, 0..G-1. by_position: for drafts 1..G-1, the share of rounds that accepted it.
    hit_rate: share of rounds whose anchor had been foreseen, of those where foreseeing was tried; also split by
    what the round before had accepted: everything, less, and each number 0..G-1. (The round after prefill has none
    before it and counts in the total alone.) redraft_rate: share of rounds whose tail was drafted again.
    """

    rounds: int
    tau: float | None
    tau_without_bonus: float | None
    tau_mean_of_samples: float | None
    tau_without_bonus_mean_of_samples: float | None
    histogram: tuple[int, ...]
    by_position: tuple[float | None, ...]
    hit_rate: float | None
    hit_rate_after_full_acceptance: float | None
    hit_rate_after_rejection: float | None
    hit_rate_by_accepted: tuple[float | None, ...]
    redraft_rate: float | None


def measure(samples: Iterable[Sample], block_size: int) -> Acceptance:
    """Acceptance of `samples`, decoded with blocks of `block_size` G tokens, G-1 of them drafts.

    Raises:
        ValueError: when a round accepted more drafts than a block holds.
    """
    whole = [sample.whole_rounds() for sample in samples]
    traces = [[verified for verified in trace if verified.drafted] for trace in whole]
    rounds = [verified for trace in traces for verified in trace]
    accepted = [verified.accepted for verified in rounds]
    if any(not 0 <= count < block_size for count in accepted):
        raise ValueError(f"accepted drafts {min(accepted)}..{max(accepted)} of blocks with {block_size - 1}")
    sample_means = [mean([verified.accepted for verified in trace]) for trace in traces if trace]
    foreseen = [verified.hit for verified in rounds if verified.hit is not None]
    after = [
        (before.accepted, verified.hit)
        for trace in whole
        for before, verified in pairwise(trace)
        if before.drafted and verified.hit is not None
    ]
    bare, bare_of_samples = mean(accepted), mean(sample_means)
    return Acceptance(
        rounds=len(rounds),
        tau=None if bare is None else bare + 1,
        tau_without_bonus=bare,
        tau_mean_of_samples=None if bare_of_samples is None else bare_of_samples + 1,
        tau_without_bonus_mean_of_samples=bare_of_samples,
        histogram=tuple(accepted.count(count) for count in range(block_size)),
        by_position=tuple(mean([count >= place for count in accepted]) for place in range(1, block_size)),
        hit_rate=mean(foreseen),
        hit_rate_after_full_acceptance=mean([hit for count, hit in after if count == block_size - 1]),
        hit_rate_after_rejection=mean([hit for count, hit in after if count < block_size - 1]),
        hit_rate_by_accepted=tuple(
            mean([hit for count, hit in after if count == wanted]) for wanted in range(block_size)
        ),
        redraft_rate=mean([verified.redrafted for verified in rounds]),
    )


def mean(values: Sequence[float | None]) -> float | None:
    """The mean; None of nothing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

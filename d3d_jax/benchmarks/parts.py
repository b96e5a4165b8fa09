"""The parts of a round: each program alone, and both devices at work at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from d3d_jax.decoding.observer import Span


@dataclass(frozen=True)
class Occupied:
    """Mean seconds of a round in which only the target, only the drafter, both, or neither device works."""

    target_only_s: float
    drafter_only_s: float
    both_s: float
    neither_s: float

    @property
    def round_s(self) -> float:
        return self.target_only_s + self.drafter_only_s + self.both_s + self.neither_s


@dataclass(frozen=True)
class Watched:
    """What an observer saw: mean seconds a round of each program, and the spans of one output."""

    programs: dict[str, float]
    occupied: Occupied
    spans: tuple[Span, ...]

    def of(self, *names: str) -> float:
        """Mean seconds a round of these programs together; 0 for a program that did not run."""
        return sum(self.programs.get(name, 0.0) for name in names)


def watched(outputs: Sequence[Sequence[Span]]) -> Watched:
    """From the spans of each output of a watched lane.

    Under `StepByStep` each program has the machine to itself, and its time holds its own launch and transfers;
    under `Timeline` the devices run as they do when nobody watches.
    """
    rounds = sum(count_rounds(spans) for spans in outputs)
    programs: dict[str, float] = {}
    for span in (span for spans in outputs for span in spans):
        programs[span.program] = programs.get(span.program, 0.0) + span.seconds / rounds
    return Watched(programs, occupied(outputs), tuple(max(outputs, key=len)))


def count_rounds(spans: Iterable[Span]) -> int:
    return len({span.round for span in spans})


def occupied(outputs: Sequence[Sequence[Span]]) -> Occupied:
    """How the devices shared the time from the first to the last program of each output, a round on average."""
    totals = {(True, False): 0.0, (False, True): 0.0, (True, True): 0.0, (False, False): 0.0}
    for spans in outputs:
        edges = sorted({edge for span in spans for edge in (span.start, span.end)})
        for begin, end in pairwise(edges):
            at_work = {span.device for span in spans if span.start <= begin and span.end >= end}
            totals["target" in at_work, "drafter" in at_work] += end - begin
    rounds = sum(count_rounds(spans) for spans in outputs)
    return Occupied(*(seconds / rounds for seconds in totals.values()))

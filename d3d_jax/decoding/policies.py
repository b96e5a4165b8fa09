"""Which tactic the next round of mode `async` uses: always the same, or the one that has been fastest.

A policy is a small object on the host that knows numbers alone, no device: a test can drive it. It decides before the
round's outcome is known, so that the host never waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal, NamedTuple, Protocol

from d3d_jax.config import DecodeConfig


class Tactic(NamedTuple):
    """What is free to choose in a round: whether a missed block is drafted again, and how many outcomes get a
    successor with an open bonus.
    """

    redraft: bool
    outcomes: Literal["all"] | int


class Policy(Protocol):
    def next(self) -> Tactic:
        """The tactic of the round that is launched now."""
        ...

    def observe(self, tactic: Tactic, tokens: int, seconds: float | None) -> None:
        """A round of `tactic` gave so many tokens, all rows together, and took so long; rounds come in order.

        seconds: None when it cannot be told, since something else came between.
        """
        ...


def tactics(decode: DecodeConfig) -> tuple[Tactic, ...]:
    """All that the settings leave open; a single one unless something is `auto`."""
    half, quarter = -(-decode.block_size // 2), -(-decode.block_size // 4)
    outcomes = tuple(dict.fromkeys(("all", half, quarter))) if decode.outcomes == "auto" else (decode.outcomes,)
    redraft = {"keep": (False,), "redraft": (True,), "auto": (False, True)}[decode.miss]
    return tuple(Tactic(again, count) for count in outcomes for again in redraft)


def policy_for(choices: Sequence[Tactic]) -> Policy:
    return InTurn(choices) if len(choices) == 1 else Fastest(choices)


class InTurn:
    """One tactic after the other, for warm-up; with a single one, always that."""

    def __init__(self, choices: Sequence[Tactic]):
        self._choices, self._round = choices, 0

    def next(self) -> Tactic:
        self._round += 1
        return self._choices[(self._round - 1) % len(self._choices)]

    def observe(self, tactic: Tactic, tokens: int, seconds: float | None) -> None:
        pass


class Fastest:
    """The tactic that gives the most tokens a second, by running averages.

    Of two tactics that differ in redrafting alone this is the rule of docs/algorithm.md 3: redraft when the time it
    costs is less than that of the rounds it saves. Each tactic is first tried for `trial` rounds; after every `stretch`
    rounds of the best, another one is tried again, since the text and the load change.

    Args:
        memory: rounds after which an observation counts 1/e of a new one.
    """

    def __init__(self, choices: Sequence[Tactic], trial: int = 12, stretch: int = 120, memory: float = 60.0):
        self._choices = tuple(choices)
        self._fade = 1 - 1 / memory
        self._tokens, self._seconds = dict.fromkeys(choices, 0.0), dict.fromkeys(choices, 0.0)
        self._plan, self._left = self._stretches(trial, stretch), 0
        self._last_observed: Tactic | None = None

    def next(self) -> Tactic:
        if self._left == 0:
            self._current, self._left = next(self._plan)
        self._left -= 1
        return self._current

    def observe(self, tactic: Tactic, tokens: int, seconds: float | None) -> None:
        before, self._last_observed = self._last_observed, tactic
        if before != tactic or seconds is None:
            return  # the first round's time also holds the end of another tactic's
        self._tokens[tactic] = self._fade * self._tokens[tactic] + tokens
        self._seconds[tactic] = self._fade * self._seconds[tactic] + seconds

    def rate(self, tactic: Tactic) -> float:
        """Tokens a second; 0 before anything was observed."""
        return self._tokens[tactic] / self._seconds[tactic] if self._seconds[tactic] else 0.0

    def _stretches(self, trial: int, stretch: int) -> Iterator[tuple[Tactic, int]]:
        yield from ((choice, trial) for choice in self._choices)
        for number in count():
            best = max(self._choices, key=self.rate)
            others = [choice for choice in self._choices if choice != best]
            yield best, stretch
            yield others[number % len(others)], trial

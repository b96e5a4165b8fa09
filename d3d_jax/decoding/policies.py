"""Which tactic the next round of mode `async` uses: always the same, or the one that has been fastest.

A policy is a small object on the host that knows numbers alone, no device: a test can drive it. It decides before the
round's outcome is known, so that the host never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal, NamedTuple, Protocol

from d3d_jax.config import DecodeConfig

MOSTLY_THERE = 0.2  # of a round's time the host may be elsewhere, for the time to count


class Tactic(NamedTuple):
    """What is free to choose in a round: whether a missed block is drafted again, how many outcomes get a successor
    with an open bonus, and how many candidates for the bonus are anchored on.
    """

    redraft: bool
    outcomes: Literal["all"] | int
    candidates: int = 0

    @property
    def drafts_ahead(self) -> bool:
        return bool(self.outcomes or self.candidates)


WITH_BONUS = Tactic(True, 0)
"""Nothing is drafted ahead: each block is drafted once its bonus token is known, as in mode `sync`."""
PLAIN = Tactic(False, 0)
"""Nothing is drafted: the target makes a block of tokens by itself, one by one."""


class Policy(Protocol):
    def next(self) -> Tactic:
        """The tactic of the round that is launched now."""
        ...

    def observe(self, tactic: Tactic, tokens: int, seconds: float | None) -> None:
        """A round of `tactic` gave so many tokens, all rows together, and took so long; rounds come in order.

        seconds: None when it cannot be told, since something else came between.
        """
        ...

    def rate(self, tactic: Tactic) -> float:
        """Tokens a second; 0 where it was not observed."""
        ...


def tactics(decode: DecodeConfig) -> tuple[Tactic, ...]:
    """All that the settings leave open; a single one unless something is `auto`. Wider drafting comes first."""
    if decode.mode == "sync":
        return (WITH_BONUS, PLAIN) if decode.drafting == "auto" else (WITH_BONUS,)
    half, quarter = -(-decode.block_size // 2), -(-decode.block_size // 4)
    outcomes = ("all", half, quarter) if decode.outcomes == "auto" else (decode.outcomes,) * 3
    most = decode.num_candidates
    candidates = (most, most // 2, most // 4) if decode.candidates == "auto" else (most,) * 3
    redraft = {"keep": (False,), "redraft": (True,), "auto": (False, True)}[decode.miss]
    widths = dict.fromkeys(zip(outcomes, candidates, strict=True))
    ahead = tuple(Tactic(again, *width) for width in widths for again in redraft)
    return (*ahead, WITH_BONUS, PLAIN) if decode.drafting == "auto" else ahead


def policy_for(choices: Sequence[Tactic]) -> Policy:
    return InTurn(choices) if len(choices) == 1 else Fastest(choices)


def break_even_tau(tau: float, drafted_rate: float, plain_rate: float) -> float:
    """The tau from which on drafting pays, from tokens a second of both ways of decoding and the tau there was:
    a drafted round over a step of the target alone.
    """
    return tau * plain_rate / drafted_rate


class Steering:
    """A policy at work: gives each round its tactic, and tells the policy what came of it, and how soon.

    Rounds are read one after the other, so a round takes from one reading to the next; unless a chunk of a prompt came
    before it, or the host was away for much of that time, with someone who reads a stream slowly.
    """

    def __init__(self, choices: Sequence[Tactic]):
        self._choices, self.policy = tuple(choices), policy_for(choices)
        self._read_at, self._interrupted = 0.0, True

    @property
    def chooses(self) -> bool:
        """There is more than one tactic."""
        return len(self._choices) > 1

    def interrupt(self) -> None:
        """The round that is launched next has a chunk of a prompt before it."""
        self._interrupted = True

    def next(self) -> tuple[Tactic, float | None]:
        """The next round's tactic, and for how many seconds the host was away; None when that says nothing."""
        away = None if self._interrupted else time.perf_counter() - self._read_at
        self._interrupted = False
        return self.policy.next(), away

    def timed(self, tactic: Tactic, away_s: float | None, read: Callable[[Any], list[Any]]) -> Callable:
        """`read`, which gives a Progress a row, and the policy is told."""

        def read_timed(record: Any) -> list[Any]:
            found, before, self._read_at = read(record), self._read_at, time.perf_counter()
            took = self._read_at - before
            told = away_s is not None and away_s < MOSTLY_THERE * took and any(row.rounds for row in found)
            self.policy.observe(tactic, sum(len(row.tokens) for row in found), took if told else None)
            return found

        return read_timed

    def rates(self) -> dict[Tactic, float]:
        """Tokens a second of the tactics that were used, where there is a choice."""
        return {choice: rate for choice in self._choices if (rate := self.policy.rate(choice))}

    @contextmanager
    def rehearsal(self) -> Iterator[int]:
        """While it is open, so many rounds use every tactic; the policy learns nothing."""
        usual, self.policy = self.policy, InTurn(self._choices)
        try:
            yield len(self._choices)
        finally:
            self.policy = usual


class InTurn:
    """One tactic after the other, for warm-up; with a single one, always that."""

    def __init__(self, choices: Sequence[Tactic]):
        self._choices, self._round = choices, 0

    def next(self) -> Tactic:
        self._round += 1
        return self._choices[(self._round - 1) % len(self._choices)]

    def observe(self, tactic: Tactic, tokens: int, seconds: float | None) -> None:
        pass

    def rate(self, tactic: Tactic) -> float:
        return 0.0


class Fastest:
    """The tactic that gives the most tokens a second, by running averages.

    Of two tactics that differ in redrafting alone this is the rule of docs/algorithm.md 3: redraft when the time it
    costs is less than that of the rounds it saves. Each tactic is first tried for `trial` rounds (the plain one for a
    quarter of them, each being as many steps as a block has tokens); after every `stretch` rounds of the best, another
    one is tried again, since the text and the load change.

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
        return self._tokens[tactic] / self._seconds[tactic] if self._seconds[tactic] else 0.0

    def _stretches(self, trial: int, stretch: int) -> Iterator[tuple[Tactic, int]]:
        def trial_of(choice: Tactic) -> int:
            return max(2, trial // 4) if choice == PLAIN else trial

        yield from ((choice, trial_of(choice)) for choice in self._choices)
        for number in count():
            best = max(self._choices, key=self.rate)
            others = [choice for choice in self._choices if choice != best]
            yield best, stretch
            other = others[number % len(others)]
            yield other, trial_of(other)

"""Watching the programs of a loop: not at all, one by one, or on a timeline of both devices."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

MAKES_BLOCK = ("choose", "draft", "plain")  # programs whose block the rest of their round needs


@dataclass(frozen=True)
class Span:
    """One program on one device: seconds since the observer was made."""

    program: str
    device: str
    round: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Observer:
    """Sees every program that a loop launches. This one looks away, so that nothing is slowed."""

    def launched(self, program: str, device: str, number: int, outputs: Any) -> None:
        """`program` of round `number` was enqueued on `device` and will fill `outputs`."""

    def restart(self) -> None:
        """The loop starts now: what came before, such as prefill, belongs to no program."""

    def spans(self) -> list[Span]:
        """What was seen, in order of launching."""
        return []


class StepByStep(Observer):
    """Waits for each program before the next is launched: the time of each, alone on the machine."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._spans: list[Span] = []

    def restart(self) -> None:
        self._last = time.perf_counter()

    def launched(self, program: str, device: str, number: int, outputs: Any) -> None:
        jax.block_until_ready(outputs)
        now = time.perf_counter()
        self._spans.append(Span(program, device, number, self._last - self._start, now - self._start))
        self._last = now

    def spans(self) -> list[Span]:
        return self._spans


class Timeline(Observer):
    """Overlapped running, watched: one thread a device notes when each program's outputs are there.

    Only ends are seen. A program starts when it has been launched, the one before it on its device has ended,
    and its inputs are there, whichever is last.
    """

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self._watchers: dict[str, ThreadPoolExecutor] = {}
        self._ends: list[Any] = []

    def launched(self, program: str, device: str, number: int, outputs: Any) -> None:
        if device not in self._watchers:
            self._watchers[device] = ThreadPoolExecutor(1, thread_name_prefix=f"watch-{device}")
        now = time.perf_counter() - self._origin
        # The smallest output is enough: all outputs of a program become ready together, and the larger
        # ones may be donated to the next program while a watcher still waits for them.
        smallest = min(jax.tree.leaves(outputs), key=lambda array: array.size)
        ended = self._watchers[device].submit(self._wait, smallest)
        self._ends.append((program, device, number, now, ended))

    def _wait(self, array: jax.Array) -> float:
        jax.block_until_ready(array)
        return time.perf_counter() - self._origin

    def spans(self) -> list[Span]:
        last: dict[str, float] = {}
        block_ready: dict[int, float] = {}
        round_end: dict[int, float] = {}
        spans = []
        for program, device, number, launched, future in self._ends:
            end = future.result()
            # Every program of a round needs what both devices made in the round before, and its block.
            ready = max(round_end.get(number - 1, 0.0), block_ready.get(number, 0.0))
            start = min(max(launched, last.get(device, 0.0), ready), end)
            spans.append(Span(program, device, number, start, end))
            last[device] = end
            if program in MAKES_BLOCK:
                block_ready[number] = end
            round_end[number] = max(round_end.get(number, 0.0), end)
        for watcher in self._watchers.values():
            watcher.shutdown()
        return spans

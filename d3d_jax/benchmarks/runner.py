"""Running the same prompts through several modes, fairly: warm first, then in turns, one prompt at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from d3d_jax.benchmarks.compile_counter import CompileCounter
from d3d_jax.config import DecodeConfig, SamplingParams
from d3d_jax.decoding.observer import Observer, Span
from d3d_jax.decoding.state import Completion


class Decoder(Protocol):
    """What is measured: an engine, or in tests something that plays one."""

    decode: DecodeConfig

    def warm_up(self, prompt_lengths: Sequence[int], params: Sequence[SamplingParams]) -> float: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        observer: Observer | None = None,
    ) -> list[Completion]: ...


@dataclass(frozen=True)
class Task:
    """What every mode decodes: prompts as ids, and how; `prompts` one at a time."""

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def params(self) -> SamplingParams:
        """All settings of an output."""
        return replace(self.sampling, max_tokens=self.max_new_tokens, stop_token_ids=self.stop_ids, ignore_eos=True)

    def run(self, engine: Decoder, prompt: Sequence[int], observer: Observer | None = None) -> Completion:
        """One prompt through one engine."""
        return engine.generate([prompt], self.params(), observer=observer)[0]


class RoundCounter(Observer):
    """Looks away like its parent, but for the number of rounds that were launched."""

    def __init__(self) -> None:
        self.rounds = 0
        self.one_program = False

    def launched(self, program: str, device: str, number: int, outputs: Any) -> None:
        self.rounds = number + 1
        self.one_program = program == "loop"

    def waited_for(self, completion: Completion, lookahead: int) -> int:
        """Rounds inside the wall clock: the host leaves the last `lookahead - 1` that it launched behind."""
        if self.one_program or not self.rounds:
            return len(completion.rounds)
        return max(len(completion.rounds), self.rounds - lookahead + 1)


@dataclass(frozen=True)
class Lane:
    """One way through the prompts: an engine, and who looks on. A mode's speed is that of the lane nobody watches."""

    engine: Decoder
    observer: Callable[[], Observer] = RoundCounter


@dataclass
class LaneRun:
    """One lane's outputs, in the order of the prompts.

    rounds_run: verifications that the wall clock of each output holds: those of its trace, and those the host
    waited for past the end; unwatched lanes only. spans: the programs of each output; watched lanes only.
    warm_up_s: seconds of the calls before the first that counts.
    """

    completions: list[Completion] = field(default_factory=list)
    rounds_run: list[int] = field(default_factory=list)
    spans: list[list[Span]] = field(default_factory=list)
    warm_up_s: float = 0.0

    def add(self, completion: Completion, observer: Observer, lookahead: int) -> None:
        self.completions.append(completion)
        if isinstance(observer, RoundCounter):
            self.rounds_run.append(observer.waited_for(completion, lookahead))
        else:
            self.spans.append(observer.spans())


@dataclass
class BenchRun:
    """All lanes' outputs.

    compile_s, compilations, from_cache: of warm-up (see :class:`CompileCounter`); compilations_after: while measuring.
    """

    task: Task
    lanes: dict[str, LaneRun]
    compile_s: float = 0.0
    compilations: int = 0
    from_cache: int = 0
    compilations_after: int = 0


def run_lanes(
    lanes: Mapping[str, Lane],
    task: Task,
    *,
    devices: Sequence[jax.Device] = (),
    advance: Callable[[str], None] = lambda lane: None,
    clock: Callable[[], float] = time.perf_counter,
    counter: Callable[[], AbstractContextManager[Any]] = CompileCounter,
) -> BenchRun:
    """Decode all prompts of `task` in every lane.

    Prompts go through the lanes in turns, each prompt starting with another lane, so that a drift of the machine
    meets all alike.

    Args:
        lanes: by name; modes bear their own name.
        devices: waited for between outputs, so that a round left behind by one lane does not run into another.
        advance: called with the lane's name after each warm-up and each output.
        clock: seconds.
    """
    run = BenchRun(task, {name: LaneRun() for name in lanes})
    warm: set[int] = set()
    with counter() as compiled:
        for name, lane in lanes.items():
            begin = clock()
            if id(lane.engine) not in warm:
                lane.engine.warm_up([len(prompt) for prompt in task.prompts], [task.params()])
                settle(devices)
                warm.add(id(lane.engine))
            run.lanes[name].warm_up_s = clock() - begin
            advance(name)
    run.compile_s, run.compilations, run.from_cache = compiled.seconds, compiled.count, compiled.from_cache
    order = list(lanes)
    with counter() as compiled:
        for number, prompt in enumerate(task.prompts):
            turn = number % len(order)
            for name in order[turn:] + order[:turn]:
                lane = lanes[name]
                observer = lane.observer()
                completion = task.run(lane.engine, prompt, observer)
                settle(devices)
                run.lanes[name].add(completion, observer, lane.engine.decode.lookahead)
                advance(name)
    run.compilations_after = compiled.count
    return run


def settle(devices: Sequence[jax.Device]) -> None:
    """Wait until the devices have done all they were given. Each runs its programs in order, so a last one tells."""
    jax.block_until_ready([_count_up(jax.device_put(0, device)) for device in devices])


@jax.jit
def _count_up(value: jax.Array) -> jax.Array:
    return jnp.add(value, 1)

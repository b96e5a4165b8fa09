"""Fair runs: warm-up outside, in turns, and figures that follow from the times alone. Engines here play a part."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import pytest

from d3d_jax.benchmarks.compile_counter import CompileCounter
from d3d_jax.benchmarks.runner import Lane, Task, run_lanes
from d3d_jax.benchmarks.summary import summarize
from d3d_jax.config import DecodeConfig
from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.state import Completion, Round

ACCEPTED = (3, 0, 7)
TASK = Task(((1, 2, 3), (4,) * 70, (5,) * 3), 15, (0,))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Player:
    """An engine of scripted times, in seconds: its first call for a bucket compiles for five."""

    clock: Clock
    decode: DecodeConfig
    decode_s: float = 2.0
    prefill_s: float = 1.0
    ids: tuple[int, ...] = tuple(range(1, 15))
    past_end: int = 0  # rounds launched after the last that counts
    compiled: set[int] = field(default_factory=set)
    calls: list[tuple[int, int]] = field(default_factory=list)

    def warm_up(self, prompt_lengths, params):
        begin = self.clock()
        for length in {n > 64: n for n in prompt_lengths}.values():
            self.generate([[0] * length], params[0])
        return self.clock() - begin

    def generate(self, prompts, params, *, observer=None):
        size = 64 if len(prompts[0]) <= 64 else 128
        late = 0.0 if size in self.compiled else 5.0
        self.compiled.add(size)
        self.calls.append((len(prompts[0]), params.max_tokens))
        self.clock.now += late + self.prefill_s + self.decode_s
        rounds = () if self.decode.mode == "ar" else tuple(Round(a) for a in ACCEPTED)
        for number in range(len(rounds) + self.past_end):
            (observer or Observer()).launched("verify", "target", number, None)
        return [Completion(tuple(prompts[0]), self.ids, "length", rounds, self.prefill_s, self.decode_s + late)]


def played(clock: Clock, **spec) -> dict[str, Lane]:
    return {
        "ar": Lane(Player(clock, DecodeConfig(mode="ar"), decode_s=6.0)),
        "sync": Lane(Player(clock, DecodeConfig(mode="sync", block_size=8), **spec)),
    }


def figures(lanes: dict[str, Lane], clock: Clock):
    run = run_lanes(lanes, TASK, clock=clock)
    return run, summarize(run, 8, {mode: 1 for mode in lanes}, {})


def test_compiling_is_in_no_rate_and_told_apart():
    clock = Clock()
    run, result = figures(played(clock), clock)
    assert run.lanes["sync"].warm_up_s == pytest.approx(2 * (5 + 3))  # a call for each of the two padded lengths
    assert result["modes"]["sync"]["warm_up_s"] == pytest.approx(16)
    assert result["modes"]["sync"]["tok_per_s"] == pytest.approx(13 / 2)
    assert result["modes"]["ar"]["tok_per_s"] == pytest.approx(13 / 6)


def test_decoding_and_end_to_end_speed_up_are_told_apart():
    clock = Clock()
    _, result = figures(played(clock), clock)
    mode = result["modes"]["sync"]
    assert mode["speedup"] == pytest.approx(3.0)
    assert mode["end_to_end_speedup"] == pytest.approx(7 / 3)
    assert mode["identical_to_ar"] == 1 and mode["identical_outputs"] == mode["num_prompts"] == 3
    assert mode["tau"] == pytest.approx(13 / 3) and mode["tau_without_bonus"] == pytest.approx(10 / 3)


def test_speed_up_is_per_token_when_outputs_differ_in_length():
    clock = Clock()
    _, result = figures(played(clock, ids=tuple(range(1, 9))), clock)
    mode = result["modes"]["sync"]
    assert mode["speedup"] == pytest.approx((6 / 13) / (2 / 7))
    assert mode["identical_to_ar"] == 0


def test_prompts_take_turns_through_the_lanes():
    clock, order = Clock(), []
    run_lanes(played(clock), TASK, clock=clock, advance=order.append)
    assert order == ["ar", "sync", *("ar", "sync"), *("sync", "ar"), *("ar", "sync")]


def test_an_engine_in_two_lanes_is_warmed_once():
    clock = Clock()
    lanes = played(clock)
    lanes["sync again"] = lanes["sync"]
    run_lanes(lanes, TASK, clock=clock)
    assert len(lanes["sync"].engine.calls) == 2 + 2 * len(TASK.prompts)


def test_rounds_that_the_host_waited_for_share_the_wall_clock():
    """With two rounds in flight, one launched past the end is waited for and one is left behind."""
    clock = Clock()
    run, result = figures(played(clock, past_end=2), clock)
    assert run.lanes["sync"].rounds_run == [4, 4, 4]
    assert result["modes"]["sync"]["round_ms"] == pytest.approx(500)


def test_a_compilation_is_counted_and_a_second_call_is_none():
    program = jax.jit(lambda x: jnp.sin(x) * 3.25 + jnp.cos(x))
    value = jnp.arange(7.0)
    with CompileCounter() as counter:
        program(value)
    assert counter.count >= 1 and counter.seconds > 0
    counted = counter.count
    with CompileCounter() as again:
        program(value)
    assert again.count == 0
    program(jnp.arange(9.0))
    assert counter.count == counted  # it has stopped listening


def test_the_result_counts_what_was_compiled_while_measuring():
    class Late(Player):
        def generate(self, *args, **kwargs):
            jax.jit(lambda x: x * len(self.calls))(jnp.ones(3))  # another program at each call
            return super().generate(*args, **kwargs)

    clock = Clock()
    lanes = {"ar": Lane(Late(clock, DecodeConfig(mode="ar")))}
    _, result = figures(lanes, clock)
    assert result["compilations_after_warm_up"] >= len(TASK.prompts)

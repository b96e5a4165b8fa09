"""The loop itself: where the models are timed waits, drafting hides behind verification, whatever the hardware."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable

import jax
import pytest

from d3d_jax.config import DecodeConfig, SamplingParams
from d3d_jax.decoding import asynchronous
from d3d_jax.decoding.engine import Engine
from d3d_jax.decoding.observer import Timeline
from d3d_jax.decoding.rounds import Launched
from d3d_jax.errors import DeviceError

from .conftest import GREEDY, PROMPTS, SAMPLED, SMALL, TOKEN_IDS, build, random_model, run, shared

VERIFY_S, PACKED_S = 0.15, 0.12  # far longer than what a busy machine adds


def after(seconds: float, function: Callable) -> Callable:
    """The program, which first makes its device wait; its block of tokens is what it waits with."""

    def wait(block):
        time.sleep(seconds)
        return block

    def waiting(params, block_BG, *rest, **fixed):
        block_BG = jax.pure_callback(wait, jax.ShapeDtypeStruct(block_BG.shape, block_BG.dtype), block_BG)
        return function(params, block_BG, *rest, **fixed)

    return waiting


@pytest.fixture
def slow_devices(monkeypatch):
    monkeypatch.setattr(asynchronous, "verify_recorded", after(VERIFY_S, asynchronous.verify_recorded))
    monkeypatch.setattr(asynchronous, "packed_after", after(PACKED_S, asynchronous.packed_after))


@pytest.mark.parametrize("miss", ["keep", "redraft"])
def test_a_round_takes_as_long_as_its_longer_half(slow_devices, target, miss):
    engine = build(target, random_model(SMALL, 3, 4), DecodeConfig(block_size=4, miss=miss), devices=2)
    engine.generate([PROMPTS[0]], SamplingParams(max_tokens=4))
    best = 0.0
    for _ in range(5):  # other work on this machine can only slow it down
        timeline = Timeline()
        engine.generate([PROMPTS[0]], SamplingParams(max_tokens=8), observer=timeline)
        spans = timeline.spans()
        rounds = 1 + max(span.round for span in spans)
        took = max(span.end for span in spans if span.program == "verify") - min(span.start for span in spans)
        redrafting = sum(span.seconds for span in spans if span.program == "choose")  # nothing can hide that
        best = max(best, (redrafting + rounds * max(VERIFY_S, PACKED_S)) / took)
        if best > 0.95:
            break
    assert rounds >= 6 and best > 0.95


def test_step_by_step_hides_nothing(slow_devices, target):
    """What the figure above is held against: one after the other they take their sum."""
    decode = DecodeConfig(block_size=4, miss="keep", step_by_step=True)
    engine = build(target, random_model(SMALL, 3, 4), decode, devices=2)
    engine.generate([PROMPTS[0]], SamplingParams(max_tokens=4))
    begin = time.perf_counter()
    [done] = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=5))
    assert time.perf_counter() - begin > len(done.rounds) * (VERIFY_S + PACKED_S)


def live() -> tuple[int, int]:
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ar", "sync", "async"])
def test_five_hundred_requests_with_random_cancels_leave_nothing_behind(mode):
    engine = shared(3, DecodeConfig(mode=mode, block_size=4), 2, rows=3)
    draw = random.Random(5)

    def serve(count: int) -> int:
        waiting, under_way, cancelled = count, [], 0
        while waiting or under_way:
            while waiting and len(under_way) < 6:
                prompt = [draw.randrange(TOKEN_IDS) for _ in range(draw.randrange(1, 20))]
                params = SamplingParams(max_tokens=draw.randrange(1, 12), temperature=draw.choice([0.0, 1.0]))
                under_way.append(engine.submit(prompt, params, listens=draw.random() < 0.5))
                waiting -= 1
            engine.step()
            for request in [request for request in under_way if draw.random() < 0.05]:
                engine.cancel(request)
                cancelled += 1
            under_way = [request for request in under_way if not request.finished]
        while not engine.idle:
            engine.step()
        engine.generate([[1]], SamplingParams(max_tokens=2))  # the settings of the rows, kept on the devices, are alike
        return cancelled

    serve(20)
    before = live()
    assert serve(500) > 20
    assert live() == before


class Never:
    """An array that a device which hangs will not make."""

    def is_ready(self) -> bool:
        return False

    def copy_to_host_async(self) -> None:
        pass


def hanging_engine(target, **policy) -> Engine:
    """Nothing comes back from its third round on."""
    decode = DecodeConfig(block_size=4, miss="keep", stall_s=0.5, **policy)
    engine, rounds = build(target, random_model(SMALL, 3, 4), decode, devices=2), []
    runner = engine._scheduler._runner
    works = runner.launch

    def launch(*args):
        rounds.append(works(*args))
        return rounds[-1] if len(rounds) < 3 else Launched((rounds[-1].arrays, Never()), rounds[-1].read)

    runner.launch = launch
    return engine


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_devices_that_hang_are_plain_decoding_from_there_on(target, ar_tokens, sampling):
    engine = hanging_engine(target, on_draft_failure="plain")
    with pytest.warns(RuntimeWarning, match=r"drafting failed \(the devices have given nothing for 0.5 s"):
        found = [run(engine, [prompt], 40, (), sampling)[0] for prompt in PROMPTS]
    assert [one.ids for one in found] == ar_tokens(sampling)
    assert len(found[0].rounds) == 2 and not found[1].rounds  # what was drafted, and what was not


def test_devices_that_hang_are_an_error_unless_plain_decoding_was_asked_for(target):
    engine, begin = hanging_engine(target), time.monotonic()
    with pytest.raises(DeviceError, match=r"nothing for 0.5 s \(stall_s\); one of them hangs"):
        run(engine, [PROMPTS[0]], 40)
    assert time.monotonic() - begin < 20

"""Many requests through few rows: continuous batching, streaming, cancelling, stop texts, log-probabilities."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random

import jax
import numpy as np
import pytest

from d3d_jax.config import DecodeConfig, SamplingParams
from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.prompt_chunks import plan, sizes_for
from d3d_jax.errors import CapacityError, CompatibilityError
from d3d_jax.models.qwen3 import forward, logits

from .conftest import CONFIG, PROMPTS, SAMPLED, SMALL, TOKEN_IDS, build, random_model, run, shared

MODES = {
    "ar": {"mode": "ar"},
    "sync": {"mode": "sync"},
    "keep": {"mode": "async", "miss": "keep"},
    "redraft": {"mode": "async", "miss": "redraft"},
}
MANY = [[(7 * n + k) % TOKEN_IDS for k in range(1 + 11 * n % 47)] for n in range(9)]


class Letters:
    """A tokenizer whose token i is the letter i: text and ids are one for one."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 0x4E00 for letter in text]}

    def decode(self, ids, **_) -> str:
        return "".join(chr(0x4E00 + i) for i in ids)


# The newest JAX sees the modes whose programs it shares with the others.
ALL = [pytest.param(mode, marks=[pytest.mark.slow] if mode in ("sync", "keep") else []) for mode in MODES]


@pytest.fixture(params=ALL, scope="module")
def engine(request):
    """Three rows of a mode, on two devices where it has two; the drafter has the target's own weights."""
    decode = DecodeConfig(block_size=4, **MODES[request.param])
    target, drafter = random_model(CONFIG, 0), random_model(CONFIG, 0, 4)
    return build(target, drafter, decode, 2, rows=3, tokenizer=Letters())


@pytest.fixture(scope="module")
def alone():
    """What each of MANY gives by itself, sampled with a seed of its own."""
    ar = shared(0, DecodeConfig(mode="ar", block_size=4))
    return [ar.generate([prompt], setting)[0].ids for prompt, setting in zip(MANY, settings(), strict=True)]


def settings() -> list[SamplingParams]:
    """Greedy and sampled rows of unequal budgets."""
    budgets = [5 + 9 * n % 40 for n in range(len(MANY))]
    return [
        dataclasses.replace(SAMPLED, seed=n, max_tokens=most) if n % 3 else SamplingParams(max_tokens=most)
        for n, most in enumerate(budgets)
    ]


def test_rows_come_and_go_while_others_go_on_and_no_token_depends_on_company(engine, alone):
    order: list[int] = []
    completions = engine.generate(MANY, settings(), on_completion=lambda number, done: order.append(number))
    assert [c.ids for c in completions] == alone
    assert sorted(order) == list(range(len(MANY))) and order != sorted(order)


def test_company_in_any_order_changes_nothing(engine, alone):
    everything = list(zip(MANY, settings(), alone, strict=True))
    for seed in range(2):
        mixed = random.Random(seed).sample(everything, len(everything))
        completions = engine.generate([m[0] for m in mixed], [m[1] for m in mixed])
        assert [c.ids for c in completions] == [m[2] for m in mixed]


def test_a_request_that_comes_later_joins_those_under_way(engine, alone):
    first = engine.submit(MANY[4], settings()[4])
    for _ in range(3):
        engine.step()
    second = engine.submit(MANY[5], settings()[5])
    while not (first.finished and second.finished):
        engine.step()
    assert [first.completion().ids, second.completion().ids] == alone[4:6]


def test_streamed_pieces_join_to_the_text_and_streams_run_side_by_side(engine, alone):
    streams = [engine.stream(MANY[n], settings()[n]) for n in (4, 5)]
    texts, done = ["", ""], {}
    while len(done) < 2:
        for n, stream in enumerate(streams):
            for piece in [next(stream)] if n not in done else []:
                texts[n] += piece.text
                if piece.completion:
                    done[n] = piece.completion
    for n in (0, 1):
        assert done[n].ids == alone[4 + n]
        assert texts[n] == done[n].text == Letters().decode(done[n].ids)


def test_asynchronous_streams_share_the_rows(engine, alone):
    async def read(n: int) -> tuple[str, tuple[int, ...]]:
        text, ids = "", ()
        async for piece in engine.astream(MANY[n], settings()[n]):
            text += piece.text
            ids = piece.completion.ids if piece.completion else ()
        return text, ids

    async def read_all() -> list:
        return await asyncio.gather(*(read(n) for n in range(len(MANY))))

    for n, (text, ids) in enumerate(asyncio.run(read_all())):
        assert ids == alone[n] and text == Letters().decode(ids)


def test_a_stop_text_ends_text_ids_and_logprobs_at_one_token(engine):
    setting = dataclasses.replace(SAMPLED, max_tokens=30, logprobs=True)
    whole = engine.generate([PROMPTS[1]], setting)[0]
    for at in range(1, 14):
        stop = whole.text[at : at + 2]  # two tokens, at every offset of a block
        place = whole.text.find(stop)
        cut = dataclasses.replace(setting, stop=(stop,))
        done = engine.generate([PROMPTS[0], PROMPTS[1]], [setting, cut])[1]
        assert done.ids == whole.ids[: place + 2] and done.text == whole.text[:place]
        assert len(done.logprobs) == len(done.ids) and done.finish_reason == "stop"
        streamed = "".join(piece.text for piece in engine.stream(PROMPTS[1], cut))
        assert streamed == done.text


def test_logprobs_are_those_of_the_whole_text_under_the_target(engine):
    done = engine.generate([PROMPTS[1]], dataclasses.replace(SAMPLED, max_tokens=20, logprobs=True))[0]
    params = random_model(CONFIG, 0).params
    tokens = np.array([[*PROMPTS[1], *done.ids]])
    scores = jax.nn.log_softmax(logits(params, forward(params, tokens, CONFIG)))[0]
    places = np.arange(len(PROMPTS[1]) - 1, tokens.shape[1] - 1)
    np.testing.assert_allclose(done.logprobs, scores[places, np.array(done.ids)], atol=2e-4)
    assert engine.generate([PROMPTS[1]], SamplingParams(max_tokens=3))[0].logprobs is None


def test_cancelled_requests_free_their_rows_and_leave_the_others_alone(engine, alone):
    dice = random.Random(1)
    for _ in range(2):
        requests = [engine.submit(prompt, setting) for prompt, setting in zip(MANY, settings(), strict=True)]
        gone = set(dice.sample(range(len(MANY)), 4))
        step = 0
        while not all(request.finished for request in requests):
            engine.step()
            step += 1
            for n in sorted(gone):
                if step >= n % 5:
                    engine.cancel(requests[n])
        for n, request in enumerate(requests):
            done = request.completion()
            assert done.ids == alone[n][: len(done.ids)]
            assert n in gone or done.ids == alone[n]


def test_a_closed_stream_is_cancelled(engine, alone):
    stream = engine.stream(MANY[5], settings()[5])
    next(stream)
    stream.close()
    assert engine.generate([MANY[4]], settings()[4])[0].ids == alone[4]


def test_memory_returns_to_its_start(engine):
    def live() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    def some(count: int) -> None:
        dice = random.Random(count)
        for n in range(count):
            request = engine.submit(MANY[n % len(MANY)], SamplingParams(max_tokens=dice.randint(1, 6)))
            for _ in range(dice.randint(0, 3)):
                engine.step()
            if dice.random() < 0.5:
                engine.cancel(request)
        engine.generate([[1]], SamplingParams(max_tokens=2))

    some(20)
    before = live()
    some(60)
    assert live() == before


def test_launches_do_not_grow_with_the_batch(engine):
    class Count(Observer):
        def __init__(self):
            self.programs = []

        def launched(self, program, device, number, outputs):
            self.programs.append(program)

    setting = SamplingParams(max_tokens=24)
    counts = []
    for rows in (1, 3):
        engine.generate([PROMPTS[0]] * rows, setting, observer=(seen := Count()))
        counts.append(len(seen.programs))
    # Two more prompts join, one a round.
    assert counts[1] <= counts[0] + 2 * 3


@pytest.mark.parametrize("max_len", [40, 64, 100, 512, 700, 4112])
def test_chunks_hold_the_prompt_and_never_reach_past_the_cache(max_len):
    sizes = set(sizes_for(max_len))
    for length in {1, 2, 63, 64, 65, 129, 511, 513, max_len // 2, max_len - 16, max_len}:
        if 0 < length <= max_len:
            chunks = plan(length, max_len)
            assert sum(count for count, _ in chunks) == length
            starts = np.cumsum([0, *(size for _, size in chunks)])
            assert starts[-1] <= max_len
            assert all(count == size for count, size in chunks[:-1])
            assert {size for _, size in chunks} <= sizes or length > max_len - max_len % 64


@pytest.mark.parametrize("mode", ALL)
def test_a_prompt_in_chunks_is_the_prompt_at_once(monkeypatch, mode):
    prompt = [(3 * k) % TOKEN_IDS for k in range(75)]
    decode = DecodeConfig(block_size=4, **MODES[mode])
    target, drafter = random_model(CONFIG, 0), random_model(SMALL, 3, 4)
    whole = run(build(target, drafter, decode, 2), [prompt, PROMPTS[1]], 20, sampling=SAMPLED)
    monkeypatch.setattr("d3d_jax.decoding.prompt_chunks.SIZES", (16,))
    pieces = run(build(target, drafter, decode, 2, rows=2), [prompt, PROMPTS[1]], 20, sampling=SAMPLED)
    assert [c.ids for c in pieces] == [c.ids for c in whole]
    assert [c.rounds for c in pieces] == [c.rounds for c in whole]


def test_what_needs_a_tokenizer_says_so():
    bare = shared(0, DecodeConfig(mode="ar", block_size=4))
    for ask in (
        lambda: bare.generate(["text"]),
        lambda: bare.generate([[1]], SamplingParams(stop=("a",))),
        lambda: bare.stream([1]),
    ):
        with pytest.raises(CompatibilityError, match="tokenizer"):
            ask()
    with pytest.raises(CapacityError, match="2 prompts and 1 settings"):
        bare.generate([[1], [2]], [SamplingParams()])


@pytest.mark.parametrize("mode", ALL[1:])
def test_a_drafter_that_fails_is_an_error_or_plain_decoding_but_never_silent(mode, alone):
    """The caches of both sides are lost; what was decoded is not, and sampled tokens stay AR's."""
    target, drafter = random_model(CONFIG, 0), random_model(CONFIG, 0, 4)

    def failing(policy: str):
        decode = DecodeConfig(block_size=4, on_draft_failure=policy, step_by_step=True, **MODES[mode])
        engine = build(target, drafter, decode, 2, rows=2)
        runner = engine._scheduler._runner
        program = "_draft" if mode == "sync" else "_select_packed" if mode == "keep" else "_packed"
        works, calls = getattr(runner, program), []

        def third_time(*args, **how):
            calls.append(None)
            if len(calls) == 3:
                raise RuntimeError("the drafter's device is gone")
            return works(*args, **how)

        setattr(runner, program, third_time)
        return engine

    engine = failing("plain")
    with pytest.warns(RuntimeWarning, match=r"drafting failed \(the drafter's device is gone\)"):
        completions = engine.generate(MANY[3:7], settings()[3:7])
    assert [c.ids for c in completions] == alone[3:7]
    assert 0 < sum(len(c.rounds) for c in completions) <= 4  # so many were drafted
    assert engine.generate(MANY[:2], settings()[:2])[1].ids == alone[1]

    engine = failing("retry")
    with pytest.warns(RuntimeWarning, match="begins again from fresh caches"):
        completions = engine.generate(MANY[3:7], settings()[3:7])
    assert [c.ids for c in completions] == alone[3:7]
    assert sum(c.drafted_rounds for c in completions) > 8
    assert all(c.drafted_rounds for c in completions)

    engine = failing("error")
    with pytest.raises(RuntimeError, match="device is gone"):
        engine.generate(MANY[3:7], settings()[3:7])
    assert [c.ids for c in engine.generate(MANY[3:7], settings()[3:7])] == alone[3:7]


def test_a_drafter_that_never_works_is_tried_once(alone, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such device")

    monkeypatch.setattr("d3d_jax.decoding.asynchronous.Asynchronous.launch", broken)
    target, drafter = random_model(CONFIG, 0), random_model(CONFIG, 0, 4)
    engine = build(target, drafter, DecodeConfig(block_size=4, on_draft_failure="retry"), 2, rows=2)
    with pytest.warns(RuntimeWarning, match="the target decodes alone from here on"):
        completions = engine.generate(MANY[3:7], settings()[3:7])
    assert [c.ids for c in completions] == alone[3:7]
    assert not any(c.drafted_rounds for c in completions)


@pytest.mark.parametrize("mode", ALL)
def test_what_was_handed_to_a_device_is_never_written_again(mode, alone, monkeypatch):
    """A device may read a host array long after the call returned, so it must stay as it was."""
    handed = []

    def put(tree, *args, **how):
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, np.ndarray):
                leaf.flags.writeable = False
                handed.append((leaf, leaf.copy()))
        return works(tree, *args, **how)

    works = jax.device_put
    monkeypatch.setattr(jax, "device_put", put)
    engine = shared(0, DecodeConfig(block_size=4, **MODES[mode]), 2, rows=3)
    assert [c.ids for c in engine.generate(MANY, settings())] == alone
    assert len(handed) > 2 * len(MANY)
    for leaf, before in handed:
        np.testing.assert_array_equal(leaf, before)

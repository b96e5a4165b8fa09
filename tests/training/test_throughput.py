"""What a run says of its speed: tokens, FLOPs against the peak, and the time that devices wait for data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from d3d_jax.config import BlockConfig, LossConfig, WatchConfig
from d3d_jax.data.packing import Document, block_starts, pack
from d3d_jax.models.qwen3 import forward, head, init_params
from d3d_jax.training import throughput
from d3d_jax.training.loop import train
from d3d_jax.training.throughput import Throughput, Work, peak_flops, work_of
from tests.training.toy import BLOCKS, MODEL, records


class Clock:
    """Stands still but for what is done with it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def batches(clock: Clock, *seconds: float) -> Iterator[int]:
    """Batch i comes after so many seconds."""
    for number, wait in enumerate(seconds):
        clock.now += wait
        yield number


def test_tokens_count_when_their_step_has_finished():
    clock = Clock()
    speed = Throughput(lambda number: Work(10 * (number + 1), 7), peak=70.0, clock=clock)
    source = batches(clock, 0, 0, 0, 0, 0)
    for _ in range(3):
        speed.next_batch(source, lambda: False)
        clock.now += 1
    # The third step is still running.
    assert speed.report() == {"tokens_per_s": 30 / 3, "loader_wait": 0, "mfu": pytest.approx(14 / 3 / 70)}
    speed.next_batch(source, lambda: False)
    clock.now += 2
    assert speed.report()["tokens_per_s"] == 30 / 2
    speed.restart()
    clock.now += 1
    speed.next_batch(source, lambda: False)
    assert speed.report() == {}, "the step before a restart does not count"


def test_only_waiting_of_idle_devices_counts():
    clock = Clock()
    speed = Throughput(lambda number: Work(1, 1), peak=None, clock=clock)
    source = batches(clock, 1, 2, 3)
    for idle in (True, False, True):
        speed.next_batch(source, lambda idle=idle: idle)
    clock.now += 4
    assert speed.report() == {"tokens_per_s": 2 / 10, "loader_wait": (1 + 3) / 10}


def test_the_flops_of_a_forward_pass_are_those_that_a_compiler_counts():
    """One document in one row, causal: XLA counts every product of the dense attention, so ours are compared with all
    keys visible; norms, rotations and softmax are what it counts on top.
    """
    length = 64
    model = dataclasses.replace(MODEL, hidden_size=64, intermediate_size=256, vocab_size=512)
    rows, _ = pack([Document(np.arange(length, dtype=np.int32), 5)], length, 0)
    batch = {**rows.arrays(), "position": np.full((1, length), length - 1)}
    config = SimpleNamespace(objective="ar")
    ours = work_of(batch, model, config).flops / 3  # pyright: ignore[reportArgumentType]

    def whole(params, tokens):
        return forward(params, tokens, model) @ head(params).T

    # A loop's body is counted once: the layers are told apart.
    def counted(layers: int) -> float:
        one = dataclasses.replace(model, num_hidden_layers=layers)
        compiled = jax.jit(whole).lower(init_params(one), rows.tokens).compile()
        return compiled.cost_analysis()["flops"]

    layer = sum(np.prod(w.shape[1:]) for w in init_params(model)["layers"].values() if w.ndim == 3)
    products = 2 * length * (layer + model.vocab_size * model.hidden_size)
    attention = 4 * length * length * model.num_attention_heads * model.head_dim
    assert products + attention == pytest.approx(counted(1), rel=0.15)
    assert ours == products + attention + (model.num_hidden_layers - 1) * (2 * length * layer + attention)


def test_blocks_are_work_and_padding_is_none(config):
    rows, _ = pack([Document(np.arange(9, dtype=np.int32), 3)], 16, 0)
    plan = block_starts(rows, 4, 6, np.random.default_rng(0))
    arrays = {**rows.arrays(), "block_start": plan.start}
    drafter, target = config(blocks=BLOCKS), config(objective="ar")
    causal = config(blocks=BLOCKS, block_attention="causal")
    used = int((plan.start >= 0).sum())
    plain = work_of(arrays, MODEL, target)
    assert plain.tokens == work_of(arrays, MODEL, drafter).tokens == 9
    layer = sum(w.shape[1] * w.shape[2] for w in init_params(MODEL)["layers"].values() if w.ndim == 3)
    of_a_position = 6 * (2 * layer + MODEL.vocab_size * MODEL.hidden_size)
    of_a_key = 12 * MODEL.num_hidden_layers * MODEL.num_attention_heads * MODEL.head_dim
    assert plain.flops == 9 * of_a_position + sum(range(1, 10)) * of_a_key
    before = int(plan.start[plan.start >= 0].sum())  # the document starts at slot 0
    more = work_of(arrays, MODEL, drafter).flops - plain.flops
    assert more == 4 * used * of_a_position + (4 * before + 16 * used) * of_a_key
    assert more - (work_of(arrays, MODEL, causal).flops - plain.flops) == 6 * used * of_a_key


def test_a_peak_is_known_given_or_left_out(config):
    def peak(kind: str, **changes) -> float | None:
        return peak_flops(SimpleNamespace(device_kind=kind), config(**changes))  # pyright: ignore[reportArgumentType]

    assert peak("NVIDIA H200", dtype="bfloat16") == 989e12
    assert peak("NVIDIA H100 80GB HBM3", dtype="bfloat16") == 989e12
    assert peak("NVIDIA H100 PCIe", dtype="bfloat16") == 756e12
    assert peak("TPU v5 lite", dtype="bfloat16") == 197e12
    assert peak("TPU v5", dtype="bfloat16") == 459e12
    assert peak("NVIDIA H200", dtype="float32") is None
    assert peak("cpu", dtype="bfloat16") is None
    assert peak("cpu", watch=WatchConfig(peak_tflops=0.1)) == 1e11


def run_of(config, short_corpus, **changes):
    """Ten steps that take some milliseconds each."""
    blocks = BlockConfig(block_size=4, blocks_per_row=6)
    run = config(
        train_data=str(short_corpus), steps=20, save_every=20, log_every=5, blocks=blocks,
        loss=LossConfig(gamma=4.0, chunk=16), **changes,
    )  # fmt: skip
    train(run, jax.devices()[:1])
    return [record for record in records(run) if "loader_wait" in record]


def test_a_run_tells_its_speed_and_hardly_waits_for_data(config, short_corpus):
    told = run_of(config, short_corpus, watch=WatchConfig(peak_tflops=1.0))
    assert [record["step"] for record in told] == [5, 10, 15]
    assert all(record["tokens_per_s"] > 0 and 0 < record["mfu"] < 1 for record in told)
    assert min(record["loader_wait"] for record in told) < 0.05


def test_a_loader_that_is_too_slow_is_found_out(config, short_corpus, monkeypatch):
    import time

    real = throughput.Throughput.next_batch

    def slow(self, batches, idle):
        class Slow:
            def __next__(self):
                time.sleep(0.1)
                return next(batches)

        return real(self, Slow(), idle)

    monkeypatch.setattr(throughput.Throughput, "next_batch", slow)
    told = run_of(config, short_corpus)
    assert "mfu" not in told[-1]
    assert told[-1]["loader_wait"] > 0.5

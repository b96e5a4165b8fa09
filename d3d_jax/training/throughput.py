"""How fast a run goes, how much of the devices it uses, and how long they wait for data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from d3d_jax.config import ModelConfig, TrainConfig
from d3d_jax.models.layers import layer_table

# Dense bfloat16 products a second of one device, by the start of its kind as JAX names it; from the makers' data
# sheets, without sparsity. What is not here has no MFU, unless `watch.peak_tflops` says what it can.
PEAK_TFLOPS = {
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5e": 197,
    "TPU v5p": 459,
    "TPU v5": 459,  # what JAX calls a v5p
    "TPU v6 lite": 918,
    "TPU v6e": 918,
    "NVIDIA A100": 312,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
    "NVIDIA GH200": 989,
    "NVIDIA B200": 2250,
}


def peak_flops(device: jax.Device, config: TrainConfig) -> float | None:
    """Most FLOP/s of a device in the run's type, or None where that is not known."""
    if config.watch.peak_tflops is not None:
        return config.watch.peak_tflops * 1e12
    if config.dtype != "bfloat16":
        return None
    fitting = [name for name in PEAK_TFLOPS if device.device_kind.startswith(name)]
    return PEAK_TFLOPS[max(fitting, key=len)] * 1e12 if fitting else None


class Work(NamedTuple):
    """Of one batch: tokens of documents, and FLOPs of the step on them."""

    tokens: float
    flops: float


def work_of(batch: Mapping[str, np.ndarray], model: ModelConfig, config: TrainConfig) -> Work:
    """What a step does with this process's part of a batch, without padding.

    FLOPs are the model's, three times those of a forward pass (Chowdhery et al. 2022, appendix B), so recomputed
    activations and frozen parameters make no difference:

        3 * sum over positions of [2 * (L * matrix parameters of a layer + V D) + 4 L N H * visible keys]

    The positions are the documents' tokens and, for a drafter, the G of every block.
    """
    layer = sum(int(np.prod(p.shape)) for p in layer_table(model).values() if len(p.shape) == 2)
    products = 2 * (model.num_hidden_layers * layer + model.vocab_size * model.hidden_size)
    of_a_key = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
    real = batch["document"] >= 0
    tokens = positions = int(real.sum())
    keys = int((batch["position"] + 1)[real].sum())
    if config.objective == "d3d":
        size = config.blocks.block_size
        row, place = np.nonzero(batch["block_start"] >= 0)
        before = batch["position"][row, batch["block_start"][row, place]]
        own = size if config.block_attention == "bidirectional" else (size + 1) / 2
        positions += size * len(row)
        keys += size * (int(before.sum()) + own * len(row))
    return Work(tokens, 3 * (products * positions + of_a_key * keys))


class Throughput:
    """Speed between two reports: tokens and FLOPs of finished steps, and the time that devices waited for a batch.

    Args:
        work: what a batch comes to, over all processes.
        peak: FLOP/s that all devices of the run can do at most, or None.
    """

    def __init__(self, work: Callable[[Any], Work], peak: float | None, clock: Callable[[], float] = time.perf_counter):
        self._work, self._peak, self._clock = work, peak, clock
        self.restart()

    def restart(self) -> None:
        """Count from now on, with no step under way."""
        self._since, self._waited = self._clock(), 0.0
        self._tokens = self._flops = 0.0
        self._running = Work(0, 0)

    def next_batch(self, batches: Any, idle: Callable[[], bool]) -> Any:
        """The next of `batches`; the step on the one before counts as finished from here on.

        idle: whether the devices have nothing to do. If they have not when the batch is there, the time until it
        came is counted as waiting. Launching runs ahead of the devices, so most of that time costs nothing; the
        count is at most too high.
        """
        self._tokens, self._flops = self._tokens + self._running.tokens, self._flops + self._running.flops
        begin = self._clock()
        batch = next(batches)
        if idle():
            self._waited += self._clock() - begin
        self._running = self._work(batch)
        return batch

    def report(self) -> dict[str, float]:
        """`tokens_per_s`, `loader_wait` (a share) and, where the peak is known, `mfu` (a share) since the last report.

        Call it when all steps but the newest have finished. Empty where that is no step.
        """
        if not self._tokens:
            return {}
        seconds = max(self._clock() - self._since, 1e-9)
        said = {"tokens_per_s": self._tokens / seconds, "loader_wait": self._waited / seconds}
        if self._peak is not None:
            said["mfu"] = self._flops / seconds / self._peak
        running = self._running
        self.restart()
        self._running = running
        return said

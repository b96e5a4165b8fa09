"""Time of every attention kernel beside its baselines, as a share of what the same device does in the same run.

    python kernels/benchmarks/attention.py                  # every case and backend of this device, about 8 minutes
    python kernels/benchmarks/attention.py --only verify    # one kind of case
    python kernels/benchmarks/attention.py --tiny           # toy shapes, interpreted: on any CPU, without meaning

The ceiling of a case is the copy bandwidth or the matrix product rate measured at the start of the run, whichever the
case would meet first. Times are medians; compiling is not in them.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script runs from a checkout
sys.path.insert(0, str(Path(__file__).parent))  # and finds its neighbour when it is not run as a script

from baselines import baselines

from d3d_kernels import (
    BACKENDS,
    Intervals,
    attention_plan,
    interval_attention,
    interval_decode,
    packed_intervals,
    training_intervals,
    verify_intervals,
)
from d3d_kernels.backends import ATTENTION, DECODE, fault

KINDS = ("verify", "packed", "train")
OWN = {"cpu": ("xla",), "gpu": ("xla", "triton", "mosaic_gpu"), "tpu": ("xla", "mosaic_tpu")}


class Case(NamedTuple):
    """A shape to measure. `rows` are clean tokens in training, the capacity of the cache otherwise."""

    kind: str
    model: str
    batch: int
    heads: int
    kv_heads: int
    width: int
    rows: int
    length: int  # cached tokens of each sequence; in training, tokens of a document
    block: int
    dtype: str = "bfloat16"


class Problem(NamedTuple):
    """Operands, and what they cost: FLOPs of visible scores and bytes that must move."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    intervals: Intervals
    new: dict[str, jax.Array]
    flops: float
    moved: float


def cases(tiny: bool) -> Iterator[Case]:
    """Qwen3-8B and 32B over cache lengths and batches; or one toy of each kind."""
    if tiny:
        yield Case("verify", "toy", 2, 4, 2, 64, 160, 100, 4)
        yield Case("packed", "toy", 1, 4, 2, 64, 160, 100, 4)
        yield Case("train", "toy", 1, 2, 1, 64, 64, 40, 4)
        return
    for model, heads in (("8B", 32), ("32B", 64)):
        for batch, length in ((1, 2048), (1, 30000), (4, 8192), (4, 30000), (16, 8192)):
            yield Case("verify", model, batch, heads, 8, 128, 32768, length, 16)
        for length in (2048, 30000):
            yield Case("packed", model, 1, heads, 8, 128, 32768, length, 16)
        for batch, document in ((2, 1024), (2, 8192)):
            yield Case("train", model, batch, heads, 8, 128, 8192, document, 16)


def problem(case: Case) -> Problem:
    """Random operands of a case. A packed pass has a clean block and one masked block for each of its outcomes."""
    length = jnp.full((case.batch,), case.length)
    new_rows = 0
    if case.kind == "verify":
        intervals = verify_intervals(length, case.block)
    elif case.kind == "packed":
        new_rows = case.block**2
        context = length[:, None] + jnp.arange(case.block) + 1
        parts = (verify_intervals(length, case.block), packed_intervals(context, case.block, case.rows))
        intervals = Intervals(*(jnp.concatenate(pair, axis=1) for pair in zip(*parts, strict=True)))
    else:
        slot = jnp.broadcast_to(jnp.arange(case.rows), (case.batch, case.rows))
        starts = jnp.broadcast_to(
            jnp.arange(0, case.rows, 2 * case.block) + 3, (case.batch, case.rows // 2 // case.block)
        )
        intervals = training_intervals(slot // case.length * case.length, starts, case.block)
    queries = intervals.lo1.shape[1]
    keys = queries if case.kind == "train" else case.rows
    shapes = [(case.heads, queries), (case.kv_heads, keys), (case.kv_heads, keys), *[(case.kv_heads, new_rows)] * 2]
    seeds = jax.random.split(jax.random.key(0), 5)
    q, k, v, *new = (
        jax.random.normal(seed, (case.batch, *shape, case.width), case.dtype)
        for seed, shape in zip(seeds, shapes, strict=True)
    )
    seen = sum(jnp.maximum(hi - lo, 0) for lo, hi in (intervals[:2], intervals[2:])).astype(jnp.float32).sum()
    size = jnp.dtype(case.dtype).itemsize
    read = case.batch * (keys if case.kind == "train" else case.length) + case.batch * new_rows
    return Problem(
        q,
        k,
        v,
        intervals,
        dict(zip(("k_new_BKTH", "v_new_BKTH"), new, strict=True)) if new_rows else {},
        4.0 * case.heads * case.width * float(seen) * (3.5 if case.kind == "train" else 1),
        2.0 * size * case.width * (read * case.kv_heads + case.batch * queries * case.heads),
    )


def contestants(case: Case, given: Problem, platform: str, tiny: bool) -> Iterator[tuple[str, Callable, tuple]]:
    """(name, function, operands) of each backend that takes the case, and of the baselines that do."""
    operation = ATTENTION if case.kind == "train" else DECODE
    for backend in [name for name in BACKENDS if name != "mosaic_gpu"] if tiny else OWN[platform]:
        if fault(backend, operation, case.width, [case.dtype]):
            continue
        chosen: dict[str, Any] = {"backend": backend, "interpret": tiny and backend != "xla"}
        if case.kind == "train":
            plan = attention_plan(given.q, given.k, given.intervals, backend=backend)
            function = functools.partial(interval_attention, plan=plan, **chosen)
        else:
            function = functools.partial(interval_decode, **given.new, **chosen)
        yield backend, with_gradients(function) if case.kind == "train" else function, given[:4]
    if given.new:
        return  # other libraries have no keys beside a cache
    for name, function in baselines(case.kind, platform, given.intervals, given.k.shape[2]):
        if isinstance(function, str):
            print(f"{name}: left out, {function}")
        else:
            yield name, with_gradients(function) if case.kind == "train" else function, given[:4]


def with_gradients(attend: Callable) -> Callable:
    """Forward and backward, for operands whose output's gradient is the output itself."""

    def step(q: jax.Array, k: jax.Array, v: jax.Array, intervals: Intervals) -> tuple:
        output, back = jax.vjp(lambda q, k, v: attend(q, k, v, intervals), q, k, v)
        return back(output)

    return step


def seconds(function: Callable, *operands: Any, repeats: int) -> float:
    """Median time of a call. Calls are issued back to back, so that a device never waits for the host."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*operands))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*operands) for _ in range(repeats)])
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def ceilings(tiny: bool, repeats: int) -> tuple[float, float]:
    """(bytes per second of a copy, bfloat16 FLOPs per second of a large matrix product) of this device, now."""
    size = 256 if tiny else 8192
    x = jnp.ones((size, size), jnp.bfloat16)
    copied = 2 * x.nbytes / seconds(lambda x: x + 1, x, repeats=repeats)
    return copied, 2.0 * size**3 / seconds(lambda x: x @ x, x, repeats=repeats)


def main(arguments: list[str] | None = None) -> list[dict]:
    """Measures, prints a row for each contestant of each case, and returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--tiny", action="store_true", help="toy shapes, kernels interpreted")
    parser.add_argument("--budget-s", type=float, default=480, help="no case is begun after so many seconds")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args(arguments)
    platform, repeats, begun, rows = jax.default_backend(), 1 if options.tiny else 7, time.monotonic(), []
    bandwidth, rate = ceilings(options.tiny, repeats)
    what = "toy shapes, interpreted: times mean nothing" if options.tiny else f"jax {jax.__version__}"
    print(f"{jax.devices()[0].device_kind}, {what}: copy {bandwidth / 1e9:.0f} GB/s, product {rate / 1e12:.2f} TFLOP/s")
    print(f"{'case':<34}{'backend':<14}{'ms':>10}{'GB/s':>9}{'TFLOP/s':>9}{'of ceiling':>12}")
    for case in cases(options.tiny):
        if case.kind not in options.only:
            continue
        if time.monotonic() - begun > options.budget_s:
            print(f"stopped after {options.budget_s:.0f} s: cases from {case.kind} {case.model} on were not measured")
            break
        given = problem(case)
        label = f"{case.kind} {case.model} batch {case.batch} length {case.length}"
        for name, function, operands in contestants(case, given, platform, options.tiny):
            row = {**case._asdict(), "backend": name, "platform": platform, "tiny": options.tiny}
            try:
                took = seconds(function, *operands, repeats=repeats)
            except Exception as error:  # one that fails must not cost the others' results
                print(f"{label:<34}{name:<14}failed: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
                rows.append({**row, "error": str(error)})
                continue
            share = max(given.moved / bandwidth, given.flops / rate) / took
            rows.append({**row, "seconds": took, "bytes": given.moved, "flops": given.flops, "share": share})
            speed = f"{given.moved / took / 1e9:>9.1f}{given.flops / took / 1e12:>9.3f}"
            print(f"{label:<34}{name:<14}{took * 1e3:>10.3f}{speed}{share:>12.1%}")
    if options.output_json:
        options.output_json.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    sys.exit(any("error" in row for row in main()))

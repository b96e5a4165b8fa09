"""The benchmark runs on any machine, so that it does not rot between the days when there is an accelerator."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from d3d_kernels import interval_attention, training_intervals

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_benchmark_runs_tiny_with_every_contestant(tmp_path, capsys):
    benchmark = load("attention")
    rows = benchmark.main(["--tiny", "--output-json", str(tmp_path / "rows.json")])
    assert not [row for row in rows if "error" in row]
    found = {(row["kind"], row["backend"]) for row in rows}
    own = {(kind, backend) for kind in benchmark.KINDS for backend in ("xla", "triton", "mosaic_tpu")}
    assert found == own | {("verify", "jax.nn xla"), ("train", "jax.nn xla"), ("train", "splash")}
    assert all(row["flops"] > 0 and row["bytes"] > 0 for row in json.loads((tmp_path / "rows.json").read_text()))
    said = capsys.readouterr().out
    assert "times mean nothing" in said and "tokamax: left out, its kernels take no CPU" in said


@pytest.mark.slow
def test_every_baseline_computes_the_same_attention():
    baselines = load("baselines")
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, heads, 150, 64)), jnp.float32) for heads in (4, 2, 2))
    slot = jnp.broadcast_to(jnp.arange(120), (2, 120))
    intervals = training_intervals(slot // 70 * 70, jnp.broadcast_to(jnp.asarray([3, 40, 80]), (2, 3)), 10)
    expected = interval_attention(q, k, v, intervals)
    found = {name: function for name, function in baselines.baselines("train", "cpu", intervals, 150)}
    assert isinstance(found.pop("tokamax"), str) and set(found) == {"jax.nn xla", "splash"}
    for function in found.values():
        np.testing.assert_allclose(function(q, k, v, intervals), expected, rtol=0, atol=2e-5)

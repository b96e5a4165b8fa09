"""The benchmark runs on any machine, so that it does not rot between the days when there is an accelerator."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "attention.py"


@pytest.mark.slow
def test_the_benchmark_runs_tiny_with_every_contestant(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("attention_benchmark", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    rows = benchmark.main(["--tiny", "--output-json", str(tmp_path / "rows.json")])
    assert not [row for row in rows if "error" in row]
    found = {(row["kind"], row["backend"]) for row in rows}
    own = {(kind, backend) for kind in benchmark.KINDS for backend in ("xla", "triton", "mosaic_tpu")}
    assert found == own | {("verify", "jax.nn xla"), ("train", "jax.nn xla")}
    assert all(row["flops"] > 0 and row["bytes"] > 0 for row in json.loads((tmp_path / "rows.json").read_text()))
    assert "times mean nothing" in capsys.readouterr().out

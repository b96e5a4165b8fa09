"""Whole programs for accelerators that are not there: no copies, little beside the operands, no needless exchange."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from d3d_jax.benchmarks.compiled_programs import CASES, Case, as_table, faults
from d3d_jax.errors import ConfigError

ROOT = Path(__file__).parents[2]
QUICK, MORE = ["v5e:8B:verify", "v6e:8B:packed", "h200:8B:packed"], ["v5e:8B:packed-4", "v6e:32B:ar", "h200:32B:verify"]


@pytest.mark.aot
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)])
def test_a_program_keeps_its_limits(case):
    """Two layers of the model: each further one is like them. In a process of its own, with the compilers' defaults."""
    apart = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, str(ROOT / "scripts" / "compile_programs.py"), case, "--layers", "2", "--results", "-"]
    done = subprocess.run(command, env=apart, capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.stdout, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["faults"] == []


MEASURED = {
    "case": "v6e:8B:verify", "devices": 1, "layers": 36, "weights": 15_000, "cache": 1_000, "logits": 10,
    "temporary": 20, "in_place": 1_000, "copies": [], "collectives": {}, "traffic": 16_100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"copies": [["copy.7", 900]]}, "copies as large"),
        ({"in_place": 12}, "12 bytes in place"),
        ({"temporary": 400e6}, "400 MB of temporaries"),
        ({"traffic": 20_000}, "moves 1.25x"),
        ({"devices": 2, "collectives": {"all-reduce": 73, "collective-permute": 108}}, "181 exchanges"),
        ({"devices": 2, "collectives": {"all-reduce": 73, "all-gather": 1}}, None),
    ],
)
def test_each_limit_is_seen(change, said):
    found = faults({**MEASURED, **change}, Case.parse("v6e:8B:verify"))
    assert not found if said is None else len(found) == 1 and said in found[0]


def test_a_case_is_named_by_device_model_and_program():
    assert all(Case.parse(str(case)) == case for case in CASES)
    with pytest.raises(ConfigError, match="'v5e:8B:packed-17' is no device:model:program; devices h200, v6e, v5e"):
        Case.parse("v5e:8B:packed-17")


def test_the_table_has_a_row_for_each_program():
    rows = as_table([MEASURED]).splitlines()
    assert rows[2].startswith("| v6e | 8B | verify | 1 |") and rows[2].count("|") == rows[0].count("|") == 10
    assert "1.006x | none |" in rows[2]

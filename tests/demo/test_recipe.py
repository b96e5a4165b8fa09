"""The recipe of the embedded pair goes through every stage, and a second call has nothing left to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from d3d_jax.checkpoints.hf_config import read_drafter_config, read_model_config
from d3d_jax.demo import drafter_folder, target_folder

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rehearsal_makes_a_pair_of_the_embedded_shape(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    for name, arguments in {"python": '"$@"', "d3d": '-m d3d_jax.cli "$@"'}.items():
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}\n')
        command.chmod(0o755)
    search = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": search, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    command = ["bash", str(ROOT / "scripts/demo_pair/make_pair.sh"), "--rehearse", "work"]

    def run() -> subprocess.CompletedProcess:
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    made = run()
    assert made.returncode == 0, made.stdout + made.stderr
    target, drafter = tmp_path / "work/target", tmp_path / "work/drafter"
    assert read_model_config(target) == read_model_config(target_folder())
    assert read_model_config(drafter) == read_model_config(drafter_folder())
    assert read_drafter_config(drafter) == read_drafter_config(drafter_folder())
    tokenizer = "tokenizer.json"
    assert (target / tokenizer).read_bytes() == (target_folder() / tokenizer).read_bytes()
    again = run()
    assert (again.returncode, again.stdout) == (0, "")

"""The launchers hand over what they were given: each runs here against stand-ins for the tools it calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[1] / "scripts/launch"


@pytest.fixture
def launch(tmp_path: Path):
    """Run a launcher with an `srun` and a `gcloud` that tell their arguments and which devices to use, one a line."""
    for name in ("srun", "gcloud"):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho {name}\nprintf "%s\\n" "$@"\necho "devices=$JAX_LOCAL_DEVICE_IDS"\n')
        tool.chmod(0o755)

    def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        search = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", str(LAUNCH / script), *arguments]
        return subprocess.run(command, env={"PATH": search, **environment}, capture_output=True, text=True)

    return run


def test_slurm_starts_one_process_a_node_with_all_its_gpus(launch):
    done = launch("slurm.sh", "my drafter.yaml", "steps=3", SLURM_GPUS_ON_NODE="8")
    said = done.stdout.splitlines()
    assert said == [
        "srun",
        "d3d",
        "train",
        "--config",
        "my drafter.yaml",
        "--multi-host",
        "steps=3",
        "devices=0,1,2,3,4,5,6,7",
    ]
    assert launch("slurm.sh", "a.yaml").returncode != 0  # no GPUs were given
    assert "usage" in launch("slurm.sh").stderr


def test_a_tpu_slice_runs_the_same_command_on_every_host(launch):
    said = launch("tpu_vm.sh", "slice", "zone-a", "/mnt/my drafter.yaml", "steps=3").stdout.splitlines()
    assert "--worker=all" in said and "--zone=zone-a" in said and "slice" in said
    [command] = [line.removeprefix("--command=") for line in said if line.startswith("--command=")]
    heard = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True
    ).stdout.splitlines()
    assert heard == ["d3d", "train", "--config", "/mnt/my drafter.yaml", "--multi-host", "steps=3"]
    assert "ZONE is missing" in launch("tpu_vm.sh", "slice").stderr


def test_the_jobset_runs_it_and_leaves_time_to_save():
    text = (LAUNCH / "gke_jobset.yaml").read_text()
    spec = yaml.safe_load(text.replace("<", "'<").replace(">", ">'"))["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = spec["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] and pod["terminationGracePeriodSeconds"] >= 60
    assert pod["containers"][0]["command"][:2] == ["d3d", "train"] and "--multi-host" in pod["containers"][0]["command"]

"""Runs that stop, are killed or fill the disk: they go on from the last complete step as if nothing had happened."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from d3d_jax.config import BlockConfig, LossConfig, MeshConfig, RopeConfig, to_mapping
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.errors import TrainingError
from d3d_jax.training import loop
from d3d_jax.training.checkpointing import Checkpoints
from d3d_jax.training.loop import train
from d3d_jax.training.plan import plan_run
from d3d_jax.training.reporting import JsonLines
from d3d_jax.training.stopping import stop_signal
from tests.training.toy import MODEL, STEPS, assert_equal, records, saved


def signal_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal in the given call of a function of the loop."""
    real, calls = getattr(loop, name), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, name, counting)


# ---- stopping and going on


@pytest.mark.parametrize("step", [2, 3], ids=["inside an epoch", "exactly at an epoch's end"])
def test_a_run_that_was_stopped_and_resumed_is_bit_equal_to_one_that_was_not(
    config, short_corpus, whole, monkeypatch, capsys, step
):
    run = config(train_data=str(short_corpus))
    assert plan_run(run).train.steps_per_epoch == 3
    signal_at(monkeypatch, "_place", step)
    train(run, jax.devices()[:2])
    assert f"stopped by a signal; step {step} is saved" in capsys.readouterr().out
    assert int(saved(run).step) == step
    if step == 3:
        assert_equal(saved(run), saved(whole[0], step=3))  # what was saved while the other run went on
    monkeypatch.setattr(loop, "new_state", None)  # a second state would double the memory of a resume
    monkeypatch.setattr(loop, "fresh_params", None)
    last = train(run, jax.devices()[:2])
    assert f"resumed at step {step} of 6" in capsys.readouterr().out
    resumed = saved(run)
    assert int(resumed.step) == STEPS
    assert_equal(resumed, saved(whole[0]))
    assert last == whole[1]


def test_a_signal_during_validation_is_heeded_and_the_step_saved(config, corpus, monkeypatch, capsys):
    """The step of a validation need not be one of those that are saved anyway."""
    run = config(validation_data=str(corpus), validate_every=2)
    monkeypatch.setattr(loop, "validate", lambda *args: {"loss": 1.0})
    signal_at(monkeypatch, "validate", 1)
    train(run, jax.devices()[:2])
    assert "step 2 is saved" in capsys.readouterr().out
    assert int(saved(run).step) == 2


def test_the_second_signal_is_left_to_whoever_handled_it_before():
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with stop_signal() as stopped:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopped == [signal.SIGTERM] and not got
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(stopped) == 1 and got == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(got) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("devices", "mesh"), [(1, None), (2, None), (8, None), (8, MeshConfig(data=2, fsdp=2, tensor=2))]
)
def test_a_state_saved_on_two_devices_is_restored_on_any_number(whole, devices, mesh):
    state = saved(whole[0], devices, mesh=mesh)
    assert_equal(state, saved(whole[0], 2))
    for leaf in jax.tree.leaves(state):
        assert len(leaf.sharding.device_set) == devices
    assert int(state.step) == STEPS
    gate = state.params["layers"]["gate_proj"]
    assert gate.addressable_shards[0].data.size == gate.size // (4 if mesh else 1)


def test_a_state_is_restored_under_an_active_mesh(whole):
    plain = saved(whole[0], 4)
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:4])):
        assert_equal(saved(whole[0], 4), plain)


def test_a_run_goes_on_on_another_number_of_devices(config, short_corpus, whole, monkeypatch):
    """Sums over devices round differently, so this one is close, not equal."""
    run = config(train_data=str(short_corpus))
    signal_at(monkeypatch, "_place", 3)
    train(run, jax.devices()[:2])
    train(run, jax.devices()[:1])
    for a, b in zip(jax.tree.leaves(saved(run).params), jax.tree.leaves(saved(whole[0]).params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3)


def test_a_run_that_is_complete_is_not_run_again(whole):
    before = records(whole[0])
    train(whole[0], jax.devices()[:2])
    assert records(whole[0]) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"blocks": BlockConfig(block_size=3, blocks_per_row=6)}, "block_size: saved 4, now 3"),
        ({"mask_token_id": 21}, "mask_token_id: saved 20, now 21"),
        ({"loss": LossConfig(gamma=2.0, chunk=16)}, "loss: saved .*'gamma': 4.0.* now .*'gamma': 2.0"),
        ({"block_attention": "causal"}, "block_attention: saved 'bidirectional', now 'causal'"),
        ({"objective": "ar"}, "objective: saved 'd3d', now 'ar'"),
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"steps": 9}, "steps: saved 6, now 9"),
        ({"model": dataclasses.replace(MODEL, rope=RopeConfig(1e6))}, "model: saved .*10000.0.* now .*1000000.0"),
    ],
)
def test_a_resume_under_another_contract_is_refused_and_leaves_the_run_as_it_was(whole, monkeypatch, changes, said):
    run, _ = whole
    monkeypatch.setattr(loop, "new_state", None)  # refused before any parameter is made
    files = {path: path.read_bytes() for path in Path(run.output_dir).glob("*.*")}
    with pytest.raises(TrainingError, match=f"step 6 was saved under another contract .*{said}"):
        train(dataclasses.replace(run, **changes), jax.devices()[:2])
    assert {path: path.read_bytes() for path in Path(run.output_dir).glob("*.*")} == files


# ---- killed, or out of room, while saving

KILLED = """
import json, os, signal, sys
import jax
from d3d_jax.config import TrainConfig, from_mapping
from d3d_jax.training.loop import train

rename = os.rename

def killed(source, destination, **options):
    if os.path.basename(destination) == "6":  # all is written; only the step's own name is missing
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, destination, **options)

os.rename = killed
train(from_mapping(TrainConfig, json.loads(sys.argv[1])), jax.devices()[:2])
"""


def test_a_run_killed_during_a_save_goes_on_from_the_last_complete_step(config, short_corpus, whole, capsys):
    """Only one step is kept, and it is removed only after the next one is complete."""
    run = config(train_data=str(short_corpus), keep_last=1)
    root = Path(__file__).parents[2]
    child = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(to_mapping(run))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])},
        capture_output=True,
        text=True,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    steps = {path.name for path in (Path(run.output_dir) / "checkpoints").iterdir()}
    assert "3" in steps and "6" not in steps and len(steps) == 2  # the other one is what was begun
    last = train(run, jax.devices()[:2])
    assert "resumed at step 3 of 6" in capsys.readouterr().out
    assert_equal(saved(run), saved(whole[0]))
    assert last == whole[1]
    assert {path.name for path in (Path(run.output_dir) / "checkpoints").iterdir()} == {"6"}


def full_disk(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the disk be full when the given step is written, in the background, as it would be."""
    rename = os.rename

    def refused(source: Any, destination: Any, **options: Any) -> None:
        if os.path.basename(destination) == str(step):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(destination))
        rename(source, destination, **options)

    monkeypatch.setattr(os, "rename", refused)


def test_a_full_disk_stops_the_run_with_that_reason_and_keeps_the_step_before(config, short_corpus, monkeypatch):
    """orbax itself goes on, counts the step that failed, and tells at the next save."""
    run = config(train_data=str(short_corpus), keep_last=1, save_every=2, log_every=1)
    real = Checkpoints.check

    def patient(self: Checkpoints) -> None:  # steps of a toy are over sooner than a save
        while self._manager.is_saving_in_progress():
            time.sleep(0.01)
        real(self)

    monkeypatch.setattr(Checkpoints, "check", patient)
    full_disk(monkeypatch, 4)
    with pytest.raises(TrainingError, match=r"step 4 could not be saved: the disk of .* is full.* step is 2; free"):
        train(run, jax.devices()[:2])
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4]  # told before step 6 was to be saved
    monkeypatch.undo()
    assert int(saved(run).step) == 2


def test_a_last_save_that_fails_is_told_too(config, short_corpus, monkeypatch):
    run = config(train_data=str(short_corpus), save_every=6)
    full_disk(monkeypatch, 6)
    with pytest.raises(TrainingError, match=r"step 6 could not be saved: the disk of .*; no step is complete"):
        train(run, jax.devices()[:2])


def test_a_log_that_cannot_be_written_is_one_clear_error(tmp_path):
    log = JsonLines(tmp_path / "gone" / "metrics.jsonl")
    with pytest.raises(TrainingError, match=r"step 3 could not be noted in .*metrics.jsonl: No such file"):
        log.write(3, {"loss": 1.0})

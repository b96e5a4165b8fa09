"""A run of two processes with four devices each: the same curve as one process, one stop for all, one end for all."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import yaml

from d3d_jax.config import TrainConfig, to_mapping
from d3d_jax.devices.distributed import join_processes
from d3d_jax.errors import DeviceError
from d3d_jax.training.loop import train
from tests.training.toy import records

ROOT = Path(__file__).parents[2]
FAILING = """
import sys
from d3d_jax.devices import distributed
distributed.HEARTBEAT_S = 10
from d3d_jax.data.loader import Batches
from d3d_jax.errors import DataError
def broken(self, step):
    raise DataError("a broken file")
if sys.argv[sys.argv.index("--process") + 1] == "1/2":
    Batches.at = broken
"""
LATE = """
import sys, time
import jax
from d3d_jax.training import loop
make = loop.make_train_step
class Late:
    def __init__(self, program): self.program = program
    def lower(self, *args):
        time.sleep(35)
        return self.program.lower(*args)
    def __call__(self, *args): return self.program(*args)
if sys.argv[sys.argv.index("--process") + 1] == "1/2":
    loop.make_train_step = lambda *args: Late(make(*args))
"""
COMMAND = "import sys\nfrom d3d_jax.cli.main import main\nsys.exit(main())"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator:
    """Start `d3d train` as two processes; whatever is left of them at the end is killed."""
    started: list[subprocess.Popen] = []

    def start(run: TrainConfig, before: str = "") -> list[subprocess.Popen]:
        config = tmp_path / "run.yaml"
        config.write_text(yaml.safe_dump(to_mapping(run)))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "XLA_FLAGS": flags}
        for index in range(2):
            where = ["--coordinator", f"127.0.0.1:{port}", "--process", f"{index}/2"]
            command = [sys.executable, "-c", before + COMMAND, "train", "--config", str(config), *where]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, env=environment, **pipes))
        return started

    yield start
    for process in started:
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_have_the_curve_of_one_and_a_signal_to_one_stops_both(config, launch, corpus):
    settings = dict(batch_size=8, steps=100, log_every=2, save_every=100, validation_data=str(corpus))
    settings |= dict(validate_every=4, acceptance_every=4, acceptance_rows=8)
    run = config(**settings)
    processes = launch(run)
    metrics = Path(run.output_dir) / "metrics.jsonl"
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 3):
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)  # the one that neither tells nor writes
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert "stopped by a signal; step" in said[0][0]
    assert not {"d3d", "ar", "step", "stopped", "loss"} & set(
        said[1][0].split()
    )  # only Gloo's threads, in broken lines
    stopped_at = int(said[0][0].split("stopped by a signal; step ")[1].split()[0])
    assert stopped_at % 2 == 0 and (Path(run.output_dir) / "checkpoints" / str(stopped_at)).is_dir()
    told = records(run)
    reference = config(**settings)
    train(reference, jax.devices())
    alone = {(row["step"], name): value for row in records(reference) for name, value in row.items()}
    found = {(row["step"], name): value for row in told for name, value in row.items()}
    for name, tolerance in {"loss": 1e-4, "validation_loss": 1e-4, "tau_sync": 0.05, "hit_rate": 0.2}.items():
        steps = [step for step, told_name in found if told_name == name]
        assert steps, name
        for step in steps:
            assert found[step, name] == pytest.approx(alone[step, name], rel=tolerance, abs=1e-6), (step, name)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_process_that_raises_ends_the_job_and_is_named(config, launch):
    processes = launch(config(batch_size=8, objective="ar"), FAILING)
    _, said = processes[1].communicate()
    ended = time.monotonic()
    assert processes[1].returncode == 2
    assert f"error: on host {platform.node()} (process 1 of 2): DataError: a broken file" in said
    _, heard = processes[0].communicate()
    assert processes[0].returncode != 0 and time.monotonic() - ended < 60
    assert "The following tasks are unhealthy (stopped sending heartbeats):\n1\n" in heard


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_process_that_compiles_long_is_waited_for(config, launch):
    """Longer than the 30 s after which a collective of CPU devices gives up."""
    run = config(batch_size=8, steps=4, log_every=2, save_every=100, objective="ar")
    processes = launch(run, LATE)
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert [row["step"] for row in records(run)] == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a:1", None, False), "go together"),
        ((None, "0/2", False), "go together"),
        (("a:1", "0/2", True), "leave --coordinator and --process out"),
        (("a", "0/2", False), "expected HOST:PORT"),
        (("a:1", "2/2", False), r"'2/2': expected i/n"),
        (("a:1", "x", False), "'x': expected i/n"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(arguments, said):
    coordinator, process, detect = arguments
    with pytest.raises(DeviceError, match=said):
        join_processes(coordinator, process, detect=detect)
    join_processes(None, None)  # one process: nothing to join

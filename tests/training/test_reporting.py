"""Where a run's figures go, and what is said when a watcher is not installed."""

from __future__ import annotations

import builtins
import io
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from d3d_jax.config import WatchConfig
from d3d_jax.errors import ConfigError
from d3d_jax.training import loop
from d3d_jax.training.loop import train
from d3d_jax.training.reporting import Reports, Terminal, check_installed, grouped
from tests.training.toy import records


def test_a_report_on_a_terminal_has_a_bar_with_the_newest_figures():
    out = io.StringIO()
    terminal = Terminal(50, Console(file=out, force_terminal=True, width=140))
    terminal.write(5, {"loss": 2.5, "accuracy_0": 1.0, "accuracy_1": 0.25})
    terminal.write(10, {"validation_loss": 2.25, "tau_sync": 3.5, "hit_rate": 0.75})
    terminal.at_step(10)
    terminal._bar.refresh()  # pyright: ignore[reportOptionalMemberAccess]
    terminal.close()
    said = out.getvalue()
    assert "step 5  loss 2.5  [1.00 .25]" in said
    assert "10/50" in said and "loss 2.5 validation_loss 2.25 tau_sync 3.5 hit_rate 0.75" in said


def test_elsewhere_there_are_lines_alone(capsys):
    terminal = Terminal(50, Console(file=io.StringIO(), force_terminal=False))
    terminal.at_step(3)
    terminal.write(3, {"loss": 2.5})
    terminal.close()
    assert capsys.readouterr().out == "step 3  loss 2.5\n"


def test_a_process_that_is_not_the_first_reports_nothing(config, tmp_path, capsys):
    with Reports(config(output_dir=str(tmp_path)), first=False) as reports:
        reports.say("something")
        reports.at_step(1)
        reports.write(1, {"loss": 1.0})
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out


@pytest.mark.parametrize(
    ("watch", "module"),
    [(WatchConfig(tensorboard=True), "tensorboardX"), (WatchConfig(wandb_project="drafters"), "wandb")],
)
def test_a_watcher_that_is_missing_is_told_with_its_extra_before_any_work(config, tmp_path, monkeypatch, watch, module):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == module:
            raise ImportError(name=module)
        return real(name, *args, **kwargs)

    monkeypatch.setattr("importlib.import_module", lambda name: without(name))
    monkeypatch.setattr(loop, "plan_run", None)
    extra = "tensorboard" if watch.tensorboard else "wandb"
    with pytest.raises(ConfigError, match=rf"{module} is missing: pip install 'd3d-jax\[{extra}\]'"):
        train(config(output_dir=str(tmp_path / "out"), watch=watch), jax.devices()[:1])
    assert not (tmp_path / "out").exists()
    check_installed(WatchConfig())


@pytest.mark.parametrize("wrong", [{"wandb_mode": "offline"}, {"wandb_name": "a"}, {"peak_tflops": 0.0}])
def test_settings_of_watchers_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match="watch\\."):
        WatchConfig(**wrong)


def test_figures_stand_under_headings():
    names = ("loss", "validation_loss", "tau_sync", "hit_rate_keep", "mfu", "validation_accuracy_3")
    assert [grouped(name) for name in names] == [
        "train/loss", "validation/loss", "acceptance/tau_sync", "acceptance/hit_rate_keep", "speed/mfu",
        "validation/accuracy_3",
    ]  # fmt: skip


def events(folder: Path) -> dict[str, dict[int, float]]:
    """Of each tag the values by step, read from the records of an event file."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = {}
    for file in folder.iterdir():
        data, at = file.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack("<Q", data[at : at + 8])
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_tensorboard_is_told_what_metrics_jsonl_is_told(config, short_corpus):
    pytest.importorskip("tensorboardX")
    run = config(train_data=str(short_corpus), watch=WatchConfig(tensorboard=True))
    train(run, jax.devices()[:2])
    assert "tensorflow" not in sys.modules
    found = events(Path(run.output_dir) / "tensorboard")
    told = {record["step"]: record for record in records(run)}
    assert found["train/loss"] == {step: pytest.approx(record["loss"]) for step, record in told.items()}
    assert set(found["speed/tokens_per_s"]) == {2, 4}


class Fake(SimpleNamespace):
    """wandb as it is used here."""

    class Error(Exception):
        pass

    def init(self, **given):
        self.given = given
        self.logged = []
        return SimpleNamespace(
            id=given["id"] or "abc", log=self.logged.append, define_metric=lambda *a, **k: None,
            finish=lambda: self.logged.append("finished"),
        )  # fmt: skip


def test_wandb_is_told_with_the_step_and_a_resumed_run_goes_on_as_the_same_one(config, tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = config(output_dir=str(tmp_path), watch=WatchConfig(wandb_project="drafters", wandb_mode="offline"))
    with Reports(run, True) as reports:
        reports.write(3, {"loss": 2.5, "tau_sync": 3.0, "grad_norm": float("nan")})
    assert fake.given["project"] == "drafters" and fake.given["mode"] == "offline" and fake.given["id"] is None
    assert fake.given["config"]["batch_size"] == run.batch_size
    assert fake.logged == [{"step": 3, "train/loss": 2.5, "acceptance/tau_sync": 3.0}, "finished"]
    with Reports(run, True):
        pass
    assert fake.given["id"] == "abc"


def test_wandb_that_cannot_start_says_what_to_do(config, tmp_path, monkeypatch):
    fake = Fake()

    def refuse(**given):
        raise Fake.Error("no API key")

    fake.init = refuse
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ConfigError, match="wandb cannot start: no API key; run `wandb login`, or set"):
        Reports(config(output_dir=str(tmp_path), watch=WatchConfig(wandb_project="drafters")), True)


def test_wandb_itself_works_offline(config, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # whatever reaches for the network fails
    run = config(output_dir=str(tmp_path), watch=WatchConfig(wandb_project="drafters", wandb_mode="offline"))
    with Reports(run, True) as reports:
        reports.write(1, {"loss": 2.5})
    (stored,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert stored.stat().st_size > 0
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 2.5

"""Where the figures of a run go: metrics.jsonl and the terminal always, TensorBoard and wandb if asked."""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from d3d_jax.config import TrainConfig, WatchConfig, to_mapping
from d3d_jax.errors import ConfigError, TrainingError

METRICS = "metrics.jsonl"
_SPEED = ("tokens_per_s", "loader_wait", "mfu")


class Report(Protocol):
    """A place that figures go to."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def check_installed(watch: WatchConfig) -> None:
    """Refuse what was asked for and is not installed.

    Raises:
        ConfigError: naming the extra that brings it.
    """
    wanted = {"tensorboardX": ("tensorboard", watch.tensorboard), "wandb": ("wandb", watch.wandb_project is not None)}
    for module, (extra, asked) in wanted.items():
        if asked:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(
                    f"this run is to be watched with {extra}, but {error.name or error} is missing: "
                    f"pip install 'd3d-jax[{extra}]', or turn it off"
                ) from error


class Reports:
    """All reports of a run, of process 0; the other processes report nothing. Use as a context manager."""

    def __init__(self, config: TrainConfig, first: bool):
        """`first`: this process is the one that reports."""
        self._reports: list[Report] = []
        self._terminal = Terminal(config.steps) if first else None
        if self._terminal is None:
            return
        folder = Path(config.output_dir)
        self._reports = [JsonLines(folder / METRICS), self._terminal]
        if config.watch.tensorboard:
            self._reports.append(TensorBoard(folder / "tensorboard"))
        if config.watch.wandb_project is not None:
            self._reports.append(WandB(config, folder))

    def say(self, text: str) -> None:
        if self._terminal is not None:
            self._terminal.say(text)

    def at_step(self, step: int) -> None:
        """Move the progress bar."""
        if self._terminal is not None:
            self._terminal.at_step(step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of a step; what a step has been told before is kept."""
        for report in self._reports:
            report.write(step, values)

    def __enter__(self) -> Reports:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for report in self._reports:
            report.close()


class JsonLines:
    """One JSON object a line: `step`, `time` (seconds since 1970) and the figures."""

    def __init__(self, path: Path):
        self._path = path

    def write(self, step: int, values: Mapping[str, float]) -> None:
        try:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        except OSError as error:
            raise TrainingError(f"step {step} could not be noted in {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """The file is closed after every line."""


class Terminal:
    """A line a report; on a terminal also a bar with the time that is left and the newest loss and tau."""

    def __init__(self, steps: int, console: Any = None):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console() if console is None else console
        self._shown: dict[str, float] = {}
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console, transient=True) if self._console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=steps)
            self._bar.start()

    def say(self, text: str) -> None:
        if self._bar is None:
            print(text, flush=True)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def at_step(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        shown = {k: v for k, v in values.items() if not k.startswith(("accuracy_", "validation_accuracy_"))}
        positions = " ".join(
            f"{v:.2f}".removeprefix("0") for k, v in values.items() if "accuracy_" in k and k[-1].isdigit()
        )
        text = "  ".join(f"{k} {v:.4g}" for k, v in shown.items())
        self.say(f"step {step}  {text}" + (f"  [{positions}]" if positions else ""))
        names = ("loss", "validation_loss", "tau_sync", "tau_async", "hit_rate", "tokens_per_s")
        self._shown |= {name: values[name] for name in names if name in values}
        if self._bar is not None:
            self._bar.update(self._task, description=" ".join(f"{k} {v:.3g}" for k, v in self._shown.items()))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class TensorBoard:
    """Event files in a folder, written without TensorFlow (tensorboardX)."""

    def __init__(self, folder: Path):
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(grouped(name), value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases; offline it needs no network and waits in the folder for `wandb sync`."""

    def __init__(self, config: TrainConfig, folder: Path):
        import wandb  # pyright: ignore[reportMissingImports]

        watch, number = config.watch, folder / "wandb_run"
        # A run that is resumed goes on as the same one.
        known = number.read_text().strip() if number.is_file() else None
        try:
            self._run = wandb.init(
                project=watch.wandb_project,
                name=watch.wandb_name,
                mode=watch.wandb_mode,
                dir=str(folder),
                id=known,
                resume="allow",
                config=to_mapping(config),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"wandb cannot start: {error}; run `wandb login`, or set watch.wandb_mode=offline"
            ) from error
        number.write_text(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        figures = {grouped(name): value for name, value in values.items() if math.isfinite(value)}
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        self._run.finish()


def grouped(name: str) -> str:
    """The name of a figure in a viewer, under the heading that it belongs to."""
    if name.startswith("validation_"):
        return f"validation/{name.removeprefix('validation_')}"
    if name.startswith(("tau_", "hit_rate")):
        return f"acceptance/{name}"
    return f"{'speed' if name in _SPEED else 'train'}/{name}"

"""Curves of training runs, from their metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d3d_jax.errors import DataError

COLUMNS = {
    "validation_loss": "held-out loss",
    "validation_block_loss": "its block part",
    "validation_accuracy_0": "accuracy, first position",
    "tau_sync": "tau, sync",
    "tau_async": "tau, async",
    "hit_rate": "hit rate",
    "tau_async_keep": "tau, async, keep",
    "hit_rate_keep": "hit rate, keep",
}
SNAPSHOTS = 5  # of one run's accuracy by position, from its begin to its end
_COLOURS = ("#2f6db3", "#e08a1e", "#b4457a", "#3a8f5c", "#7a5bb0", "#868e96")
_INK, _PALE = "#343a40", "#6c757d"


@dataclass(frozen=True)
class Run:
    """The figures of a run: of each name the values by step. What a resumed run told again counts once."""

    name: str
    figures: dict[str, dict[int, float]]

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values, in order of steps."""
        points = sorted(self.figures.get(name, {}).items())
        return [step for step, _ in points], [value for _, value in points]

    def accuracy_by_position(self) -> dict[int, list[float]]:
        """Of each step that told them, the accuracies of positions 0, 1, ... of a block: held-out ones if there are."""
        for prefix in ("validation_accuracy_", "accuracy_"):
            names = [name for name in self.figures if name.startswith(prefix)]
            if names:
                names.sort(key=lambda name: int(name.removeprefix(prefix)))
                return {step: [self.figures[name][step] for name in names] for step in sorted(self.figures[names[0]])}
        return {}


def read_run(path: str | Path, name: str | None = None) -> Run:
    """A run from its output folder, or from a metrics.jsonl.

    Raises:
        DataError: for a path that is neither, or a file that holds no figures.
    """
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    figures: dict[str, dict[int, float]] = {}
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise DataError(f"{path}: no metrics.jsonl; expected the output_dir of a training run") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            step = int(record.pop("step"))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            if number == len(lines):  # cut off while it was written
                break
            raise DataError(f"{file}:{number} is no line of a metrics.jsonl: {line[:60]!r}") from error
        record.pop("time", None)
        for key, value in record.items():
            figures.setdefault(key, {})[step] = float(value)
    if not figures:
        raise DataError(f"{file} holds no figures; the run has not told any yet")
    return Run(name or (path.name if path.is_dir() else path.parent.name or path.stem), figures)


def table(runs: Sequence[Run]) -> str:
    """The last figures of each run as a Markdown table; a dash for what it has not told."""
    columns = {name: told for name, told in COLUMNS.items() if any(name in run.figures for run in runs)}
    lines = [["run", "steps", *columns.values()], ["---"] * (2 + len(columns))]
    for run in runs:
        last = {name: run.curve(name)[1][-1] if name in run.figures else None for name in columns}
        steps = max(step for values in run.figures.values() for step in values)
        figures = ["-" if value is None else f"{value:.3f}" for value in last.values()]
        lines.append([run.name, str(steps), *figures])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(runs: Sequence[Run], path: str | Path, title: str | None = None) -> None:
    """Loss, accuracy by position, acceptance length and hit rate of one or several runs into an image file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)  # no window, no global state
    places = figure.subplots(2, 2, gridspec_kw={"wspace": 0.2, "hspace": 0.34})
    figure.subplots_adjust(left=0.065, right=0.98, top=0.90 if len(runs) == 1 else 0.865, bottom=0.08)
    (loss, accuracy), (tau, hit) = places
    for number, run in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        loss.plot(*run.curve("loss"), color=colour, alpha=0.35, linewidth=1)
        loss.plot(*run.curve("validation_loss"), color=colour, **_marked())
        tau.plot(*run.curve("tau_sync"), color=colour, **_marked())
        tau.plot(*run.curve("tau_async"), color=colour, linestyle="--", **_marked())
        hit.plot(*run.curve("hit_rate"), color=colour, **_marked())
    _draw_accuracy(accuracy, runs)
    _finish(loss, "loss", "step", "thin: training, with points: held out")
    _finish(accuracy, "accuracy by position", "position in the block, blocks without a visible token", "", share=True)
    _finish(tau, "acceptance length tau", "step", "held out; solid: sync, dashed: async")
    tau.set_ylim(bottom=1)
    _finish(hit, "hit rate", "step", "held out, async", share=True)
    figure.text(0.065, 0.955, title or ", ".join(run.name for run in runs), fontsize=14, weight="bold", color=_INK)
    if len(runs) > 1:
        from matplotlib.lines import Line2D

        handles = [
            Line2D([], [], color=_COLOURS[i % len(_COLOURS)], linewidth=2, label=run.name) for i, run in enumerate(runs)
        ]
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0.055, 0.945), ncols=6, frameon=False, fontsize=9.5
        )
    figure.savefig(path, facecolor="white")


def _draw_accuracy(axes: Any, runs: Sequence[Run]) -> None:
    """Of one run some steps, pale to dark; of several the last step of each."""
    for number, run in enumerate(runs):
        told = list(run.accuracy_by_position().items())
        if not told:
            continue
        if len(runs) > 1:
            told = told[-1:]
        else:
            count = min(SNAPSHOTS, len(told))
            told = [told[round(i * (len(told) - 1) / max(1, count - 1))] for i in range(count)]
        for place, (step, values) in enumerate(told, 1):
            label = f"step {step:,}" if len(runs) == 1 else None
            style = {"color": _COLOURS[number % len(_COLOURS)], "alpha": place / len(told), "label": label}
            axes.plot(range(len(values)), values, **style, **_marked())
        if len(runs) == 1:
            axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK)
        axes.set_xticks(range(len(told[-1][1])))


def _marked() -> dict[str, Any]:
    return {"linewidth": 1.8, "marker": "o", "markersize": 3.5}


def _finish(axes: Any, title: str, below: str, key: str, share: bool = False) -> None:
    axes.set_title(title, loc="left", fontsize=11, weight="bold", color=_INK)
    if key:
        axes.set_title(key, loc="right", fontsize=8.5, color=_PALE)
    axes.set_xlabel(below, fontsize=9, color=_PALE)
    if share:
        axes.set_ylim(0, 1)
    axes.grid(axis="y", color="#e9ecef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if not axes.lines:
        axes.text(0.5, 0.5, "not told by these runs", transform=axes.transAxes, ha="center", color=_PALE, fontsize=9.5)

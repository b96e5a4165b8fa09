"""Pictures of measured times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d3d_jax.decoding.observer import Span

ROUNDS_SHOWN = 9
_COLOURS = {"verify": "#2f6db3", "packed": "#e08a1e", "choose": "#b4457a", "draft": "#e08a1e"}
_NAMES = {
    "verify": "verify the block",
    "packed": "draft every outcome's successor",
    "choose": "choose the block, redraft after a miss",
    "draft": "draft",
}
_LANES = {"target": 1.0, "drafter": 0.0}
_IDLE, _INK, _HEIGHT = "#e9ecef", "#343a40", 0.62


def window(spans: Sequence[Span], rounds: int = ROUNDS_SHOWN) -> list[Span]:
    """The spans of `rounds` rounds in a row: of all such stretches of an output the one of median length."""
    numbers = sorted({span.round for span in spans})
    starts = {number: min(span.start for span in spans if span.round == number) for number in numbers}
    firsts = range(max(1, len(numbers) - rounds))
    lengths = sorted(
        (starts[numbers[min(first + rounds, len(numbers) - 1)]] - starts[numbers[first]], first) for first in firsts
    )
    first = lengths[len(lengths) // 2][1]
    shown = set(numbers[first : first + rounds])
    return [span for span in spans if span.round in shown]


def timeline(spans: Sequence[Span], path: str | Path, *, hidden: float | None, subtitle: str = "") -> None:
    """Draw two devices' rounds, from measured spans, into an image file.

    Args:
        spans: of one output, in seconds (`Observer.spans`); `device` is "target" or "drafter".
        hidden: share of the drafting that ran behind verification, for the title; None leaves it out.
        subtitle: what was run, on what.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = window(spans)
    begin = min(span.start for span in shown)
    end = max(span.end for span in shown)
    figure = Figure(figsize=(11, 3.6), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)  # no window, no global state
    axes = figure.add_axes((0.075, 0.25, 0.905, 0.50))
    for lane in _LANES.values():
        axes.barh(lane, (end - begin) * 1e3, height=_HEIGHT, color=_IDLE, hatch="////", edgecolor="white", linewidth=0)
    for span in shown:
        lane, left, width = _LANES[span.device], (span.start - begin) * 1e3, span.seconds * 1e3
        colour = _COLOURS.get(span.program, "#868e96")
        axes.barh(lane, width, left=left, height=_HEIGHT, color=colour, edgecolor="white", linewidth=0.8)
        if width > 0.022 * (end - begin) * 1e3:
            style = {"ha": "center", "va": "center", "color": "white", "fontsize": 9, "weight": "bold"}
            axes.text(left + width / 2, lane, str(span.round + 1), **style)
    _round_marks(axes, shown, begin)
    axes.set_xlim(0, (end - begin) * 1e3)
    axes.set_ylim(-0.45, 1.45)
    axes.set_yticks(list(_LANES.values()), ["target", "drafter"], fontsize=11, color=_INK)
    axes.set_xlabel("milliseconds; a number is a round", color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    title = "Drafting beside verification" + ("" if hidden is None else f": {hidden:.0%} of it hidden")
    figure.text(0.075, 0.92, title, fontsize=14, weight="bold", color=_INK, va="center")
    figure.text(0.075, 0.835, subtitle, fontsize=9.5, color="#6c757d", va="center")
    _legend(figure, shown)
    figure.savefig(path, facecolor="white")


def _round_marks(axes: Any, shown: Sequence[Span], begin: float) -> None:
    """A thin line where each round's first program starts."""
    for number in sorted({span.round for span in shown})[1:]:
        start = min(span.start for span in shown if span.round == number)
        axes.axvline((start - begin) * 1e3, color=_INK, linewidth=0.6, alpha=0.35, zorder=0.5)


def _legend(figure: Any, shown: Sequence[Span]) -> None:
    from matplotlib.patches import Patch

    programs = [name for name in _COLOURS if any(span.program == name for span in shown)]
    handles = [Patch(color=_COLOURS[name], label=_NAMES[name]) for name in programs]
    handles.append(Patch(facecolor=_IDLE, hatch="////", edgecolor="white", label="idle"))
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.065, 0.0), ncols=len(handles), frameon=False, fontsize=9.5
    )

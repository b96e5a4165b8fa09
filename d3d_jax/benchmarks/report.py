"""A result for people: the table and the sentences under it; and its JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

MODE_NAMES = {"ar": "autoregressive", "sync": "synchronous", "async": "asynchronous"}


def table(result: Mapping[str, Any]) -> Table:
    """A row for each mode. Every row names the platform, so that no CPU figure passes for another's."""
    platform = result["device"]["platform"].upper()
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    grid.add_column("mode, devices", no_wrap=True)
    for name in (
        "tok/s",
        "speed-up\nover AR",
        "with\nprefill",
        "tau",
        "hit\nrate",
        "verify\nms",
        "draft\nms",
        "round\nms",
        "drafting\nhidden",
        "same tokens\nas AR",
    ):
        grid.add_column(name, justify="right", no_wrap=True)
    for mode, figures in result["modes"].items():
        alone = figures.get("alone_ms", {})
        drafting = [ms for name, ms in alone.items() if name != "verify"]
        same = f"{figures['identical_outputs']}/{figures['num_prompts']}"
        all_same = figures["identical_outputs"] == figures["num_prompts"]
        grid.add_row(
            f"{mode}, {figures['devices']} {platform}",
            _number(figures["tok_per_s"], 0 if (figures["tok_per_s"] or 0) >= 100 else 1),
            _number(figures["speedup"], 2, "x"),
            _number(figures["end_to_end_speedup"], 2, "x"),
            _number(figures["tau"], 2),
            _number(figures["hit_rate"], 2),
            _number(alone.get("verify")),
            _number(sum(drafting) if drafting else None),
            _number(figures["round_ms"]),
            _number(_percent(figures.get("draft_hidden")), 0, " %"),
            f"[green]{same}[/]" if all_same else f"[bold red]{same}[/]",
        )
    return grid


def sentences(result: Mapping[str, Any]) -> list[str]:
    """What the table does not say: what explains the rounds, whether anything was compiled, who won."""
    said = ["Verify and draft: each program alone on the machine, ms a round. tau counts the bonus token."]
    said += [text for mode in ("sync", "async") if (text := _explained(result, mode))]
    if verdict := _verdict(result):
        said.append(verdict)
    warm, late = result["warm_up"], result["compilations_after_warm_up"]
    said.append(
        f"Warm-up compiled {warm['compilations']} programs ({warm['from_cache']} found in the cache of an earlier run) "
        f"in {warm['compile_seconds']:.1f} s; "
        + ("none after it." if late == 0 else f"{late} MORE WERE COMPILED while measuring: the figures are too low.")
    )
    return said


def write_json(result: Mapping[str, Any], path: str | Path) -> None:
    """Write the result; the file is there only when it is complete."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _explained(result: Mapping[str, Any], mode: str) -> str:
    """The cost model's line for one mode, with its error against the measured round."""
    predicted, figures = result["cost_model"].get(mode, {}), result["modes"].get(mode, {})
    if "alone" not in predicted:
        return ""
    text = f"Cost model, {mode}: {_terms(figures['alone_ms'], figures['devices'])} = "
    text += f"{predicted['alone']['round_ms']:.1f} ms a round, measured {figures['round_ms']:.1f} "
    text += "" if "side_by_side" in predicted else "in one program, which saves the launches "
    text += f"({predicted['alone']['round_error']:+.0%})"
    if "side_by_side" in predicted:
        busy, gap = figures["side_by_side_ms"], figures["occupied_ms"]["neither"]
        gaps = f"+ gaps {gap:.1f} " if gap >= 0.05 else ""
        text += (
            f"; at work at once the programs slow each other: {_terms(busy, figures['devices'])} {gaps}= "
            f"{predicted['side_by_side']['round_ms']:.1f} ms ({predicted['side_by_side']['round_error']:+.0%})"
        )
    return text + "."


def _terms(ms: Mapping[str, float], devices: int) -> str:
    draft = "packed" if "packed" in ms else "draft"
    ahead = f"choose {ms['choose']:.1f} + " if "choose" in ms else ""
    if devices > 1:
        return f"{ahead}max(verify {ms['verify']:.1f}, {draft} {ms[draft]:.1f})"
    return f"{ahead}{draft} {ms[draft]:.1f} + verify {ms['verify']:.1f}"


def _verdict(result: Mapping[str, Any]) -> str:
    """One honest sentence on asynchronous against synchronous."""
    modes = result["modes"]
    one, other = modes.get("async", {}), modes.get("sync", {})
    if not one.get("speedup") or not other.get("speedup"):
        return ""
    ratio = one["speedup"] / other["speedup"]
    text = f"Asynchronous is {ratio:.2f}x synchronous here"
    packed, draft = one.get("alone_ms", {}).get("packed"), other.get("alone_ms", {}).get("draft")
    if ratio < 1 and packed and draft and one["tau"] and other["tau"]:
        verify = one["alone_ms"]["verify"]
        reasons = [f"drafting every outcome costs {packed / draft:.1f} single drafts"]
        if packed > verify:
            reasons.append(
                f"it outlasts verification ({packed:.1f} against {verify:.1f} ms) and cannot all hide behind it"
            )
        beside = one.get("side_by_side_ms", {}).get("verify", verify)
        if beside > 1.1 * verify:
            reasons.append(
                f"the two devices share this machine (verification takes {beside / verify:.1f}x beside drafting)"
            )
        if one["tau"] < other["tau"]:
            reasons.append(
                f"drafts made before the bonus token is known are accepted less (tau {one['tau']:.2f} against "
                f"{other['tau']:.2f})"
            )
        text += ": " + "; ".join(reasons)
    return text + "."


def _number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share

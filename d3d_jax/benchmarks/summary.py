"""From outputs and times to the figures of a result: one plain mapping, which is also its JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from d3d_jax.acceptance.metrics import Sample, measure
from d3d_jax.benchmarks.cost_model import (
    Prediction,
    asynchronous_round,
    hidden_share,
    speedup,
    synchronous_round,
)
from d3d_jax.benchmarks.parts import Watched
from d3d_jax.benchmarks.runner import BenchRun, LaneRun

DRAFTING = ("draft", "packed", "choose")  # what the drafter's device does in a round


@dataclasses.dataclass(frozen=True)
class PartTimes:
    """Watched runs of a mode: each program alone, and, where two devices are at work at once, side by side."""

    alone: Watched | None = None
    side_by_side: Watched | None = None


def summarize(
    run: BenchRun, block_size: int, devices: Mapping[str, int], parts: Mapping[str, PartTimes]
) -> dict[str, Any]:
    """All figures of a run.

    Args:
        block_size: G.
        devices: the modes to report, `ar` among them, and how many devices each used.
        parts: the parts of a round, for modes that were watched on the same prompts.

    Returns:
        `modes`, `cost_model`, `warm_up`, `compilations_after_warm_up`. Times are in ms where the key says so, else in
        seconds; errors and shares are fractions; what cannot be said is None.
    """
    base = run.lanes["ar"]
    modes = {mode: _mode(run.lanes[mode], base, block_size, count) for mode, count in devices.items()}
    predictions = {}
    for mode, times in parts.items():
        figures = modes[mode]
        figures.update(_parts(figures, times))
        predictions[mode] = _predictions(figures, modes["ar"], times, devices[mode])
    return {
        "modes": modes,
        "cost_model": predictions,
        "warm_up": {
            "seconds": sum(one.warm_up_s for one in run.lanes.values()),
            "compile_seconds": run.compile_s,
            "compilations": run.compilations,
            "from_cache": run.from_cache,
        },
        "compilations_after_warm_up": run.compilations_after,
    }


def _mode(one: LaneRun, base: LaneRun, block_size: int, devices: int) -> dict[str, Any]:
    tokens = sum(len(completion.ids) - 1 for completion in one.completions)  # the first is prefill's
    decode_s = sum(completion.decode_s for completion in one.completions)
    prefill_s = sum(completion.prefill_s for completion in one.completions)
    base_tokens = sum(len(completion.ids) - 1 for completion in base.completions)
    base_decode_s = sum(completion.decode_s for completion in base.completions)
    base_prefill_s = sum(completion.prefill_s for completion in base.completions)
    equal = [a.ids == b.ids for a, b in zip(one.completions, base.completions, strict=True)]
    acceptance = measure((Sample(completion.rounds, len(completion.ids)) for completion in one.completions), block_size)
    plain = one is base
    rounds = tokens if plain else sum(one.rounds_run)
    faster = _ratio(base_decode_s * tokens, base_tokens * decode_s)
    figures = {
        "devices": devices,
        "num_prompts": len(one.completions),
        "identical_outputs": sum(equal),
        "identical_to_ar": _ratio(sum(equal), len(equal)),
        "tokens": tokens,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "tok_per_s": _ratio(tokens, decode_s),
        "tpot_ms": _ms(_ratio(decode_s, tokens)),
        "ttft_ms": _ms(_ratio(prefill_s, len(one.completions))),
        "speedup": faster,
        "end_to_end_speedup": _ratio(base_prefill_s + base_decode_s, prefill_s + decode_s) if faster else None,
        "cost_normalised_speedup": None if faster is None else faster / devices,
        "rounds_run": rounds,
        "tokens_per_round_run": _ratio(tokens, rounds),
        "round_ms": _ms(_ratio(decode_s, rounds)),
        "warm_up_s": one.warm_up_s,
        **dataclasses.asdict(acceptance),
    }
    if plain:
        figures.update(tau=1.0, tau_mean_of_samples=1.0)  # a step verifies nothing and gives one token
    return figures


def _parts(figures: dict[str, Any], times: PartTimes) -> dict[str, Any]:
    """The parts of a round; `unexplained` is the share of the measured round that they do not make up."""
    found: dict[str, Any] = {}
    round_s = (figures["round_ms"] or 0) / 1e3
    explained = None
    if times.alone is not None:
        found["alone_ms"] = {name: _ms(seconds) for name, seconds in times.alone.programs.items()}
        explained = synchronous_round(times.alone.of("verify"), times.alone.of(*DRAFTING))
        if figures["devices"] > 1:
            found["draft_hidden"] = hidden_share(round_s, times.alone.of("verify"), times.alone.of(*DRAFTING))
    if times.side_by_side is not None:
        occupied = times.side_by_side.occupied
        found["side_by_side_ms"] = {name: _ms(seconds) for name, seconds in times.side_by_side.programs.items()}
        found["occupied_ms"] = {
            name.removesuffix("_s"): _ms(seconds) for name, seconds in dataclasses.asdict(occupied).items()
        }
        explained = occupied.round_s
    if explained is not None and round_s:
        found["unexplained"] = (round_s - explained) / round_s
    return found


def _predictions(figures: dict[str, Any], ar: dict[str, Any], times: PartTimes, devices: int) -> dict[str, Any]:
    """The cost model's round and speed-up, from the programs alone and from their times side by side."""
    if not figures["round_ms"] or not ar["tpot_ms"] or not figures["speedup"]:
        return {}
    rounds = {}
    if times.alone is not None:
        verify, draft = times.alone.of("verify"), times.alone.of(*DRAFTING)
        rounds["alone"] = synchronous_round(verify, draft)
        if devices > 1:
            choose = times.alone.of("choose")
            rounds["alone"] = asynchronous_round(verify, draft - choose, choose)
    if times.side_by_side is not None:
        seen = times.side_by_side
        rounds["side_by_side"] = asynchronous_round(
            seen.of("verify"), seen.of("packed"), seen.of("choose"), seen.occupied.neither_s
        )
    predicted = {}
    for name, round_s in rounds.items():
        one = Prediction(
            round_s,
            figures["round_ms"] / 1e3,
            speedup(figures["tau"], round_s, ar["tpot_ms"] / 1e3),
            figures["speedup"],
        )
        predicted[name] = {
            "round_ms": _ms(one.round_s),
            "measured_round_ms": figures["round_ms"],
            "round_error": one.round_error,
            "speedup": one.speedup,
            "measured_speedup": figures["speedup"],
            "speedup_error": one.speedup_error,
        }
    return predicted


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3

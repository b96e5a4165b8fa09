"""The parts of a round, from spans drawn by hand, and what the cost model says of them."""

from __future__ import annotations

import pytest

from d3d_jax.benchmarks.cost_model import Prediction, asynchronous_round, hidden_share, speedup, synchronous_round
from d3d_jax.benchmarks.memory_plan import plan
from d3d_jax.benchmarks.parts import watched
from d3d_jax.benchmarks.plots import timeline, window
from d3d_jax.benchmarks.report import table
from d3d_jax.benchmarks.runner import BenchRun, LaneRun, Task
from d3d_jax.benchmarks.summary import PartTimes, summarize
from d3d_jax.config import DrafterConfig, ModelConfig, RopeConfig
from d3d_jax.decoding.observer import Span
from d3d_jax.decoding.state import Completion, Round


def spans(rounds: int, verify: float = 8.0, packed: float = 6.0, choose: float = 1.0, gap: float = 0.5) -> list[Span]:
    """Rounds of choose, then verify beside packed, then a gap; arguments in ms."""
    made, now = [], 0.0
    for number in range(rounds):
        made.append(Span("choose", "drafter", number, now, now + choose / 1e3))
        now += choose / 1e3
        made.append(Span("verify", "target", number, now, now + verify / 1e3))
        made.append(Span("packed", "drafter", number, now, now + packed / 1e3))
        now += (max(verify, packed) + gap) / 1e3
    return made


def test_programs_and_idle_times_are_means_a_round():
    seen = watched([spans(4), spans(8)])
    assert seen.of("verify") == pytest.approx(8e-3)
    assert seen.of("packed", "choose") == pytest.approx(7e-3) and seen.of("draft") == 0
    occupied = seen.occupied
    assert occupied.both_s == pytest.approx(6e-3) and occupied.target_only_s == pytest.approx(2e-3)
    assert occupied.drafter_only_s == pytest.approx(1e-3)
    assert occupied.neither_s == pytest.approx(0.5e-3 * 10 / 12)  # no gap after an output's last round
    assert len(seen.spans) == 3 * 8


def test_the_cost_model_is_the_line_of_the_algorithm():
    assert synchronous_round(8, 2) == 10
    assert asynchronous_round(8, 6, choose_s=1, hop_s=0.5) == 9.5
    assert asynchronous_round(8, 12) == 12
    assert speedup(4.0, 10, 5) == 2.0 and speedup(None, 10, 5) is None
    one = Prediction(9.0, 10.0, 2.2, 2.0)
    assert one.round_error == pytest.approx(-0.1) and one.speedup_error == pytest.approx(0.1)


@pytest.mark.parametrize(("round_s", "share"), [(8, 1.0), (11, 0.5), (14, 0.0), (20, 0.0), (7, 1.0)])
def test_hidden_is_what_a_round_does_not_show_of_drafting(round_s, share):
    assert hidden_share(round_s, verify_s=8, draft_s=6) == pytest.approx(share)
    assert hidden_share(round_s, 8, 0) is None


def result(round_ms: float = 9.5) -> dict:
    """A run of 20 rounds, 4 tokens each; async watched on two devices."""
    ids, rounds = tuple(range(81)), (Round(3, True),) * 20
    ar = LaneRun([Completion((1,), ids, "length", (), 0.01, 0.4)], [0])
    fast = LaneRun([Completion((1,), ids, "length", rounds, 0.02, 20 * round_ms / 1e3)], [20])
    run = BenchRun(Task(((1,),), 81, (0,)), {"ar": ar, "async": fast})
    parts = {"async": PartTimes(watched([spans(20, gap=0)]), watched([spans(20)]))}
    return summarize(run, 8, {"ar": 1, "async": 2}, parts)


def test_the_parts_make_up_the_round_and_the_model_explains_it():
    found = result()
    mode, predicted = found["modes"]["async"], found["cost_model"]["async"]
    assert mode["round_ms"] == pytest.approx(9.5) and abs(mode["unexplained"]) < 0.01
    assert mode["draft_hidden"] == pytest.approx(1 - 1.5 / 7)
    assert predicted["alone"]["round_ms"] == pytest.approx(9.0)
    assert predicted["alone"]["round_error"] == pytest.approx(-0.5 / 9.5)
    assert abs(predicted["side_by_side"]["round_error"]) < 0.01
    assert predicted["alone"]["speedup"] == pytest.approx(4 * 5 / 9)
    assert mode["cost_normalised_speedup"] == pytest.approx(mode["speedup"] / 2)


def test_time_that_no_part_explains_is_reported():
    assert result(19.0)["modes"]["async"]["unexplained"] == pytest.approx(0.5, abs=0.01)


def test_every_row_of_the_table_names_the_platform():
    grid = table({**result(), "device": {"platform": "cpu"}})
    assert list(grid.columns[0].cells) == ["ar, 1 CPU", "async, 2 CPU"]


def test_the_picture_shows_a_stretch_of_usual_length(tmp_path):
    hiccup = spans(40)
    late = [Span(s.program, s.device, s.round, s.start + 1, s.end + 1) for s in hiccup[60:]]
    shown = {span.round for span in window([*hiccup[:60], *late], 9)}
    assert len(shown) == 9 and max(shown) - min(shown) == 8 and not {19, 20} <= shown
    assert window(spans(3), 9) == spans(3)
    timeline(spans(40), tmp_path / "t.png", hidden=0.8, subtitle="drawn by hand")
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_memory_is_weights_cache_and_the_scores_of_a_round():
    config = ModelConfig(151936, 4096, 12288, 36, 32, 8, 128, RopeConfig(1e6))  # Qwen3-8B
    target = plan(config, None, block_size=16, max_len=4096, batch=2, dtype="bfloat16")
    assert target.weights == 8_190_735_360 * 2
    assert target.cache == 2 * 4096 * 36 * 2 * 8 * 128 * 2
    assert target.logits == 2 * 16 * 151936 * 4
    drafter = plan(config, DrafterConfig(16, 151669), block_size=16, max_len=4096, batch=1, dtype="bfloat16")
    assert drafter.logits == 256 * 151936 * 4
    assert drafter.total == drafter.weights + drafter.cache + drafter.logits

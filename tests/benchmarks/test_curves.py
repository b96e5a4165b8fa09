"""Curves of runs: what is read, what is drawn, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from d3d_jax.benchmarks.curves import draw, read_run
from d3d_jax.cli.main import main
from d3d_jax.errors import DataError


def told(folder: Path, scale: float = 1.0) -> Path:
    """A run of a hundred steps, resumed once at step 60 after it had told step 70."""
    folder.mkdir()
    steps = [*range(10, 80, 10), *range(60, 110, 10)]
    with (folder / "metrics.jsonl").open("w") as file:
        for index, step in enumerate(steps):
            values = {"loss": scale * 100 / step + index, "accuracy_0": step / 200, "accuracy_1": step / 400}
            file.write(json.dumps({"step": step, "time": 0.0, **values}) + "\n")
            if step % 50 == 0:
                held_out = {"validation_loss": 1.0, "tau_sync": step / 30, "tau_async": step / 40, "hit_rate": 0.5}
                file.write(json.dumps({"step": step, "time": 0.0, **held_out}) + "\n")
        file.write('{"step": 110, "lo')  # cut off while it was written
    return folder


def test_what_a_resumed_run_told_again_counts_once(tmp_path):
    run = read_run(told(tmp_path / "one"))
    steps, losses = run.curve("loss")
    assert steps == list(range(10, 110, 10)) and run.name == "one"
    assert losses[5:7] == [100 / 60 + 7, 100 / 70 + 8]
    assert run.curve("tau_sync") == ([50, 100], [50 / 30, 100 / 30])
    assert run.accuracy_by_position()[40] == [0.2, 0.1]
    assert run.curve("nothing") == ([], [])


def test_one_run_and_several_become_a_picture(tmp_path, capsys):
    one, two = told(tmp_path / "one"), told(tmp_path / "two", 2.0)
    picture = tmp_path / "curves.png"
    assert main(["curves", str(one), f"twice={two}", "--output", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| run | steps | held-out loss | tau, sync | tau, async | hit rate |",
        "| --- | --- | --- | --- | --- | --- |",
        "| one | 100 | 1.000 | 3.333 | 2.500 | 0.500 |",
        "| twice | 100 | 1.000 | 3.333 | 2.500 | 0.500 |",
    ]
    several = picture.read_bytes()
    assert several[:8] == b"\x89PNG\r\n\x1a\n"
    draw([read_run(one)], picture)
    assert picture.read_bytes() != several


def test_a_target_without_acceptance_is_drawn_as_well(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 0, "loss": 2.0, "ar_accuracy": 0.5}\n')
    draw([read_run(tmp_path / "metrics.jsonl")], tmp_path / "target.svg")
    assert "<svg" in (tmp_path / "target.svg").read_text()


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no metrics.jsonl; expected the output_dir"), ("", "holds no figures"), ("a\nb\n", ":1 is no line of")],
)
def test_what_is_no_run_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=said):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"), [("curves.txt", "ends in one of .png"), ("gone/curves.png", "does not exist")]
)
def test_a_picture_that_cannot_be_written_is_refused_first(tmp_path, capsys, name, said):
    assert main(["curves", str(tmp_path / "nowhere"), "--output", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err

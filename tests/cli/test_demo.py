"""`d3d demo` on a tiny pair: what it prints, writes and returns."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from types import SimpleNamespace

import pytest

from d3d_jax.cli import demo
from d3d_jax.cli.main import main

MODES = ("ar", "sync", "async")


@pytest.fixture(scope="module")
def done(pair, tmp_path_factory):
    """One run: exit code, output, JSON, picture."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["demo", "--target", pair.target, "--draft", pair.drafter, "--dataset", pair.prompts]
    words += ["--num-prompts", 2, "--max-new-tokens", 24, "--temperature", 0.8, "--seed", 3]
    words += ["--output-json", folder / "demo.json", "--timeline", folder / "demo.png"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    result = json.loads((folder / "demo.json").read_text())
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue(), json=result, folder=folder)


def test_all_modes_give_the_same_tokens_and_nothing_compiles_late(done):
    assert done.code == 0
    for mode in MODES:
        figures = done.json["modes"][mode]
        assert figures["identical_to_ar"] == 1 and figures["identical_outputs"] == figures["num_prompts"] == 2
    assert done.json["compilations_after_warm_up"] == 0
    assert done.json["warm_up"]["compilations"] > 0


def test_the_json_has_its_keys(done):
    assert {"modes", "device", "versions", "config", "prompts", "git_revision", "cost_model"} <= set(done.json)
    assert list(done.json["modes"]) == list(MODES)
    for mode in MODES:
        keys = set(done.json["modes"][mode])
        assert {"tok_per_s", "speedup", "end_to_end_speedup", "tau", "tau_without_bonus", "hit_rate"} <= keys
        assert {"identical_to_ar", "histogram", "by_position", "redraft_rate", "round_ms", "ttft_ms", "tpot_ms"} <= keys
    assert {"alone_ms", "side_by_side_ms", "occupied_ms", "draft_hidden", "unexplained"} <= set(
        done.json["modes"]["async"]
    )
    assert done.json["modes"]["ar"]["speedup"] == 1 and done.json["modes"]["ar"]["tau"] == 1
    assert done.json["modes"]["async"]["devices"] == 2
    assert done.json["device"]["platform"] == "cpu"
    assert done.json["config"]["sampling"]["temperature"] == 0.8
    assert done.json["config"]["decode"]["async"]["block_size"] == 4
    assert len(done.json["prompts"]["sha256"]) == 64 and done.json["prompts"]["question_ids"] == ["q0", "q1"]


def test_people_get_a_question_a_table_and_sentences(done):
    assert "Question q0\nHow many 0?" in done.out
    for row in ("ar, 1 CPU", "sync, 1 CPU", "async, 2 CPU"):
        assert row in done.out
    assert done.out.count("2/2") == 3
    assert "Cost model, async" in done.out and "none after it" in done.out
    assert "\x1b" not in done.out  # no colours where no terminal is
    assert done.err == ""
    assert (done.folder / "demo.png").stat().st_size > 10_000


def test_tokens_that_differ_are_exit_code_1(done, pair, monkeypatch, capsys):
    from d3d_jax.decoding.state import Completion

    result = copy.deepcopy(done.json)
    result["modes"]["async"].update(identical_to_ar=0.5, identical_outputs=1)
    monkeypatch.setattr(demo, "measured", lambda *args: (result, Completion((1,), (70, 71), "length"), []))
    words = ["demo", "--target", pair.target, "--draft", pair.drafter, "--dataset", pair.prompts, "--num-prompts", 2]
    assert main([str(word) for word in words]) == 1
    printed = capsys.readouterr()
    assert "1/2" in printed.out and "tokens differ" in printed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "x"], "--target and --draft go together"),
        (["--device", "gpu"], "no gpu device is there"),
        (["--output-json", "/nowhere/x.json"], "--output-json /nowhere/x.json: the folder /nowhere does not exist"),
        (["--top-k", "5"], "temperature=0 is greedy"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--drafting", "auto"], "--drafting auto: the demo tells what drafting brings"),
    ],
)
def test_contradictions_are_refused_at_once(words, said, capsys):
    assert main(["demo", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and said in printed.err

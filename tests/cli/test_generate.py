"""`d3d generate`: the same text in every mode, files that go on where they stopped, and bad input in one line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from d3d_jax.cli.main import main
from d3d_jax.decoding.engine import Engine


def generate(*words: Any) -> int:
    return main(["generate", *map(str, words)])


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch):
    """Loading a tensor or placing a model is a failure: mistakes are told before."""

    def started(*args, **kwargs):
        raise AssertionError("work has started")

    monkeypatch.setattr("d3d_jax.decoding.loading.fill", started)
    monkeypatch.setattr(Engine, "__init__", started)


def test_every_mode_gives_the_same_text(pair, tmp_path, capsys):
    texts = []
    for mode in ("ar", "async"):
        drafter = [] if mode == "ar" else ["--draft-model-path", pair.drafter]
        words = ["--model-path", pair.target, *drafter, "--prompt", "How many 0?", "--max-new-tokens", 24]
        words += ["--temperature", 0.8, "--seed", 3, "--output-json", tmp_path / f"{mode}.json"]
        assert generate(*words) == 0
        printed = capsys.readouterr()
        assert f"{mode}: " in printed.err and "tok/s" in printed.err
        record = json.loads((tmp_path / f"{mode}.json").read_text())
        assert printed.out == record["response"] + "\n"
        texts.append((record["response"], record["completion"]["ids"]))
    assert texts[0] == texts[1]


def test_where_drafting_is_left_open_it_is_said_what_came_of_it(pair, tmp_path, capsys):
    questions = [{"id": n, "turns": [f"How many {n}?"]} for n in range(6)]
    asked, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    asked.write_text("".join(json.dumps(one) + "\n" for one in questions))
    words = ["--model-path", pair.target, "--draft-model-path", pair.drafter, "--input", asked, "--output", answers]
    assert generate(*words, "--mode", "sync", "--drafting", "auto", "--max-new-tokens", 100) == 0
    assert "drafting pays from" in capsys.readouterr().err
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert all(0 <= one["drafted_share"] <= 1 for one in found)
    assert found[-1]["break_even_tau"] is None or found[-1]["break_even_tau"] > 0


def test_a_file_is_answered_and_gone_on_with(pair, tmp_path, capsys):
    output = tmp_path / "answers.jsonl"
    words = ["--model-path", pair.target, "--input", pair.prompts, "--output", output, "--max-new-tokens", 6]
    assert generate(*words) == 0
    lines = output.read_bytes().splitlines(keepends=True)
    records = [json.loads(line) for line in lines]
    assert [record["id"] for record in records] == ["q0", "q1", "q2"]
    assert all(len(record["responses"]) == 1 and 1 <= record["tokens"] <= 6 for record in records)
    output.write_bytes(lines[0] + lines[1][:20])  # as an interrupted run leaves it
    assert generate(*words) == 0
    assert [json.loads(line)["responses"] for line in output.read_bytes().splitlines()] == [
        record["responses"] for record in records
    ]
    capsys.readouterr()
    assert generate(*words) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and "answered already" in printed.err


def test_a_second_turn_follows_the_answer_to_the_first(pair, tmp_path):
    prompts, output = tmp_path / "turns.jsonl", tmp_path / "answers.jsonl"
    turns = [{"id": "one", "turns": ["a?"]}, {"id": "two", "turns": ["a?", "b?"]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in turns))
    assert generate("--model-path", pair.target, "--input", prompts, "--output", output, "--max-new-tokens", 6) == 0
    one, two = (json.loads(line)["responses"] for line in output.read_text().splitlines())
    assert len(two) == 2 and two[0] == one[0]


def damage_config(folder: Path, change) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def lose_tensor_file(p):
    (p.target / "model.safetensors").unlink()


def cut_tensor_file(p):
    file = p.drafter / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def unknown_key(p):
    damage_config(p.drafter, lambda values: values["d3d_config"].update(blok_size=4))


def mask_is_end(p):
    damage_config(p.drafter, lambda values: values["d3d_config"].update(mask_token_id=2))


def plain_drafter(p):
    damage_config(p.drafter, lambda values: values.pop("d3d_config"))


def no_tokenizer(p):
    (p.target / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose_tensor_file, "model.safetensors"),
        (cut_tensor_file, "model.safetensors"),
        (unknown_key, "blok_size"),
        (mask_is_end, "mask_token_id=2 is also an end-of-sequence id"),
        (plain_drafter, "no d3d_config"),
        (no_tokenizer, "no tokenizer.json"),
    ],
)
def test_a_damaged_pair_is_one_line_before_work_starts(damage, said, own_pair, no_work, capsys):
    damage(own_pair)
    refused(own_pair.target, own_pair.drafter, [], said, capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--block-size", 8], "block_size=8, but the drafter was trained for 4; use --block-size 4"),
        (["--max-len", 16], "prompt --prompt has"),
        (["--max-new-tokens", 600], "there is room for"),
        (["--device", "tpu"], "no tpu device is there"),
        (["--mode", "ar"], "--mode ar uses no drafter"),
        (["--mode", "sync", "--miss", "keep", "--bonus", "both"], "--miss, --bonus: for --mode async alone"),
        (["--tensor-parallel", "3"], "the target cannot be split over 3 devices: num_key_value_heads=2"),
        (["--candidates", "2"], "--candidates is for anchored successors; add --bonus anchored"),
        (["--bonus", "both", "--row-budget", "9"], "4 masked and one anchored successor of 4 tokens take 20 rows"),
        (["--outcomes", 9], "outcomes=9 must be 'all', 'auto' or 1..block_size=4"),
        (["--attention-backend", "mosaic_gpu"], "attention.backend: interval_decode: backend 'mosaic_gpu' cannot take"),
        (["--top-p", 0.5], "temperature=0 is greedy"),
        (["--output", "x.jsonl"], "--input and --output go together"),
    ],
)
def test_bad_settings_are_one_line_before_work_starts(words, said, pair, no_work, capsys):
    refused(pair.target, pair.drafter, words, said, capsys)


def test_other_folders_are_one_line_before_work_starts(
    pair, other_vocabulary, other_tokenizer, no_work, tmp_path, capsys
):
    refused(tmp_path / "nowhere", pair.drafter, [], "config.json does not exist", capsys)
    refused(pair.target, other_vocabulary, [], "296 and 320 vocabulary rows", capsys)
    refused(pair.target, other_tokenizer, [], "unlike tokenizers", capsys)


def test_drafting_flags_without_a_drafter_are_refused(pair, no_work, capsys):
    assert generate("--model-path", pair.target, "--prompt", "x", "--block-size", 4) == 2
    assert "--block-size is for drafting" in capsys.readouterr().err
    assert generate("--model-path", pair.target, "--prompt", "x", "--mode", "sync") == 2
    assert "needs --draft-model-path" in capsys.readouterr().err


def refused(target: Path, drafter: Path, words: list, said: str, capsys) -> None:
    logging.getLogger().handlers.clear()
    assert generate("--model-path", target, "--draft-model-path", drafter, "--prompt", "How many?", *words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert said in printed.err

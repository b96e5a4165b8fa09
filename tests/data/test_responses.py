"""The target's responses: every question is counted once, and a stopped run goes on."""

from __future__ import annotations

import json

import pytest

from d3d_jax.data.responses import Question, questions_of, respond
from d3d_jax.errors import DataError

ASKED = [Question(str(n), n, [1, 10 + n]) for n in range(5)] + [Question("long", 5, [1] * 9)]


def answer(questions, on_answer):
    """11 answers with its stop token alone, 12 is cut by the budget, the others finish; the last asked comes first."""
    for question in reversed(questions):
        ids, finished = {11: ([2], True), 12: ([7, 7], False)}.get(question.prompt[1], ([7, 2], True))
        on_answer(question, ids, finished)


def run(path, answer=answer):
    seen = []
    last = respond(ASKED, answer, path, longest_prompt=4, on_counts=seen.append)
    assert seen[-1] == last
    return last


def test_counts_add_up_to_the_questions(tmp_path):
    counts = run(tmp_path / "out.jsonl")
    assert (counts.answered, counts.truncated, counts.empty, counts.skipped) == (3, 1, 1, 1)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == ["0", "1", "2", "3", "4"]
    assert next(row for row in rows if row["id"] == "0") == {
        "id": "0",
        "ids": [1, 10, 7, 2],
        "prompt_length": 2,
        "finished": True,
    }


def test_a_file_of_another_kind_is_not_gone_on_with(tmp_path):
    run(tmp_path / "out.jsonl")
    with pytest.raises(DataError, match="row '4' has no likeliest tokens; go on as it was begun, or name another"):
        respond(ASKED, answer, tmp_path / "out.jsonl", longest_prompt=4, top=True)


def test_questions_are_handed_over_in_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("d3d_jax.data.responses.AT_ONCE", 2)
    sizes = []
    run(tmp_path / "out.jsonl", lambda questions, on: sizes.append(len(questions)) or answer(questions, on))
    assert sizes == [2, 2, 1]


def test_a_run_that_was_cut_in_the_middle_of_a_line_asks_only_what_is_missing(tmp_path):
    path = tmp_path / "out.jsonl"
    whole = run(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:11])
    asked = []
    assert run(path, lambda questions, on: asked.extend(questions) or answer(questions, on)) == whole
    assert len({question.id for question in asked}) == 3
    assert len(path.read_text().splitlines()) == 5


def test_questions_are_the_first_user_turns(tokenizer):
    from d3d_jax.data.chat import encode_prompt
    from d3d_jax.data.prompts import Conversation

    turns = ({"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Three."})
    [question] = questions_of([Conversation("a", turns)], tokenizer)
    assert question == Question("a", 0, encode_prompt(tokenizer, turns[:1]))

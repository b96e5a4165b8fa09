"""The target's responses: every question is counted once, and a stopped run goes on."""

from __future__ import annotations

import json

from d3d_jax.data.responses import Question, questions, respond

ASKED = [Question(str(n), [1, 10 + n], answer_length=50 - n) for n in range(5)] + [Question("long", [1] * 9, 3)]


def answer(prompts: list[list[int]]) -> list[tuple[list[int], bool]]:
    """11 answers with its stop token alone, 12 is cut by the budget, the others finish."""
    return [([2], True) if p[1] == 11 else ([7, 7], False) if p[1] == 12 else ([7, 2], True) for p in prompts]


def run(path, generate=answer):
    return list(respond(ASKED, generate, path, batch_size=2, longest_prompt=4))


def test_counts_add_up_to_the_questions(tmp_path):
    counts = run(tmp_path / "out.jsonl")[-1]
    assert (counts.answered, counts.truncated, counts.empty, counts.skipped) == (3, 1, 1, 1)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == ["0", "1", "2", "3", "4"]
    assert next(row for row in rows if row["id"] == "0") == {
        "id": "0",
        "ids": [1, 10, 7, 2],
        "prompt_length": 2,
        "finished": True,
    }


def test_every_batch_has_one_size(tmp_path):
    sizes = []
    run(tmp_path / "out.jsonl", lambda prompts: sizes.append(len(prompts)) or answer(prompts))
    assert set(sizes) == {2}


def test_a_run_that_was_cut_in_the_middle_of_a_line_asks_only_what_is_missing(tmp_path):
    path = tmp_path / "out.jsonl"
    whole = run(path)[-1]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:11])
    asked = []
    assert run(path, lambda prompts: asked.extend(prompts) or answer(prompts))[-1] == whole
    assert len({tuple(prompt) for prompt in asked}) == 3
    assert len(path.read_text().splitlines()) == 5


def test_questions_are_the_first_user_turns(tokenizer):
    from d3d_jax.data.chat import encode_prompt
    from d3d_jax.data.prompts import Conversation

    turns = ({"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Three."})
    [question] = questions([Conversation("a", turns)], tokenizer)
    assert question == Question("a", encode_prompt(tokenizer, turns[:1]), len("Three."))

"""Training documents: text is rendered, token ids are taken as they are, anything else is refused by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from d3d_jax.data.chat import encode_dialogue
from d3d_jax.data.documents import EMPTY, NO_RESPONSE, NOT_AFTER_USER, UNUSABLE, read_rows
from d3d_jax.data.sources import load_documents
from d3d_jax.errors import DataError


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_responses_are_taken_as_they_are(tmp_path):
    path = write(tmp_path / "a.jsonl", {"id": "x", "ids": [1, 2, 3], "prompt_length": 1, "finished": True})
    [document] = load_documents([path], None, 10)
    assert (document.ids.tolist(), document.prompt_length) == ([1, 2, 3], 1)


def test_conversations_are_rendered(tmp_path, tokenizer):
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    path = write(tmp_path / "a.jsonl", {"id": "x", "conversations": turns})
    [document] = load_documents([path], tokenizer, 10_000)
    assert (document.ids.tolist(), document.prompt_length) == encode_dialogue(tokenizer, turns)


def test_what_cannot_be_used_is_refused(tmp_path):
    good = {"id": "x", "ids": [1, 2, 3], "prompt_length": 1}
    with pytest.raises(DataError, match="token id 3, but the model has 3 rows"):
        load_documents([write(tmp_path / "a.jsonl", good)], None, 3)
    with pytest.raises(DataError, match=r"b.jsonl:2: found the keys \['id', 'text'\]"):
        load_documents([write(tmp_path / "b.jsonl", good, {"id": "y", "text": "hello"})], None, 10)
    with pytest.raises(DataError, match="holds text; name the folder of the tokenizer"):
        load_documents([write(tmp_path / "c.jsonl", {"id": "x", "conversations": []})], None, 10)


GOLDENS = json.loads((Path(__file__).parent / "goldens" / "chat_masks.json").read_text())


@pytest.mark.parametrize("which", ["tokenizer", "qwen"])
@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden["name"])
def test_every_turn_is_a_row_whose_response_is_exactly_the_hand_made_one(tmp_path, request, which, golden):
    tokenizer = request.getfixturevalue(which)
    path = write(tmp_path / "a.jsonl", {"id": "talk", "conversations": golden["conversations"]})
    dropped: list = []
    rows = read_rows(path, tokenizer, lambda *what: dropped.append(what), golden["enable_thinking"])
    found = [
        {
            "id": row.id,
            "prompt": tokenizer.decode(row.ids[: row.prompt_length]),
            "response": tokenizer.decode(row.ids[row.prompt_length :]),
        }
        for row in rows
    ]
    assert found == golden["rows"] and not dropped


def test_turns_that_give_no_row_are_told_with_their_reason(tmp_path, tokenizer):
    ask, say = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    talks = {
        "good": [ask, say, ask],
        "silent": [ask],
        "alone": [say],
        "twice": [ask, say, say],
        "thinks": [ask, {**say, "content": "<think>\n2\n</think>\n\n4"}],
        "empty": [ask, {**say, "content": " "}, ask, say],
    }
    path = write(tmp_path / "a.jsonl", *({"id": name, "conversations": talk} for name, talk in talks.items()))
    dropped: list = []
    rows = list(read_rows(path, tokenizer, lambda where, reason: dropped.append((where.split(": ")[1], reason))))
    assert [row.id for row in rows] == ["good", "twice", "empty/2"]
    reasons = [NO_RESPONSE, NOT_AFTER_USER, NOT_AFTER_USER, UNUSABLE, EMPTY]
    assert dropped == list(zip(["silent", "alone", "twice", "thinks", "empty"], reasons, strict=True))
    for name in ("silent", "alone", "thinks"):
        alone = write(tmp_path / "b.jsonl", {"id": name, "conversations": talks[name]})
        with pytest.raises(DataError, match=f"b.jsonl: {name}: .*let `d3d dataset` leave such turns out"):
            load_documents([alone], tokenizer, 10_000)


def test_a_response_of_a_stop_token_alone_gives_no_row_and_a_cut_one_does(tmp_path):
    rows = [
        {"id": "stop", "ids": [1, 2, 3], "prompt_length": 2, "finished": True},
        {"id": "nothing", "ids": [1, 2], "prompt_length": 2, "finished": False},
        {"id": "cut", "ids": [1, 2, 4], "prompt_length": 2, "finished": False},
    ]
    dropped: list = []
    path = write(tmp_path / "a.jsonl", *rows)
    kept = list(read_rows(path, None, lambda *what: dropped.append(what)))
    assert [(row.id, row.finished) for row in kept] == [("cut", False)]
    assert dropped == [(f"{path}:1", EMPTY), (f"{path}:2", EMPTY)]
    with pytest.raises(DataError, match="no row has a response"):
        load_documents([write(tmp_path / "b.jsonl", rows[0])], None, 10)


@pytest.mark.parametrize("row", [{"ids": [[1]], "prompt_length": 0}, {"ids": [1, 2], "prompt_length": 3}])
def test_ids_that_are_no_list_or_shorter_than_their_prompt_are_refused_by_line(tmp_path, row):
    with pytest.raises(DataError, match=r"a.jsonl:1: .* expected a list of ids and 0\.\."):
        load_documents([write(tmp_path / "a.jsonl", {"id": "x", **row})], None, 10)

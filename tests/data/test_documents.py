"""Training documents: text is rendered, token ids are taken as they are, anything else is refused by line."""

from __future__ import annotations

import json

import pytest

from d3d_jax.data.chat import encode_dialogue
from d3d_jax.data.documents import load_documents
from d3d_jax.errors import DataError


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_responses_are_taken_as_they_are(tmp_path):
    path = write(tmp_path / "a.jsonl", {"id": "x", "ids": [1, 2, 3], "prompt_length": 1, "finished": True})
    [document] = load_documents(path, None, 10)
    assert (document.ids.tolist(), document.prompt_length) == ([1, 2, 3], 1)


def test_conversations_are_rendered(tmp_path, tokenizer):
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    path = write(tmp_path / "a.jsonl", {"id": "x", "conversations": turns})
    [document] = load_documents(path, tokenizer, 10_000)
    assert (document.ids.tolist(), document.prompt_length) == encode_dialogue(tokenizer, turns)


def test_what_cannot_be_used_is_refused(tmp_path):
    good = {"id": "x", "ids": [1, 2, 3], "prompt_length": 1}
    with pytest.raises(DataError, match="token id 3, but the model has 3 rows"):
        load_documents(write(tmp_path / "a.jsonl", good), None, 3)
    with pytest.raises(DataError, match=r"b.jsonl:2: found the keys \['id', 'text'\]"):
        load_documents(write(tmp_path / "b.jsonl", good, {"id": "y", "text": "hello"}), None, 10)
    with pytest.raises(DataError, match="holds text; set `tokenizer`"):
        load_documents(write(tmp_path / "c.jsonl", {"id": "x", "conversations": []}), None, 10)

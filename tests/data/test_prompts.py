import gzip
import json
from pathlib import Path

import pytest

from d3d_jax.data.prompts import Prompt, load_conversations, load_prompts
from d3d_jax.errors import DataError

GOOD = {"id": "a", "turns": ["one", "two"], "answer": "3"}
TALK = {"id": "a", "conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "set.jsonl"
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def test_prompts_are_read_in_file_order_with_and_without_an_answer(tmp_path):
    path = written(tmp_path, GOOD, "", {"id": 2, "turns": ["ž"], "category": "x"})
    assert load_prompts(path) == [Prompt("a", ("one", "two"), "3"), Prompt("2", ("ž",), None)]


def test_gzipped_files_read_the_same_whatever_their_name(tmp_path):
    plain = written(tmp_path, GOOD)
    zipped = tmp_path / "other.jsonl"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert load_prompts(zipped) == load_prompts(plain)


def test_a_cut_gzip_file_is_reported_as_such(tmp_path):
    path = tmp_path / "set.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-9])
    with pytest.raises(DataError, match="broken gzip"):
        load_prompts(path)


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"id": "a", "turns": ["x\u2028y"]}, ensure_ascii=False), encoding="utf-8")
    assert load_prompts(path)[0].turns == ("x\u2028y",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["not JSON"]),
        ("[1]", ["list [1]", "JSON object"]),
        ({"turns": ["x"]}, ["'id' is missing"]),
        ({"id": "b"}, ["'turns' is missing", "list"]),
        ({"id": "b", "turns": []}, ["'turns' is list []"]),
        ({"id": "b", "turns": ["x", 3]}, ["'turns'", "non-empty text"]),
        ({"id": "b", "turns": ["x"], "answer": ["y"]}, ["'answer' is list"]),
        ({"id": "a", "turns": ["x"]}, ["'a'", "line 1"]),
    ],
)
def test_a_bad_prompt_names_file_line_and_what_was_found(tmp_path, line, words):
    path = written(tmp_path, GOOD, line)
    with pytest.raises(DataError) as error:
        load_prompts(path)
    for word in [f"{path}:2", *words]:
        assert word in str(error.value)


def test_missing_empty_and_binary_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="no records"):
        load_prompts(written(tmp_path, ""))
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        load_prompts(path)


def test_conversations_keep_roles_contents_and_thoughts(tmp_path):
    thinking = {"role": "assistant", "content": "b", "reasoning_content": "t", "name": "dropped"}
    path = written(tmp_path, TALK, {"id": "b", "conversations": [{"role": "system", "content": ""}, thinking]})
    first, second = load_conversations(path)
    assert first.messages == tuple(TALK["conversations"])
    assert second.messages[1] == {"role": "assistant", "content": "b", "reasoning_content": "t"}


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ("x", ["'conversations' is str 'x'"]),
        (["x"], ["message 0", "str 'x'"]),
        ([{"from": "human", "value": "x"}], ["role is missing", "system, user, assistant"]),
        ([TALK["conversations"][0], {"role": "gpt", "content": "x"}], ["message 1", "'gpt'"]),
        ([{"role": "user", "content": [{"type": "text"}]}], ["'content' is list", "expected text"]),
    ],
)
def test_a_bad_conversation_names_the_message(tmp_path, turns, words):
    path = written(tmp_path, TALK, {"id": "b", "conversations": turns})
    with pytest.raises(DataError) as error:
        load_conversations(path)
    for word in [f"{path}:2", *words]:
        assert word in str(error.value)

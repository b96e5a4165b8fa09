"""Prompts and conversations read from JSONL files, plain or gzipped.

Every line is checked when it is read; the first bad line raises :class:`DataError` with the file,
the line number, what was found and what was expected.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from d3d_jax.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """One benchmark item.

    id: unique within its file. turns: what the user says, in order, without any chat template.
    answer: the reference answer as text, or None where the set has none.
    """

    id: str
    turns: tuple[str, ...]
    answer: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """The first turn as chat messages; later turns need the model's answers in between."""
        return [{"role": "user", "content": self.turns[0]}]


@dataclass(frozen=True)
class Conversation:
    """One dialogue: `messages` are ``{"role", "content"}`` with role system, user or assistant."""

    id: str
    messages: tuple[dict[str, str], ...]


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read JSONL lines ``{"id", "turns": [text, ...], "answer"?}`` (``.gz`` too), in file order.

    Unknown keys are ignored. Raises DataError for a missing or empty file, a line that is no such
    object, or an id that occurs twice.
    """
    prompts: list[Prompt] = []
    for where, record in records(path):
        turns = record.get("turns")
        if not isinstance(turns, list) or not turns or not all(_is_text(turn) for turn in turns):
            raise DataError(f"{where}: 'turns' is {_shown(turns)}; expected a list of at least one non-empty text")
        answer = record.get("answer")
        if isinstance(answer, (int, float)) and not isinstance(answer, bool):
            answer = str(answer)
        if answer is not None and not isinstance(answer, str):
            raise DataError(f"{where}: 'answer' is {_shown(answer)}; expected text, a number or no such key")
        prompts.append(Prompt(record["id"], tuple(turns), answer))
    return prompts


def load_conversations(path: str | Path) -> list[Conversation]:
    """Read JSONL lines ``{"id", "conversations": [{"role", "content"}, ...]}`` (``.gz`` too).

    This is the layout of SpecForge's training sets. A message may also carry the text
    ``reasoning_content``; other keys are ignored. Raises DataError for a missing or empty file, a line that is
    no such object, an unknown role, a content that is not text, or an id that occurs twice.
    """
    conversations: list[Conversation] = []
    for where, record in records(path):
        turns = record.get("conversations")
        if not isinstance(turns, list) or not turns:
            raise DataError(
                f"{where}: 'conversations' is {_shown(turns)}; expected a list of "
                '{"role", "content"} with at least one entry'
            )
        messages = tuple(_message(f"{where}, message {i}", turn) for i, turn in enumerate(turns))
        conversations.append(Conversation(record["id"], messages))
    return conversations


def _message(where: str, turn: object) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise DataError(f'{where}: found {_shown(turn)}; expected an object {{"role", "content"}}')
    role, content = turn.get("role"), turn.get("content")
    if role not in _ROLES:
        raise DataError(f"{where}: role is {_shown(role)}; expected one of {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"{where}: 'content' is {_shown(content)}; expected text")
    message = {"role": role, "content": content}
    reasoning = turn.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise DataError(f"{where}: 'reasoning_content' is {_shown(reasoning)}; expected text")
        message["reasoning_content"] = reasoning
    return message


def records(path: str | Path) -> Iterator[tuple[str, dict]]:
    """(where, object) of every non-blank line; `where` is ``file:line`` for messages."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected a JSONL file (.jsonl or .jsonl.gz)")
    seen: dict[str, int] = {}
    number = 0
    with path.open("rb") as probe:
        zipped = probe.read(2) == _GZIP_MAGIC
    opener = gzip.open if zipped else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                record = _parsed(where, line)
                if record["id"] in seen:
                    raise DataError(
                        f"{where}: id {record['id']!r} was already used on line {seen[record['id']]}; "
                        "expected each id once"
                    )
                seen[record["id"]] = number
                yield where, record
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: after line {number}: {error}; expected UTF-8 text") from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: after line {number}: broken gzip file ({error}); fetch it again") from error
    if not seen:
        raise DataError(f"{path}: no records; expected one JSON object per line")


def _parsed(where: str, line: str) -> dict:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error}); expected one JSON object per line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {_shown(record)}; expected a JSON object")
    name = record.get("id")
    if isinstance(name, int) and not isinstance(name, bool):
        record["id"] = name = str(name)
    if not _is_text(name):
        raise DataError(f"{where}: 'id' is {_shown(name)}; expected a non-empty text")
    return record


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _shown(value: object) -> str:
    """A value for an error message: its type and at most 60 characters."""
    if value is None:
        return "missing"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"

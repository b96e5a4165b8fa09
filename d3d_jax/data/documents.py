"""Training rows from JSONL: conversations as text, or responses with their token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from d3d_jax.data.chat import encode_dialogue
from d3d_jax.data.packing import Top
from d3d_jax.data.prompts import load_conversations, records
from d3d_jax.errors import DataError


@dataclass(frozen=True)
class Row:
    """One training sequence: `ids` int32[T], of which the first `prompt_length` are no response.

    finished: the response ended with a stop token; False where it was cut by its budget. top: the target's likeliest
    tokens for each token of the response, where they are stored.
    """

    id: str
    ids: np.ndarray
    prompt_length: int
    finished: bool = True
    top: Top | None = None


OnDrop = Callable[[str, str], None]
"""(where, reason) of a turn that gives no row."""

NO_RESPONSE = "no assistant turn"
NOT_AFTER_USER = "assistant turn not after a user's"
UNUSABLE = "thoughts although thinking is off, or marks inside the text"
EMPTY = "empty response"
NO_TOP = "loss.kd_weight needs the target's likeliest tokens; make the responses with `d3d respond --top-logprobs K`"


def read_rows(path: str | Path, tokenizer: Any | None, on_drop: OnDrop, enable_thinking: bool = False) -> Iterator[Row]:
    """The rows of a JSONL file, `.gz` too, in the order of the file, which holds lines of one kind.

    A line `{"id", "ids": [...], "prompt_length": n, "finished"?, "top_ids"?, "top_logprobs"?}` (what a target's
    responses are stored as) is taken as it is; a line `{"id", "conversations": [...]}` is rendered with the
    tokenizer's chat template and gives one row for each assistant turn, with what was said before as its prompt; from
    the second turn on `/n` follows its id.

    Raises:
        DataError: for a line of neither kind, or text without a tokenizer.
    """
    _, first = next(records(path))
    if "conversations" not in first:
        for where, record in records(path):
            row = _encoded(where, record)
            if len(row.ids) - row.prompt_length <= int(row.finished):  # nothing, or a stop token alone
                on_drop(where, EMPTY)
            else:
                yield row
        return
    if tokenizer is None:
        raise DataError(f"{path} holds text; name the folder of the tokenizer to encode it with")
    for conversation in load_conversations(path):
        where, messages = f"{path}: {conversation.id}", conversation.messages
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            on_drop(where, NO_RESPONSE)
        for number, at in enumerate(turns, start=1):
            if at == 0 or messages[at - 1]["role"] != "user":
                on_drop(where, NOT_AFTER_USER)
                continue
            try:
                ids, prompt_length = encode_dialogue(tokenizer, messages[: at + 1], enable_thinking)
            except DataError as error:
                if not getattr(tokenizer, "chat_template", None):
                    raise
                on_drop(f"{where}: {error}", UNUSABLE)
                continue
            if not messages[at]["content"].strip() and not messages[at].get("reasoning_content"):
                on_drop(where, EMPTY)
                continue
            name = conversation.id if number == 1 else f"{conversation.id}/{number}"
            yield Row(name, np.asarray(ids, np.int32), prompt_length)


def _encoded(where: str, record: dict) -> Row:
    try:
        ids, length = np.asarray(record["ids"], np.int32), int(record["prompt_length"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(
            f"{where}: found the keys {sorted(record)}; expected 'ids' with 'prompt_length', or 'conversations'"
        ) from error
    if ids.ndim != 1 or not 0 <= length <= len(ids) or ids.min(initial=0) < 0:
        raise DataError(f"{where}: {len(ids)} ids, prompt_length {length}; expected a list of ids and 0..{len(ids)}")
    top = _top(where, record, len(ids) - length) if "top_ids" in record else None
    return Row(record["id"], ids, length, record.get("finished", True) is not False, top)


def _top(where: str, record: dict, num_tokens: int) -> Top:
    try:
        top = Top(np.asarray(record["top_ids"], np.int32), np.asarray(record["top_logprobs"], np.float32))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{where}: top_ids and top_logprobs must be lists of equally long lists of numbers") from error
    if num_tokens and (top.ids.ndim != 2 or len(top.ids) != num_tokens or top.ids.shape != top.logprobs.shape):
        raise DataError(
            f"{where}: top_ids {top.ids.shape} and top_logprobs {top.logprobs.shape} for {num_tokens} response tokens; "
            "expected K of both for each"
        )
    return top

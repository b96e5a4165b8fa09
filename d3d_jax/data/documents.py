"""Training documents from JSONL: conversations as text, or responses with their token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from d3d_jax.data.chat import encode_dialogue
from d3d_jax.data.packing import Document
from d3d_jax.data.prompts import load_conversations, records
from d3d_jax.errors import DataError


def load_documents(path: str | Path, tokenizer: Any | None, vocab_size: int) -> list[Document]:
    """The documents of a JSONL file, `.gz` too.

    A line `{"id", "ids": [...], "prompt_length": n}` (what a target's responses are stored as) is taken as it is;
    a line `{"id", "conversations": [...]}` is rendered with the tokenizer's chat template, thinking off. A file
    holds lines of one kind.

    Raises:
        DataError: for a line of neither kind, ids outside the vocabulary, or text without a tokenizer.
    """
    _, first = next(records(path))
    if "conversations" in first:
        if tokenizer is None:
            raise DataError(f"{path} holds text; set `tokenizer` to the folder of the tokenizer to encode it with")
        dialogues = (encode_dialogue(tokenizer, row.messages) for row in load_conversations(path))
        documents = [Document(np.asarray(ids, np.int32), length) for ids, length in dialogues]
    else:
        documents = [_encoded(where, record) for where, record in records(path)]
    highest = max(int(document.ids.max(initial=0)) for document in documents)
    if highest >= vocab_size:
        raise DataError(
            f"{path} holds token id {highest}, but the model has {vocab_size} rows: it was made with another tokenizer"
        )
    return documents


def _encoded(where: str, record: dict) -> Document:
    try:
        return Document(np.asarray(record["ids"], np.int32), int(record["prompt_length"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where}: found the keys {sorted(record)}; expected 'ids' with 'prompt_length', or 'conversations'"
        ) from error

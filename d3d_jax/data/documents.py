"""Training documents from JSONL: conversations as text, or responses with their token ids."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from d3d_jax.data.chat import encode_dialogue
from d3d_jax.data.packing import Document
from d3d_jax.data.prompts import load_conversations
from d3d_jax.errors import DataError


def load_documents(path: str | Path, tokenizer: Any | None, vocab_size: int) -> list[Document]:
    """The documents of a JSONL file, `.gz` too.

    A line `{"ids": [...], "prompt_length": n}` (what a target's responses are stored as) is taken as it is;
    a line `{"conversations": [...]}` is rendered with the tokenizer's chat template, thinking off.

    Raises:
        DataError: for a line of neither kind, ids outside the vocabulary, or text without a tokenizer.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"training data {str(path)!r} does not exist")
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as lines:
        first = next((line for line in lines if line.strip()), "")
    if not first:
        raise DataError(f"training data {str(path)!r} is empty")
    if '"conversations"' in first:
        if tokenizer is None:
            raise DataError(f"{str(path)!r} holds text; set `tokenizer` to the folder of the tokenizer to encode it with")
        dialogues = (encode_dialogue(tokenizer, row.messages) for row in load_conversations(path))
        documents = [Document(np.asarray(ids, np.int32), length) for ids, length in dialogues]
    else:
        documents = _encoded(path)
    highest = max(int(document.ids.max(initial=0)) for document in documents)
    if highest >= vocab_size:
        raise DataError(
            f"{str(path)!r} holds token id {highest}, but the model has {vocab_size} rows: "
            "it was made with another tokenizer"
        )
    return documents


def _encoded(path: Path) -> list[Document]:
    documents = []
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                ids, prompt_length = np.asarray(row["ids"], np.int32), int(row["prompt_length"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: expected {{'ids': [...], 'prompt_length': n}} or 'conversations'; got {line[:80]!r}"
                ) from error
            documents.append(Document(ids, prompt_length))
    return documents

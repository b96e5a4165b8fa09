"""What a run trains on: JSONL files and dataset folders, as one numbered collection of documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from d3d_jax.data.builder import read_dataset
from d3d_jax.data.documents import EMPTY, NO_TOP, read_rows
from d3d_jax.data.packing import Document
from d3d_jax.data.rows import Documents
from d3d_jax.errors import DataError


def load_documents(
    sources: Sequence[str | Path], tokenizer: Any | None, vocab_size: int, *, top: bool = False
) -> Documents:
    """The documents of all sources, one source after the other.

    A source is a JSONL file (see :func:`d3d_jax.data.documents.read_rows`, thinking off), or a folder made by
    `d3d dataset`. Those of a file are kept in memory, those of a folder read when they are asked for.

    top: with the target's likeliest tokens, which are left out otherwise.

    Raises:
        DataError: for a file or folder that is none, a turn that cannot be used, ids outside the vocabulary, likeliest
            tokens that are wanted and not there, or text without a tokenizer.
    """
    loaded = [_loaded(path, tokenizer, vocab_size, top) for path in sources]
    if top:
        _check_widths({str(path): _width(documents[0]) for path, documents in zip(sources, loaded, strict=True)})
    return Documents.joined(loaded)


def _loaded(path: str | Path, tokenizer: Any | None, vocab_size: int, top: bool) -> Documents:
    if Path(path).is_dir():
        documents, highest = read_dataset(path, top=top)
    else:
        kept = [
            Document(row.ids, row.prompt_length, row.top if top else None)
            for row in read_rows(path, tokenizer, _refuse_unless_empty)
        ]
        if not kept:
            raise DataError(f"{path}: no row has a response")
        if top and any(document.top is None for document in kept):
            raise DataError(f"{path}: {NO_TOP}")
        if top:
            _check_widths({f"{path}, row {number}": _width(document) for number, document in enumerate(kept)})
        highest = max(int(document.ids.max()) for document in kept)
        documents = Documents(np.array([(len(d.ids), d.prompt_length) for d in kept]), kept.__getitem__)
    if highest >= vocab_size:
        raise DataError(
            f"{path} holds token id {highest}, but the model has {vocab_size} rows: it was made with another tokenizer"
        )
    return documents


def _width(document: Document) -> int:
    """K, likeliest tokens that are stored for each token of the response."""
    return 0 if document.top is None else document.top.ids.shape[1]


def _check_widths(widths: dict[str, int]) -> None:
    first, *others = widths.items()
    for place, width in others:
        if width != first[1]:
            raise DataError(
                f"{first[0]} has {first[1]} likeliest tokens a place, {place} has {width}; make all with one "
                "`d3d respond --top-logprobs K`"
            )


def _refuse_unless_empty(where: str, reason: str) -> None:
    if reason != EMPTY:
        raise DataError(f"{where}: {reason}; mend it, or let `d3d dataset` leave such turns out and count them")

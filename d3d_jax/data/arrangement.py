"""Which documents go into which row, by their sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from d3d_jax.errors import DataError


@dataclass(frozen=True)
class PackingReport:
    """What became of the documents: rows, documents and tokens kept; documents left out, and why.

    rows, documents, tokens, response_tokens: of the packed rows. dropped_long: documents longer than a row.
    skipped_empty: documents without a response. fill: share of slots that hold a token, 0..1.
    """

    rows: int
    documents: int
    tokens: int
    response_tokens: int
    dropped_long: int
    skipped_empty: int
    fill: float


def arrange(sizes: np.ndarray, row_length: int, seed: int) -> tuple[list[np.ndarray], PackingReport]:
    """Which documents lie in which row, by their numbers, for :func:`pack`; their tokens are not needed.

    sizes: [documents, 2], length and prompt length of each.
    """
    if row_length < 1:
        raise DataError(f"row_length is {row_length}; expected at least 1")
    lengths, prompts = sizes[:, 0], sizes[:, 1]
    empty = prompts == lengths
    long = (lengths > row_length) & ~empty
    kept = np.nonzero(~empty & ~long)[0]
    if not len(kept):
        raise DataError(
            f"none of {len(sizes)} documents can be packed: {long.sum()} are longer than row_length {row_length}, "
            f"{empty.sum()} have no response"
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(kept))
    order = order[np.argsort(-lengths[kept][order], kind="stable")]
    members = _assign(lengths[kept], order, row_length)
    layout = [kept[members[row]] for row in rng.permutation(len(members))]
    tokens, responses = int(lengths[kept].sum()), int((lengths - prompts)[kept].sum())
    share = tokens / (len(layout) * row_length)
    return layout, PackingReport(len(layout), len(kept), tokens, responses, int(long.sum()), int(empty.sum()), share)


def _assign(lengths: np.ndarray, order: np.ndarray, row_length: int) -> list[list[int]]:
    """Document numbers of each row; every document goes to the fullest row that still holds it."""
    members: list[list[int]] = []
    rows_with: list[list[int]] = [[] for _ in range(row_length + 1)]  # row numbers by free slots
    free_sizes = 0  # bit n is set when some row has n free slots
    for number in order.tolist():
        length = int(lengths[number])
        fitting = free_sizes >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = rows_with[free].pop()
            if not rows_with[free]:
                free_sizes &= ~(1 << free)
        else:
            free, row = row_length, len(members)
            members.append([])
        members[row].append(number)
        rows_with[free - length].append(row)
        free_sizes |= 1 << (free - length)
    return members

"""Documents packed into rows of one length, and the masked blocks laid over their responses.

Letters: R rows, S slots of a row, C blocks of a row, G positions of a block. See docs/algorithm.md section 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from d3d_jax.data.arrangement import PackingReport, arrange
from d3d_jax.errors import DataError

STARTS = ("partition", "anchors")


class Top(NamedTuple):
    """The K likeliest tokens for each of the R tokens of a response, likeliest first.

    ids: int32 [R, K]. logprobs: float32 [R, K], of the target's unfiltered distribution at temperature 1.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Document:
    """One training sequence: `ids` int32[T], of which the first `prompt_length` are no response.

    top: the target's likeliest tokens for each of the others, where they are stored.
    """

    ids: np.ndarray
    prompt_length: int
    top: Top | None = None


@dataclass(frozen=True)
class PackedRows:
    """Rows of whole documents, one behind the other; all arrays are [R, S].

    tokens: int32, 0 on padding.
    document: int32, index within the row, -1 on padding.
    start: int32, slot where the token's document starts; on padding the slot itself, so that no attention
    interval is empty.
    position: int32, counts from 0 in each document, 0 on padding.
    response: bool, the token belongs to a response.
    response_start: int32, slot of the first response token of the token's document, -1 on padding.
    top_ids, top_logprobs: int32 and float32 [R, S, K], the target's likeliest tokens for the slot of each response
    token; -inf elsewhere. None where the documents come without.
    """

    tokens: np.ndarray
    document: np.ndarray
    start: np.ndarray
    position: np.ndarray
    response: np.ndarray
    response_start: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: slice | np.ndarray) -> PackedRows:
        """The rows of a slice or of an array of row numbers."""
        return PackedRows(**{name: array[index] for name, array in self.arrays().items()})

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that there are, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in found.items() if array is not None}

    def structure(self, index: slice | np.ndarray) -> PackedRows:
        """As `self[index]`; the tokens are not looked at."""
        return self[index]


@dataclass(frozen=True)
class BlockPlan:
    """Masked blocks of each row, ordered by start; arrays are int32[R, C].

    start: slot of the block's first position, -1 for an unused place. visible: how many leading positions show their
    token; loss is on the positions ``visible <= o < length``. length: how many of the G positions lie in the
    block's document; the rest have no label. dropped: blocks that found no place in C, over all rows.
    """

    start: np.ndarray
    visible: np.ndarray
    length: np.ndarray
    dropped: int = 0


def pack(documents: Iterable[Document], row_length: int, seed: int) -> tuple[PackedRows, PackingReport]:
    """Pack whole documents into rows of `row_length` tokens.

    The longest come first, each into the fullest row that still holds it. Which of two equally long ones comes
    first, and the order of the rows, are drawn from `seed`. A document that is longer than a row is dropped
    and counted, never cut; one without a response is skipped and counted.
    Raises DataError if a document is malformed, or none is left.
    """
    checked = list(documents)
    for number, document in enumerate(checked):
        _check(document, number)
    sizes = np.array([(len(document.ids), document.prompt_length) for document in checked], np.int64).reshape(-1, 2)
    layout, report = arrange(sizes, row_length, seed)
    return fill([sizes[row] for row in layout], row_length, [[checked[i] for i in row] for row in layout]), report


def max_blocks(rows: PackedRows, block_size: int) -> int:
    """The number of places C that holds every block of a ``partition`` plan of any row, whatever its phases."""
    row, _, first, end = _documents(rows)
    # One at the first response token, and the others of the phase that loses the fewest slots: 1.
    worst = 1 + -(-(end - first - 1) // block_size)
    return int(np.bincount(row, weights=worst, minlength=1).max())


def block_starts(
    rows: PackedRows,
    block_size: int,
    num_blocks: int,
    rng: np.random.Generator,
    starts: str = "partition",
    visible_probabilities: tuple[float, float] = (0.7, 0.2),
    geometric: float = 0.9,
) -> BlockPlan:
    """Draw the masked blocks of each row: where they start, and how many of their tokens are visible.

    starts ``partition``: blocks at the first response token and, for a random phase u in [0, G), at u, u+G,
    u+2G, ... behind it. ``anchors``: `num_blocks` random starts a row, without repetition, shared among its
    documents in proportion to their responses, at least one each; a response no longer than a block has its
    first token among them.
    A row with more blocks than `num_blocks` keeps those of a partition that start a response, and a random choice
    of the others; what is left out is counted.
    `visible_probabilities`: of 0 and of 1 visible token; else 1 + geometric(`geometric`), at most G-1. At least one
    position of every block stays masked.
    Raises DataError for an unknown `starts`, or sizes and probabilities that make no sense.
    """
    if block_size < 2 or num_blocks < 1:
        raise DataError(f"block_size {block_size}, num_blocks {num_blocks}; expected at least 2 and 1")
    none, one = visible_probabilities
    if min(none, one) < 0 or none + one > 1 + 1e-9 or not 0 < geometric <= 1:
        raise DataError(
            f"visible_probabilities {visible_probabilities}, geometric {geometric}; expected probabilities "
            "with a sum of at most 1"
        )
    if starts == "partition":
        row, start, end, keep = _partition(rows, block_size, rng)
    elif starts == "anchors":
        row, start, end, keep = _anchors(rows, block_size, num_blocks, rng)
    else:
        raise DataError(f"starts is {starts!r}; expected one of {', '.join(STARTS)}")

    chosen = _ranks(row, np.where(keep, -1.0, rng.random(len(row)))) < num_blocks
    dropped = int((~chosen).sum())
    row, start, end = row[chosen], start[chosen], end[chosen]
    length = np.minimum(block_size, end - start)
    draw = rng.random(len(row))
    more = 1 + rng.geometric(geometric, len(row))
    visible = np.where(draw < none, 0, np.where(draw < none + one, 1, more))
    visible = np.minimum(visible, length - 1)

    plan = np.zeros((3, len(rows), num_blocks), np.int32)
    plan[0] = -1
    place = _ranks(row, start)
    for array, values in zip(plan, (start, visible, length), strict=True):
        array[row, place] = values
    return BlockPlan(plan[0], plan[1], plan[2], dropped)


def _check(document: Document, number: int) -> None:
    ids = document.ids
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"document {number}: ids are {getattr(ids, 'dtype', type(ids).__name__)}; expected int32[T]")
    if not 0 <= document.prompt_length <= len(ids):
        raise DataError(f"document {number}: prompt_length is {document.prompt_length}; expected 0..{len(ids)}")


def fill(
    sizes: Sequence[np.ndarray], row_length: int, documents: Sequence[Sequence[Document]] | None = None
) -> PackedRows:
    """Rows of documents of the given sizes, [documents of the row, 2] each; without `documents` the tokens are 0."""
    shape = (len(sizes), row_length)
    tokens, document, position = (np.full(shape, value, np.int32) for value in (0, -1, 0))
    start = np.broadcast_to(np.arange(row_length, dtype=np.int32), shape).copy()
    response = np.zeros(shape, bool)
    response_start = np.full(shape, -1, np.int32)
    for row, members in enumerate(sizes):
        at = 0
        for index, (length, prompt_length) in enumerate(members.tolist()):
            first, end = at + prompt_length, at + length
            if documents is not None:
                tokens[row, at:end] = documents[row][index].ids
            document[row, at:end] = index
            start[row, at:end] = at
            position[row, at:end] = np.arange(length)
            response[row, first:end] = True
            response_start[row, at:end] = first
            at = end
    top = () if documents is None else _fill_top(shape, sizes, documents)
    return PackedRows(tokens, document, start, position, response, response_start, *top)


def _fill_top(
    shape: tuple[int, int], sizes: Sequence[np.ndarray], documents: Sequence[Sequence[Document]]
) -> tuple[np.ndarray, ...]:
    """`top_ids` and `top_logprobs` of rows; nothing where the documents come without."""
    widths = {0 if one.top is None else one.top.ids.shape[1] for members in documents for one in members}
    if len(widths) > 1:
        raise DataError(f"documents with {sorted(widths)} likeliest tokens a place; expected the same of all")
    width = widths.pop() if widths else 0
    if not width:
        return ()
    ids, logprobs = np.zeros((*shape, width), np.int32), np.full((*shape, width), -np.inf, np.float32)
    for row, members in enumerate(documents):
        end = 0
        for document, (length, prompt_length) in zip(members, sizes[row].tolist(), strict=True):
            assert document.top is not None
            place = slice(end + prompt_length, end + length)
            ids[row, place], logprobs[row, place] = document.top
            end += length
    return ids, logprobs


def _documents(rows: PackedRows) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of every document: row, first slot, first response slot and the slot behind its end; in order of slots."""
    row, begin = np.nonzero((rows.document >= 0) & (rows.position == 0))
    last = rows.document >= 0
    last[:, :-1] &= rows.document[:, :-1] != rows.document[:, 1:]
    end = np.nonzero(last)[1] + 1
    return row, begin, rows.response_start[row, begin].astype(np.int64), end


def _partition(rows: PackedRows, block_size: int, rng: np.random.Generator):
    """Row, start, end of the document and whether it must be kept, of every block of a partition."""
    row, _, first, end = _documents(rows)
    phase = rng.integers(block_size, size=len(row))
    count = np.maximum(0, -(-(end - first - phase) // block_size))
    owner = np.repeat(np.arange(len(row)), count)
    step = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    start = first[owner] + phase[owner] + step * block_size
    again = start == first[owner]  # phase 0 starts where the response does
    owner, start = owner[~again], start[~again]
    everyone = np.arange(len(row))
    keep = np.arange(len(row) + len(owner)) < len(row)
    owner = np.concatenate([everyone, owner])
    return row[owner], np.concatenate([first, start]), end[owner], keep


def _anchors(rows: PackedRows, block_size: int, num_blocks: int, rng: np.random.Generator):
    """As `_partition`: starts drawn among the response tokens, a share of `num_blocks` for each document."""
    row, _, first, end = _documents(rows)
    sizes = end - first
    # One each, the other places in proportion to the other response tokens, by largest remainder.
    spare = np.bincount(row, weights=sizes - 1, minlength=len(rows))[row]
    places = np.maximum(0, num_blocks - np.bincount(row, minlength=len(rows))[row])
    share = np.minimum(sizes - 1, places * (sizes - 1) / np.maximum(1, spare))
    want = 1 + np.floor(share).astype(np.int64)
    left = num_blocks - np.bincount(row, weights=want, minlength=len(rows))[row]
    remainder = share % 1
    want += (remainder > 0) & (_ranks(row, -remainder) < left)

    owner = np.repeat(np.arange(len(row)), sizes)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    start = first[owner] + offset
    must = (offset == 0) & (sizes[owner] <= block_size)
    drawn = _ranks(owner, np.where(must, -1.0, rng.random(len(owner)))) < want[owner]
    owner, start = owner[drawn], start[drawn]
    return row[owner], start, end[owner], np.zeros(len(owner), bool)


def _ranks(group: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The place of each entry among those of its group, by ascending key."""
    order = np.lexsort((key, group))
    ordered = group[order]
    fresh = np.r_[True, ordered[1:] != ordered[:-1]] if len(order) else np.zeros(0, bool)
    begins = np.maximum.accumulate(np.where(fresh, np.arange(len(order)), 0))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - begins
    return ranks

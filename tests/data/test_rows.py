"""Rows filled on demand: the very rows that packing makes, and no document is read for anything but its tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from d3d_jax.data.loader import Batches, BlockArguments
from d3d_jax.data.packing import Document, pack
from d3d_jax.data.rows import Documents, Rows
from d3d_jax.errors import DataError


@pytest.fixture
def read() -> list[int]:
    """The numbers of the documents that were read."""
    return []


@pytest.fixture
def stored(documents: list[Document], read: list[int]) -> Documents:
    def get(index: int) -> Document:
        read.append(index)
        return documents[index]

    return Documents(np.array([(len(d.ids), d.prompt_length) for d in documents]), get)


def test_rows_on_demand_are_the_packed_rows(documents, stored, read):
    documents.append(Document(np.arange(90, dtype=np.int32), 3))  # too long
    sizes = np.append(stored.sizes, [[90, 3]], axis=0)
    packed, report = pack(documents, 64, seed=4)
    rows = Rows(dataclasses.replace(stored, sizes=sizes), 64, seed=4)
    assert (len(rows), rows.report) == (len(packed), report) and report.dropped_long == 1 and not read
    for index in (slice(2, 5), np.array([3, 0, 3])):
        for name, array in packed[index].arrays().items():
            assert np.array_equal(rows[index].arrays()[name], array)
            if name != "tokens":
                assert np.array_equal(rows.structure(index).arrays()[name], array)
    assert not rows.structure(slice(0, 9)).tokens.any()


def test_parts_joined_are_one_behind_the_other_and_read_where_they_lie(documents, stored, read):
    cut = len(documents) // 3
    parts = [
        Documents(stored.sizes[:cut], documents[:cut].__getitem__),
        Documents(stored.sizes[:0], documents[:0].__getitem__),
        Documents(stored.sizes[cut:], documents[cut:].__getitem__),
    ]
    joined = Documents.joined(parts)
    assert np.array_equal(joined.sizes, stored.sizes)
    assert all(found is document for found, document in zip(joined, documents, strict=True))
    assert Documents.joined([stored]) is stored and not read


def test_batches_are_the_same_and_a_process_reads_its_own_part_alone(documents, stored, read):
    blocks = BlockArguments(8, 20)
    rows, packed = Rows(stored, 64, seed=0), pack(documents, 64, seed=0)[0]
    whole = Batches(packed, 4, 2, blocks=blocks)
    parts = [Batches(rows, 4, 2, index, 2, blocks) for index in range(2)]
    for step in range(whole.steps_per_epoch + 2):
        numbers = []
        pieces = []
        for part in parts:
            read.clear()
            pieces.append(part.at(step))
            numbers.append(set(read))
        assert numbers[0] and numbers[1] and not numbers[0] & numbers[1]
        for name, array in whole.at(step).items():
            assert np.array_equal(np.concatenate([piece[name] for piece in pieces]), array)


def test_documents_are_read_by_number_and_end(stored):
    assert len(list(stored)) == len(stored) == 60
    with pytest.raises(IndexError):
        stored[60]
    with pytest.raises(DataError, match="none of 60 documents can be packed: 60 are longer than row_length 1"):
        Rows(stored, 1, seed=0)

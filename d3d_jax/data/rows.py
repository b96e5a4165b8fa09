"""Packed rows that are filled when they are asked for, from documents that stay where they are.

A row of 2,048 tokens takes 43 KB packed, so a million of them do not fit a host; which documents lie in which row
takes a few bytes. Reading is at random: a dataset folder is as good for it as memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from d3d_jax.data.arrangement import PackingReport, arrange
from d3d_jax.data.packing import Document, PackedRows, fill


@dataclass(frozen=True)
class Documents:
    """Documents by number. sizes: int [documents, 2], length and prompt length; read: the document of a number."""

    sizes: np.ndarray
    read: Callable[[int], Document]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(index)  # what ends a loop over them
        return self.read(index)

    @classmethod
    def joined(cls, parts: Sequence[Documents]) -> Documents:
        """The documents of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        ends = np.cumsum([len(part) for part in parts])

        def read(index: int) -> Document:
            part = int(np.searchsorted(ends, index, side="right"))
            return parts[part].read(index - int(ends[part]) + len(parts[part]))

        return cls(np.concatenate([part.sizes for part in parts]), read)


class Rows:
    """The rows that :func:`d3d_jax.data.packing.pack` would make of the documents, one by one."""

    def __init__(self, documents: Documents, row_length: int, seed: int):
        """Raises DataError if no document can be packed."""
        self._documents, self._row_length = documents, row_length
        self._layout, self.report = arrange(documents.sizes, row_length, seed)

    report: PackingReport

    def __len__(self) -> int:
        return len(self._layout)

    def __getitem__(self, index: slice | np.ndarray) -> PackedRows:
        """The rows of a slice or of an array of row numbers; their documents are read now."""
        layout = self._chosen(index)
        read = [[self._documents[int(number)] for number in row] for row in layout]
        return fill([self._documents.sizes[row] for row in layout], self._row_length, read)

    def structure(self, index: slice | np.ndarray) -> PackedRows:
        """As `self[index]` with tokens that are 0: nothing is read."""
        return fill([self._documents.sizes[row] for row in self._chosen(index)], self._row_length)

    def _chosen(self, index: slice | np.ndarray) -> list[np.ndarray]:
        return self._layout[index] if isinstance(index, slice) else [self._layout[int(row)] for row in index]

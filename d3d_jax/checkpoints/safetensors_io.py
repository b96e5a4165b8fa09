"""Single tensors in and out of a folder of safetensors files, numpy only.

Opening reads the headers and proves that every shard is whole before a byte of a tensor is read. Reading
takes one tensor, or a slice of one, straight into the caller's array. Writing streams one tensor at a time.
The format: 8 bytes little-endian header length, a JSON header, the data.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from d3d_jax.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_SHARD_BYTES = 5 * 10**9

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # as in the safetensors library
_PIECE_BYTES = 8 * 2**20  # held beside the result where a tensor cannot be read in place


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `start` is its byte offset in `file`."""

    name: str
    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFolder(Mapping[str, StoredTensor]):
    """The tensors of a model folder by name. Opening reads headers only.

    Raises:
        CheckpointError: on opening, with every fault of the folder in one message: no safetensors file, a
            shard that the index names and that is missing, a truncated or malformed shard, a tensor that
            stands in another shard than the index says or in two, a type that is no floating point.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.source, weight_map = _shard_map(self.folder)
        faults: list[str] = []
        self._tensors: dict[str, StoredTensor] = {}
        for file in sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE]:
            try:
                tensors = _read_header(self.folder / file)
            except CheckpointError as error:
                faults.append(str(error))
                continue
            for tensor in tensors:
                said = weight_map.get(tensor.name) if weight_map else file
                if said != file:
                    faults.append(f"{file} holds {tensor.name}, which the index has in {said or 'no file'}")
                self._tensors[tensor.name] = tensor
            held = {tensor.name for tensor in tensors}
            lost = [name for name, where in weight_map.items() if where == file and name not in held]
            if lost:
                faults.append(f"{file} lacks {len(lost)} tensors that the index puts there, such as {lost[0]}")
        if faults:
            shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
            raise CheckpointError(f"{self.folder}: incomplete, nothing was loaded: {shown}; copy the folder again")

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read_into(self, name: str, out: np.ndarray, index: tuple[slice, ...] = ()) -> None:
        """Fill `out` with `tensor[index]`, cast to `out`'s type.

        Args:
            out: C-contiguous, of the shape of `tensor[index]`.
            index: a slice for each leading axis, the first without a step; axes left out are whole.

        Raises:
            CheckpointError: when casting to float16 overflows.
        """
        tensor = self._tensors[name]
        rows, *columns = (*index, *[slice(None)] * (len(tensor.shape) - len(index)))
        start, stop, step = rows.indices(tensor.shape[0])
        if step != 1:
            raise ValueError(f"rows {rows} have a step")
        row_shape = tensor.shape[1:]
        row_bytes = math.prod(row_shape) * tensor.dtype.itemsize
        whole_rows = all(part.indices(size) == (0, size, 1) for part, size in zip(columns, row_shape, strict=True))
        with tensor.file.open("rb") as file:
            file.seek(tensor.start + start * row_bytes)
            if whole_rows and out.dtype == tensor.dtype:
                _fill(file, out, tensor)
                return
            piece = max(1, _PIECE_BYTES // max(1, row_bytes))
            buffer = np.empty((min(piece, stop - start), *row_shape), tensor.dtype)
            for first in range(0, stop - start, piece):
                part = buffer[: min(piece, stop - start - first)]
                _fill(file, part, tensor)
                cast_into(out[first : first + len(part)], part[(slice(None), *columns)], name)

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """The whole tensor, in its own type or cast to `dtype`."""
        tensor = self._tensors[name]
        out = np.empty(tensor.shape, dtype or tensor.dtype)
        self.read_into(name, out)
        return out

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same values, compared in pieces so that neither is held whole."""
        a, b = self._tensors[first], self._tensors[second]
        if a.shape != b.shape:
            return False
        rows = max(1, _PIECE_BYTES // max(1, a.nbytes // max(1, a.shape[0])))
        for start in range(0, a.shape[0], rows):
            piece = slice(start, min(start + rows, a.shape[0]))
            pair = []
            for tensor in (a, b):
                out = np.empty((piece.stop - piece.start, *a.shape[1:]), tensor.dtype)
                self.read_into(tensor.name, out, (piece,))
                pair.append(out)
            if not np.array_equal(*pair):
                return False
        return True


def cast_into(out: np.ndarray, values: np.ndarray, name: str) -> None:
    """Fill `out` with `values` rounded to its type; `name` is for the message.

    Raises:
        CheckpointError: when a finite value overflows float16.
    """
    with np.errstate(over="ignore"):
        np.copyto(out, values, casting="unsafe")
    if out.dtype == np.float16 != values.dtype and not np.array_equal(np.isfinite(out), np.isfinite(values)):
        raise CheckpointError(f"{name} holds values above float16's 65504; use bfloat16 or float32")


class OutgoingTensor(NamedTuple):
    """A tensor to be written; `read` gives its values when their turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: str | Path,
    tensors: Sequence[OutgoingTensor],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Write `tensors` into `folder`, in shards with an index when they do not fit into one file.

    Args:
        max_shard_bytes: no shard holds more data, except one with a single larger tensor.
        on_tensor: called with each name once it is written.

    Returns:
        The names of the files written.

    Raises:
        CheckpointError: for a type that safetensors files do not hold here, or a value of another shape or
            type than announced.
    """
    folder = Path(folder)
    shards: list[list[OutgoingTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if tensor.dtype not in _CODES:
            known = ", ".join(map(str, _CODES))
            raise CheckpointError(f"{tensor.name} is {tensor.dtype}; a checkpoint is written in one of {known}")
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    count = len(shards)
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE_FILE]
    for file, shard in zip(files, shards, strict=True):
        _write_shard(folder / file, shard, on_tensor)
    if count == 1:
        return files
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {t.name: file for file, shard in zip(files, shards, strict=True) for t in shard},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [*files, INDEX_FILE]


def _write_shard(path: Path, shard: list[OutgoingTensor], on_tensor: Callable[[str], None]) -> None:
    # Wider types first keeps every tensor aligned to its own item size.
    shard = sorted(shard, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    offset = 0
    for tensor in shard:
        span = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in shard:
            values = np.ascontiguousarray(tensor.read())
            if (values.shape, values.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"{tensor.name}: got {values.dtype} {values.shape}, announced {tensor.dtype} {tensor.shape}"
                )
            file.write(values.reshape(-1).view(np.uint8).data)
            on_tensor(tensor.name)
        file.flush()
        os.fsync(file.fileno())


def _shard_map(folder: Path) -> tuple[Path, dict[str, str]]:
    """The file that lists the tensors, and tensor name -> shard file; empty for a single file."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return index, {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} has no readable weight_map ({error!r}); copy it again") from error
    if single.is_file():
        return single, {}
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    other = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern))
    found = f"{', '.join(shards)} without an index" if shards else ", ".join(other) or "none of either"
    raise CheckpointError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}; found {found}")


def _read_header(path: Path) -> list[StoredTensor]:
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        lead = file.read(8)
        length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else _MAX_HEADER + 1
        if length > _MAX_HEADER or 8 + length > size:
            raise CheckpointError(f"{path.name} is truncated or no safetensors file ({size} bytes)")
        text = file.read(length)
    tensors, end = [], 0
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        for name, entry in entries.items():
            shape, (start, stop) = tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{path.name}: {name} is {entry['dtype']}; only {', '.join(DTYPES)} are read")
            tensor = StoredTensor(name, path, 8 + length + start, shape, DTYPES[entry["dtype"]])
            if start < 0 or stop - start != tensor.nbytes:
                raise CheckpointError(f"{path.name}: {name} has {stop - start} bytes; its shape needs {tensor.nbytes}")
            tensors.append(tensor)
            end = max(end, stop)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} has a malformed header ({error!r})") from error
    if 8 + length + end != size:
        raise CheckpointError(f"{path.name} has {size} bytes; its header promises {8 + length + end}")
    return tensors


def _fill(file: io.BufferedReader, out: np.ndarray, tensor: StoredTensor) -> None:
    target = out.reshape(-1).view(np.uint8).data
    while len(target):
        got = file.readinto(target)
        if not got:
            raise CheckpointError(f"{tensor.file} ended inside {tensor.name}; it was changed while it was read")
        target = target[got:]

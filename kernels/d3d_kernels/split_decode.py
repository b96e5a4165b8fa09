"""`interval_decode` on a kernel backend: rows, tile lists, splits, and the merge of what they give."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from d3d_kernels.intervals import Intervals
from d3d_kernels.merge import merge_stacked
from d3d_kernels.plan import key_tiles, split, within
from d3d_kernels.rows import pack, pack_intervals, unpack
from d3d_kernels.tuning import DECODE_TILES, even_tile, key_tile, splits_for

LOG2E = math.log2(math.e)


class DecodeShape(NamedTuple):
    """Rows and keys of a tile, and in how many parts the keys are cut."""

    rows: int
    keys: int
    new_keys: int
    splits: int


def decode(
    q_BNTH: jax.Array,
    sources: Sequence[tuple[jax.Array, jax.Array]],
    intervals: Intervals,
    scale: float,
    num_splits: int | Literal["auto"],
    backend: str,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """(output, lse) of `interval_decode` over a cache and at most one more source of keys."""
    return _undifferentiated(q_BNTH, sources, intervals, scale, num_splits, backend, interpret)


def _decode(
    q_BNTH: jax.Array,
    sources: Sequence[tuple[jax.Array, jax.Array]],
    intervals: Intervals,
    scale: float,
    num_splits: int | Literal["auto"],
    backend: str,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    batch, heads, num_queries, _ = q_BNTH.shape
    kv_heads = sources[0][0].shape[1]
    sizes = [k.shape[2] for k, _ in sources]
    shape = decode_shape(batch, kv_heads, num_queries * heads // kv_heads, sizes, num_splits, backend)
    if sizes[0] < shape.keys:
        raise ValueError(
            f"interval_decode: backend {backend!r} takes a cache of at least {shape.keys} slots, not {sizes[0]}; "
            "give it more slots, or name backend xla"
        )
    bounds = pack_intervals(within(intervals, sum(sizes)), heads // kv_heads, shape.rows)
    if len(sources) > 1:
        sources = [sources[0], _padded(sources[1], shape.new_keys)]  # behind the last bound: never seen
        sizes[1] = sources[1][0].shape[2]
    rows = pack(q_BNTH, kv_heads, shape.rows)
    tiles = key_tiles(bounds, list(zip(sizes, (shape.keys, shape.new_keys), strict=False)), shape.rows)
    kernels = importlib.import_module(f"d3d_kernels.{backend}_decode")
    output, lse = kernels.decode(rows, sources, bounds, split(tiles, shape.splits), shape, scale * LOG2E, interpret)
    if shape.splits == 1:
        output, lse = output[0], lse[0]
    else:
        output, lse = merge_stacked(output, lse)
    return unpack(output.astype(q_BNTH.dtype), heads, num_queries), unpack(lse, heads, num_queries)


_undifferentiated = jax.custom_jvp(_decode, nondiff_argnums=(3, 4, 5, 6))


@_undifferentiated.defjvp
def _refuse(scale: float, num_splits: Any, backend: str, interpret: Any, primals: Any, tangents: Any) -> Any:
    raise ValueError(
        f"interval_decode: backend {backend!r} has no gradients; differentiate interval_attention, or name backend xla"
    )


def _padded(source: tuple[jax.Array, jax.Array], size: int) -> tuple[jax.Array, jax.Array]:
    """The few new keys, not fewer than a tile."""
    k, v = (jnp.pad(array, ((0, 0), (0, 0), (0, max(0, size - array.shape[2])), (0, 0))) for array in source)
    return k, v


def decode_shape(
    batch: int, kv_heads: int, rows: int, num_keys: Sequence[int], num_splits: int | Literal["auto"], backend: str
) -> DecodeShape:
    """Tile sizes for so many rows of a key head, over sources of so many keys."""
    table = DECODE_TILES[backend]
    row_tile = even_tile(rows, table.rows, table.row_multiple)
    keys, new_keys = (key_tile(table, row_tile, size) for size in (num_keys[0], num_keys[-1]))
    if num_splits == "auto":
        programs = batch * kv_heads * -(-rows // row_tile)
        num_splits = splits_for(programs, -(-num_keys[0] // keys), table.cores)
    return DecodeShape(row_tile, keys, new_keys, num_splits)

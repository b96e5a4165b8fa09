"""Which key tiles a tile of queries touches, found from the bounds of its intervals.

A plan is made of traced integers of fixed shape: new lengths and new block starts compile nothing again. It is the
same for every layer, so a training step makes it once.

A tile is *touched* if it overlaps the smallest interval that holds interval 1 of all the queries, or the one that
holds interval 2: every visible key lies in a touched tile, and a touched tile may hold no visible key. It is *full*
if one and the same of the two intervals covers it for every query: such a tile needs no mask. Both are
one-sided on purpose: minima and maxima find them without looking at single keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from d3d_kernels.intervals import Intervals

_FAR = 2**30  # beyond every slot


class Tiles(NamedTuple):
    """Work lists for I tiles on one side, over J tiles on the other.

    `count` int32 [B, I] says how many entries of `entry` int32 [B, I, J] are work. An entry is `2 * tile + full`.
    Entries after the last repeat it, so that a pipeline that runs over them loads nothing new; where there is no
    work at all they are tile 0.
    """

    count: jax.Array
    entry: jax.Array


class AttentionPlan(NamedTuple):
    """The lists of one training step: key tiles of each query tile, and query tiles of each key tile."""

    forward: Tiles
    by_query: Tiles
    by_key: Tiles


def within(intervals: Intervals, num_keys: int) -> Intervals:
    """The same mask over `num_keys` keys with every bound in [0, num_keys].

    Kernels need it: a key tile may reach over the end, and what lies there must be hidden.
    """
    return Intervals(*(jnp.clip(bound, 0, num_keys) for bound in intervals))


def shifted(intervals: Intervals, first_key: int, num_keys: int) -> Intervals:
    """The part of a mask over keys `first_key .. first_key + num_keys`, addressed from 0."""
    return within(Intervals(*(bound - first_key for bound in intervals)), num_keys)


def overlaps(intervals: Intervals, num_keys: int, query_tile: int, key_tile: int) -> tuple[jax.Array, jax.Array]:
    """(touched, full), both bool [B, I, J], for I = T / query_tile and J = ceil(num_keys / key_tile).

    Expects bounds of `within`, and T a multiple of `query_tile`.
    """
    batch, num_queries = intervals.lo1.shape
    rows = (batch, num_queries // query_tile, query_tile)
    start = jnp.arange(-(-num_keys // key_tile)) * key_tile
    touched, full = False, False
    for lo, hi in (intervals[:2], intervals[2:]):
        empty = lo >= hi
        lo = jnp.where(empty, _FAR, lo).reshape(rows)
        hi = jnp.where(empty, 0, hi).reshape(rows)
        touched |= (lo.min(-1)[..., None] < start + key_tile) & (hi.max(-1)[..., None] > start)
        full |= (lo.max(-1)[..., None] <= start) & (hi.min(-1)[..., None] >= start + key_tile)
    return jnp.asarray(touched), jnp.asarray(full)


def work_list(touched: jax.Array, full: jax.Array) -> Tiles:
    """Lists of the touched tiles, ascending, from bool [B, I, J]."""
    count = touched.sum(-1).astype(jnp.int32)
    order = jnp.argsort(~touched, axis=-1, stable=True).astype(jnp.int32)
    entry = order * 2 + jnp.take_along_axis(full & touched, order, -1).astype(jnp.int32)
    last = jnp.take_along_axis(entry, jnp.maximum(count - 1, 0)[..., None], -1)
    last = jnp.where(count[..., None] > 0, last, 0)
    return Tiles(count, jnp.where(jnp.arange(entry.shape[-1]) < count[..., None], entry, last))


def key_tiles(intervals: Intervals, sources: Sequence[tuple[int, int]], query_tile: int) -> Tiles:
    """Key tiles of each query tile, over sources of (number of keys, key tile) addressed one after another.

    Tiles are numbered through: those of the second source follow those of the first.
    """
    pairs, first = [], 0
    for num_keys, key_tile in sources:
        pairs.append(overlaps(shifted(intervals, first, num_keys), num_keys, query_tile, key_tile))
        first += num_keys
    touched, full = (jnp.concatenate(part, axis=-1) for part in zip(*pairs, strict=True))
    return work_list(touched, full)


def query_tiles(intervals: Intervals, num_keys: int, query_tile: int, key_tile: int) -> Tiles:
    """Query tiles of each key tile: the transpose of `key_tiles` over one source."""
    touched, full = overlaps(within(intervals, num_keys), num_keys, query_tile, key_tile)
    return work_list(touched.swapaxes(1, 2), full.swapaxes(1, 2))


def split(tiles: Tiles, num_splits: int) -> Tiles:
    """Every list cut into `num_splits` of nearly equal length; those of list i are i * splits and the following.

    The width becomes ceil(J / splits). A list that is short leaves its last splits empty.
    """
    batch, rows, width = tiles.entry.shape
    share = -(-tiles.count // num_splits)
    first = jnp.minimum(jnp.arange(num_splits) * share[..., None], tiles.count[..., None])
    count = jnp.minimum(first + share[..., None], tiles.count[..., None]) - first
    at = first[..., None] + jnp.minimum(jnp.arange(-(-width // num_splits)), jnp.maximum(count - 1, 0)[..., None])
    at = jnp.minimum(at, width - 1).reshape(batch, rows, -1)
    entry = jnp.take_along_axis(tiles.entry, at, -1)
    return Tiles(count.reshape(batch, -1), entry.reshape(batch, rows * num_splits, -1))


def in_phases(tiles: Tiles, first_new: int) -> Tiles:
    """The same lists ordered by kind, for kernels that run one loop over each: `count` becomes int32 [B, I, 3].

    First come tiles below `first_new` that need a mask, then full ones, then tiles from `first_new` on. Phase p ends
    before entry `count[..., p]`. The order of tiles does not change what an online softmax gives.
    """
    listed = jnp.arange(tiles.entry.shape[-1]) < tiles.count[..., None]
    phase = jnp.where(tiles.entry >> 1 < first_new, tiles.entry & 1, 2)
    order = jnp.argsort(jnp.where(listed, phase, 3), axis=-1, stable=True)
    ends = jnp.cumsum(jnp.stack([(listed & (phase == p)).sum(-1) for p in range(3)], axis=-1), axis=-1)
    return Tiles(ends.astype(jnp.int32), jnp.take_along_axis(tiles.entry, order, -1))

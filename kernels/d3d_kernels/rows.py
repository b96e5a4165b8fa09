"""Queries as rows: all query heads that read one key head are rows of the same matrix product.

Row `t * G + g` is query t of the g-th head of the group. Neighbouring rows are then of the same or of neighbouring
queries, see nearly the same keys, and a tile of them touches few key tiles beyond those that each of them sees.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from d3d_kernels.intervals import Intervals


def pack(q_BNTH: jax.Array, kv_heads: int, multiple: int) -> jax.Array:
    """[B, N, T, H] -> [B, K, M, H], M = T * N/K rounded up to `multiple` with rows of zeros."""
    batch, heads, num_queries, width = q_BNTH.shape
    rows = q_BNTH.reshape(batch, kv_heads, heads // kv_heads, num_queries, width).swapaxes(2, 3)
    rows = rows.reshape(batch, kv_heads, -1, width)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % multiple), (0, 0)))


def unpack(rows_BKM: jax.Array, heads: int, num_queries: int) -> jax.Array:
    """[B, K, M, ...] -> [B, N, T, ...], the inverse of `pack`."""
    batch, kv_heads = rows_BKM.shape[:2]
    rest, group = rows_BKM.shape[3:], heads // kv_heads
    rows = rows_BKM[:, :, : num_queries * group].reshape(batch, kv_heads, num_queries, group, *rest)
    return rows.swapaxes(2, 3).reshape(batch, heads, num_queries, *rest)


def pack_intervals(intervals: Intervals, group: int, multiple: int) -> Intervals:
    """Bounds [B, T] of every row: [B, M]. Rows of padding repeat the last bound, so they hide no full tile."""

    def row_bounds(bound: jax.Array) -> jax.Array:
        bound = jnp.repeat(bound, group, axis=1)
        return jnp.pad(bound, ((0, 0), (0, -bound.shape[1] % multiple)), mode="edge")

    return Intervals(*map(row_bounds, intervals))

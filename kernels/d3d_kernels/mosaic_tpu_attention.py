"""Training attention on TPU, forward.

A tile of scores is transposed, [keys, queries]: what belongs to a query (its maximum, its sum, its bounds) then lies
along the lanes of one vector register row, and the matrix unit accumulates values as [H, queries]. That takes a third
fewer instruction bundles than [queries, keys].

The grid is (batch, query heads, query tiles, steps). The steps of a query tile walk through its list of key
tiles, in order, on one core; the output stays in VMEM until the last of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from d3d_kernels.differentiable import TileShape
from d3d_kernels.plan import Tiles
from d3d_kernels.scores import HIDDEN, LOWEST, cost, dot, inside, scaled


def forward(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    bounds_B4T: jax.Array,
    tiles: Tiles,
    shape: TileShape,
    scale: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """(output [B, N, T, H], lse float32 [B, N, T]), both in base 2: `scale` carries log2(e).

    T and S are whole tiles of `shape`. The lse of a query that sees nothing is any finite number.
    """
    batch, heads, num_queries, width = q_BNTH.shape
    kv_heads = k_BKSH.shape[1]
    group, num_tiles = heads // kv_heads, num_queries // shape.queries
    entries = tiles.entry.shape[-1]
    grid = (batch, heads, num_tiles, steps(tiles, interpret))

    def query_map(b, n, i, step, count, entry):
        return b, n, i, 0

    def key_map(b, n, i, step, count, entry):
        return b, n // group, entry[(b * num_tiles + i) * entries + step] >> 1, 0

    query_spec = pl.BlockSpec((None, None, shape.queries, width), query_map)
    key_spec = pl.BlockSpec((None, None, shape.keys, width), key_map)
    output, lse = pl.pallas_call(
        functools.partial(_kernel, shape=shape, entries=entries, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[
                pl.BlockSpec((None, 4, shape.queries), lambda b, n, i, step, count, entry: (b, 0, i)),
                query_spec,
                key_spec,
                key_spec,
            ],
            out_specs=[
                query_spec,
                pl.BlockSpec((None, None, 1, shape.queries), lambda b, n, i, step, count, entry: (b, n, 0, i)),
            ],
            scratch_shapes=[
                pltpu.VMEM((shape.queries, width), q_BNTH.dtype),
                pltpu.VMEM((1, shape.queries), jnp.float32),
                pltpu.VMEM((1, shape.queries), jnp.float32),
                pltpu.VMEM((width, shape.queries), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_BNTH.shape, q_BNTH.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, num_queries), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=cost(q_BNTH, k_BKSH, products=2),
        interpret=interpret,
        name="interval_attention_forward",
    )(tiles.count.reshape(-1), tiles.entry.reshape(-1), bounds_B4T, q_BNTH, k_BKSH, v_BKSH)
    return output, lse[:, :, 0]


def _kernel(
    count,
    entry,
    bounds_ref,
    q_ref,
    k_ref,
    v_ref,
    o_ref,
    lse_ref,
    scaled_ref,
    max_ref,
    sum_ref,
    acc_ref,
    *,
    shape,
    entries,
    scale,
):
    """One step: a tile of `shape` scores, added to what the query tile has so far."""
    step = pl.program_id(3)
    row = pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)
    chosen = entry[row * entries + step]

    @pl.when(step == 0)
    def _():
        scaled_ref[...] = scaled(q_ref[...], scale)
        max_ref[...] = jnp.full_like(max_ref, LOWEST)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def add(masked: bool) -> None:
        score = dot(k_ref[...], scaled_ref[...], 1, 1)  # [keys, queries]
        if masked:
            score = jnp.where(visible(bounds_ref, (chosen >> 1) * shape.keys, score.shape), score, HIDDEN)
        before = max_ref[...]
        highest = jnp.maximum(before, score.max(0, keepdims=True))
        weight = jnp.exp2(score - highest)
        shrink = jnp.exp2(before - highest)
        max_ref[...] = highest
        sum_ref[...] = sum_ref[...] * shrink + weight.sum(0, keepdims=True)
        acc_ref[...] = acc_ref[...] * shrink + dot(v_ref[...], weight.astype(v_ref.dtype), 0, 0)  # [H, queries]

    when_listed(step < count[row], chosen, add)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        total = jnp.where(sum_ref[...] > 0, sum_ref[...], 1.0)
        o_ref[...] = (acc_ref[...] / total).T.astype(o_ref.dtype)
        lse_ref[...] = max_ref[...] + jnp.log2(total)


def when_listed(listed: jax.Array, chosen: jax.Array, add: Callable[[bool], None]) -> None:
    """Runs `add(masked)` for a listed tile: without a mask if the entry says that it is full."""
    full = (chosen & 1) == 1
    pl.when(listed & full)(lambda: add(False))
    pl.when(listed & ~full)(lambda: add(True))


def visible(bounds_ref: Any, first_key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The mask of a transposed tile [keys, queries]; `bounds_ref` is int32 [4, queries]."""
    key = first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    lo1, hi1, lo2, hi2 = (bounds_ref[i : i + 1, :] for i in range(4))
    return inside(key, lo1, hi1, lo2, hi2)


def steps(tiles: Tiles, interpret: Any) -> jax.Array | int:
    """Length of the longest list, known when the program runs: shorter rows do not pay for the longest possible.

    At least 1, since the first and the last step also begin and end the output. The plain interpreter takes
    static grids only.
    """
    return tiles.entry.shape[-1] if interpret is True else jnp.maximum(tiles.count.max(), 1)

"""Verification and the packed pass on TPU: few rows over a long cache, and over keys that are not in it.

The rows of a tile stay in VMEM while its listed key tiles stream past, cache first, then the new keys: both are
operands of one kernel, so nothing is copied together and nothing is merged afterwards. Tiles are [rows, keys]: with 64
rows a transposed tile would leave half of every vector register unused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from d3d_kernels.intervals import Intervals
from d3d_kernels.mosaic_tpu_attention import steps, when_listed
from d3d_kernels.plan import Tiles
from d3d_kernels.scores import HIDDEN, LOWEST, cost, dot, inside
from d3d_kernels.split_decode import DecodeShape

_LANES = 128


def decode(
    q_BKMH: jax.Array,
    sources: Sequence[tuple[jax.Array, jax.Array]],
    bounds: Intervals,
    tiles: Tiles,
    shape: DecodeShape,
    scale: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Partial results of every split: (output [splits, B, K, M, H], lse float32 [splits, B, K, M] in base 2).

    `tiles` are the lists of `splits` parts for every tile of rows. With one split the output has the queries' type.
    """
    batch, kv_heads, num_rows, width = q_BKMH.shape
    splits, num_lists, entries = shape.splits, tiles.entry.shape[1], tiles.entry.shape[2]
    cache_tiles = -(-sources[0][0].shape[2] // shape.keys)
    tile = tiles.entry >> 1
    # While new keys are worked on, the cache's block must stay the last one: another would be loaded for nothing.
    cached = jax.lax.cummax(jnp.where(tile < cache_tiles, tile, 0), axis=2)

    def at(b, c, step):
        return (b * num_lists + c) * entries + step

    def row_map(b, h, c, step, count, entry, cached):
        return b, h, c // splits, 0

    def cache_map(b, h, c, step, count, entry, cached):
        return b, h, cached[at(b, c, step)], 0

    def new_map(b, h, c, step, count, entry, cached):
        return b, h, jnp.maximum((entry[at(b, c, step)] >> 1) - cache_tiles, 0), 0

    key_specs = []
    for size, index_map in zip((shape.keys, shape.new_keys), (cache_map, new_map), strict=True):
        key_specs += [pl.BlockSpec((None, None, size, width), index_map)] * 2
    cache, *new = sources
    operands = [*(_in_main_memory(array, interpret) for array in cache), *(array for source in new for array in source)]
    kernel = functools.partial(
        _kernel,
        shape=shape,
        num_keys=tuple(k.shape[2] for k, _ in sources),
        cache_tiles=cache_tiles,
        entries=entries,
        scale=scale,
    )
    output, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, kv_heads, num_lists, steps(tiles, interpret)),
            in_specs=[
                pl.BlockSpec((None, shape.rows, 4), lambda b, h, c, *_: (b, c // splits, 0)),
                pl.BlockSpec((None, None, shape.rows, width), row_map),
                *key_specs[: len(operands)],
            ],
            out_specs=[
                pl.BlockSpec(
                    (None, None, None, shape.rows, width), lambda b, h, c, *_: (c % splits, b, h, c // splits, 0)
                ),
                pl.BlockSpec(
                    (None, None, None, None, 1, shape.rows), lambda b, h, c, *_: (c % splits, b, h, c // splits, 0, 0)
                ),
            ],
            scratch_shapes=[
                pltpu.VMEM((shape.rows, _LANES), jnp.float32),
                pltpu.VMEM((shape.rows, _LANES), jnp.float32),
                pltpu.VMEM((shape.rows, width), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((splits, *q_BKMH.shape), q_BKMH.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, batch, kv_heads, num_lists // splits, 1, shape.rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=cost(q_BKMH, sources[0][0], products=2, share=1.0),
        interpret=interpret,
        name="interval_decode",
    )(
        tiles.count.reshape(-1),
        tiles.entry.reshape(-1),
        cached.reshape(-1),
        jnp.stack(bounds, axis=-1),
        q_BKMH,
        *operands,
    )
    return output, lse.reshape(splits, batch, kv_heads, num_rows)


def _in_main_memory(array: jax.Array, interpret: Any) -> jax.Array:
    """Left where it lies: XLA may fetch a whole cache into VMEM to write a few slots, and then write all of it back."""
    return array if interpret else jax.jit(lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM))(array)


def _kernel(count, entry, cached, bounds_ref, q_ref, *refs, shape, num_keys, cache_tiles, entries, scale):
    """One step: a tile of scores [rows, keys]. Row statistics are columns, repeated over all lanes."""
    *key_refs, o_ref, lse_ref, max_ref, sum_ref, acc_ref = refs
    step = pl.program_id(3)
    row = pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)
    chosen = entry[row * entries + step]
    listed = step < count[row]

    @pl.when(step == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, LOWEST)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def add(masked: bool, source: int) -> None:
        k_ref, v_ref = key_refs[2 * source : 2 * source + 2]
        size, tile = (shape.keys, shape.new_keys)[source], (chosen >> 1) - source * cache_tiles
        score = dot(q_ref[...], k_ref[...], 1, 1) * scale
        value = v_ref[...]
        if masked:
            there = num_keys[source] - tile * size  # keys of this tile that exist
            key = jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
            first_slot = source * num_keys[0] + tile * size
            seen = inside(key, *(bounds_ref[:, i : i + 1] - first_slot for i in range(4)))
            if num_keys[source] % size:  # what lies behind the end is anything, also NaN
                seen &= key < there
                value = jnp.where(jax.lax.broadcasted_iota(jnp.int32, value.shape, 0) < there, value, 0)
            score = jnp.where(seen, score, HIDDEN)
        before = max_ref[:, :1]
        highest = jnp.maximum(before, score.max(1, keepdims=True))
        weight = jnp.exp2(score - highest)
        shrink = jnp.exp2(before - highest)
        max_ref[...] = jnp.broadcast_to(highest, max_ref.shape)
        sum_ref[...] = sum_ref[...] * shrink + weight.sum(1, keepdims=True)
        acc_ref[...] = acc_ref[...] * shrink + dot(weight.astype(value.dtype), value, 1, 0)

    is_new = (chosen >> 1) >= cache_tiles
    when_listed(listed & ~is_new, chosen, functools.partial(add, source=0))
    if len(num_keys) > 1:
        pl.when(listed & is_new)(lambda: add(True, 1))

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        some = sum_ref[...] > 0
        total = jnp.where(some, sum_ref[...], 1.0)
        o_ref[...] = (acc_ref[...] / total[:, :1]).astype(o_ref.dtype)
        lse_ref[...] = jnp.where(some, max_ref[...] + jnp.log2(total), -jnp.inf).T[:1]

"""Verification and the packed pass on GPU through Triton: few rows over a long cache, split over its keys.

One program takes one tile of rows and one part of its list of key tiles. The parts are merged afterwards by lse.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from d3d_kernels.intervals import Intervals
from d3d_kernels.plan import Tiles, in_phases
from d3d_kernels.scores import HIDDEN, cost, dot, inside
from d3d_kernels.split_decode import DecodeShape
from d3d_kernels.triton_attention import add_tile, compiler_params, empty_state
from d3d_kernels.tuning import TRITON_DECODE


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
    Every source has at least as many keys as its tile.
    """
    batch, kv_heads, num_rows, width = q_BKMH.shape
    splits, (_, num_lists, entries) = shape.splits, tiles.entry.shape
    cache_tiles = -(-sources[0][0].shape[2] // shape.keys)
    phases = in_phases(tiles, cache_tiles)
    operands = [array for source in sources for array in source]
    kernel = functools.partial(
        _kernel, shape=shape, num_keys=tuple(k.shape[2] for k, _ in sources), cache_tiles=cache_tiles, scale=scale
    )
    return pl.pallas_call(
        kernel,
        grid=(num_lists, kv_heads, batch),
        in_specs=[
            pl.BlockSpec((None, None, 3), lambda c, h, b: (b, c, 0)),
            pl.BlockSpec((None, None, entries), lambda c, h, b: (b, c, 0)),
            pl.BlockSpec((None, 4, shape.rows), lambda c, h, b: (b, 0, c // splits)),
            pl.BlockSpec((None, None, shape.rows, width), lambda c, h, b: (b, h, c // splits, 0)),
            *(pl.BlockSpec((None, None, *array.shape[2:]), lambda c, h, b: (b, h, 0, 0)) for array in operands),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, shape.rows, width), lambda c, h, b: (c % splits, b, h, c // splits, 0)),
            pl.BlockSpec((None, None, None, shape.rows), lambda c, h, b: (c % splits, b, h, c // splits)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, *q_BKMH.shape), q_BKMH.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, batch, kv_heads, num_rows), jnp.float32),
        ],
        compiler_params=compiler_params(TRITON_DECODE),
        cost_estimate=cost(q_BKMH, sources[0][0], products=2, share=1.0),
        interpret=interpret,
        name="interval_decode",
    )(phases.count, phases.entry, jnp.stack(bounds, axis=1), q_BKMH, *operands)


def _kernel(ends_ref, entry_ref, bounds_ref, q_ref, *refs, shape, num_keys, cache_tiles, scale):
    *key_refs, o_ref, lse_ref = refs
    query = q_ref[...]
    bounds = [bounds_ref[i, :][:, None] for i in range(4)]

    def add(masked: bool, source: int, n: jax.Array, state: tuple) -> tuple:
        k_ref, v_ref = key_refs[2 * source : 2 * source + 2]
        size = (shape.keys, shape.new_keys)[source]
        first = ((entry_ref[n] >> 1) - source * cache_tiles) * size
        # A last tile that would reach over the end is moved back; keys that the tile before it has are hidden.
        at = jnp.minimum(first, num_keys[source] - size) if num_keys[source] % size else first
        keys = pl.ds(at, size)
        score = dot(query, k_ref[keys, :], 1, 1) * scale
        if masked:
            key = at + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
            seen = (key >= first) & inside(key + source * num_keys[0], *bounds)
            score = jnp.where(seen, score, HIDDEN)
        return add_tile(state, score, v_ref[keys, :])

    state = empty_state(query.shape)
    state = jax.lax.fori_loop(0, ends_ref[0], functools.partial(add, True, 0), state)
    state = jax.lax.fori_loop(ends_ref[0], ends_ref[1], functools.partial(add, False, 0), state)
    if len(num_keys) > 1:
        state = jax.lax.fori_loop(ends_ref[1], ends_ref[2], functools.partial(add, True, 1), state)
    highest, total, output = state
    some = total > 0
    total = jnp.where(some, total, 1.0)
    o_ref[...] = (output / total[:, None]).astype(o_ref.dtype)
    lse_ref[...] = jnp.where(some, highest + jnp.log2(total), -jnp.inf)

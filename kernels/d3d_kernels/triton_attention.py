"""Training attention on GPU through Triton, forward. Triton is deprecated in JAX; it serves GPUs before Hopper.

One program per query tile walks through the tile's list: first the key tiles that need a mask, then the full ones.
Keys and values are whole operands that the program slices: the compiler pipelines the loads.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from d3d_kernels.differentiable import TileShape
from d3d_kernels.plan import Tiles, in_phases
from d3d_kernels.scores import HIDDEN, LOWEST, cost, dot, inside, scaled
from d3d_kernels.tuning import TRITON_FORWARD


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
    kv_heads, num_keys = k_BKSH.shape[1:3]
    group, entries = heads // kv_heads, tiles.entry.shape[-1]
    phases = in_phases(tiles, entries)
    query_spec = pl.BlockSpec((None, None, shape.queries, width), lambda b, n, i: (b, n, i, 0))
    key_spec = pl.BlockSpec((None, None, num_keys, width), lambda b, n, i: (b, n // group, 0, 0))
    row_spec = pl.BlockSpec((None, None, shape.queries), lambda b, n, i: (b, n, i))
    return pl.pallas_call(
        functools.partial(_kernel, shape=shape, scale=scale),
        grid=(batch, heads, num_queries // shape.queries),
        in_specs=[
            pl.BlockSpec((None, None, 3), lambda b, n, i: (b, i, 0)),
            pl.BlockSpec((None, None, entries), lambda b, n, i: (b, i, 0)),
            pl.BlockSpec((None, 4, shape.queries), lambda b, n, i: (b, 0, i)),
            query_spec,
            key_spec,
            key_spec,
        ],
        out_specs=[query_spec, row_spec],
        out_shape=[
            jax.ShapeDtypeStruct(q_BNTH.shape, q_BNTH.dtype),
            jax.ShapeDtypeStruct(q_BNTH.shape[:3], jnp.float32),
        ],
        compiler_params=compiler_params(TRITON_FORWARD),
        cost_estimate=cost(q_BNTH, k_BKSH, products=2),
        interpret=interpret,
        name="interval_attention_forward",
    )(phases.count, phases.entry, bounds_B4T, q_BNTH, k_BKSH, v_BKSH)


def _kernel(ends_ref, entry_ref, bounds_ref, q_ref, k_ref, v_ref, o_ref, lse_ref, *, shape, scale):
    """All key tiles of one query tile; tiles of scores are [queries, keys]."""
    query = scaled(q_ref[...], scale)
    bounds = [bounds_ref[i, :][:, None] for i in range(4)]

    def add(masked: bool, n: jax.Array, state: tuple) -> tuple:
        first = (entry_ref[n] >> 1) * shape.keys
        keys = pl.ds(first, shape.keys)
        score = dot(query, k_ref[keys, :], 1, 1)
        if masked:
            key = first + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
            score = jnp.where(inside(key, *bounds), score, HIDDEN)
        return add_tile(state, score, v_ref[keys, :])

    state = jax.lax.fori_loop(0, ends_ref[0], functools.partial(add, True), empty_state(query.shape))
    highest, total, output = jax.lax.fori_loop(ends_ref[0], ends_ref[1], functools.partial(add, False), state)
    total = jnp.where(total > 0, total, 1.0)
    o_ref[...] = (output / total[:, None]).astype(o_ref.dtype)
    lse_ref[...] = highest + jnp.log2(total)


def empty_state(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(maximum, sum, output not yet divided by it) of rows that have seen nothing."""
    rows = shape[:1]
    return jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(shape, jnp.float32)


def add_tile(state: tuple, score: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state after a tile of scores [rows, keys], in base 2, and its values [keys, H]."""
    before, total, output = state
    highest = jnp.maximum(before, score.max(1))
    weight = jnp.exp2(score - highest[:, None])
    shrink = jnp.exp2(before - highest)
    added = dot(weight.astype(value.dtype), value, 1, 0)
    return highest, total * shrink + weight.sum(1), output * shrink[:, None] + added


def compiler_params(tuned: tuple[int, int]) -> Any:
    """Given with every call: without them JAX picks the compiler by its version."""
    return triton.CompilerParams(num_warps=tuned[0], num_stages=tuned[1])

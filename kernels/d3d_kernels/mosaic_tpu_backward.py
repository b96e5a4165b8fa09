"""Training attention on TPU, backward: one kernel for the queries' gradient, one for that of keys and values.

Both compute their tiles of weights again, transposed as in the forward pass. With `p` the weights, `do` the output's
gradient and `ds = p * (v . do - delta)`: dq = ds k, dk = ds' q, dv = p' do, times ln 2 for scores in base 2.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from d3d_kernels.differentiable import TileShape
from d3d_kernels.mosaic_tpu_attention import steps, visible, when_listed
from d3d_kernels.plan import AttentionPlan
from d3d_kernels.scores import HIDDEN, cost, dot, scaled

_LN2 = math.log(2)


def backward(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    bounds_B4T: jax.Array,
    plan: AttentionPlan,
    for_output_BNTH: jax.Array,
    lse_BNT: jax.Array,
    delta_BNT: jax.Array,
    shape: TileShape,
    scale: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, each in its type.

    `lse` is finite everywhere; `delta` is the sum over H of output times its gradient. Both float32. `scale` is that of
    the forward pass.
    """
    rows = (lse_BNT[:, :, None], delta_BNT[:, :, None])  # a row of queries lies along the lanes
    operands = (bounds_B4T, q_BNTH, k_BKSH, v_BKSH, for_output_BNTH, *rows)
    for_q = _for_queries(operands, plan, shape, scale, interpret)
    for_k, for_v = _for_keys(operands, plan, shape, scale, interpret)
    return for_q, for_k, for_v


def _for_queries(operands: tuple, plan: AttentionPlan, shape: TileShape, scale: float, interpret: Any) -> jax.Array:
    _, q, k = operands[:3]
    tiles, width, group = plan.by_query, q.shape[3], q.shape[1] // k.shape[1]
    _, num_tiles, entries = tiles.entry.shape

    def query_map(b, n, i, step, count, entry):
        return b, n, i, 0

    def key_map(b, n, i, step, count, entry):
        return b, n // group, entry[(b * num_tiles + i) * entries + step] >> 1, 0

    query_spec = pl.BlockSpec((None, None, shape.queries, width), query_map)
    key_spec = pl.BlockSpec((None, None, shape.keys, width), key_map)
    row_spec = pl.BlockSpec((None, None, 1, shape.queries), lambda b, n, i, *_: (b, n, 0, i))
    return pl.pallas_call(
        functools.partial(_query_kernel, shape=shape, entries=entries, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(*q.shape[:2], num_tiles, steps(tiles, interpret)),
            in_specs=[
                pl.BlockSpec((None, 4, shape.queries), lambda b, n, i, *_: (b, 0, i)),
                query_spec,
                key_spec,
                key_spec,
                query_spec,
                row_spec,
                row_spec,
            ],
            out_specs=query_spec,
            scratch_shapes=[
                pltpu.VMEM((shape.queries, width), q.dtype),
                pltpu.VMEM((shape.queries, width), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=cost(q, k, products=3),
        interpret=interpret,
        name="interval_attention_backward_q",
    )(tiles.count.reshape(-1), tiles.entry.reshape(-1), *operands)


def _query_kernel(
    count,
    entry,
    bounds_ref,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dq_ref,
    scaled_ref,
    acc_ref,
    *,
    shape,
    entries,
    scale,
):
    step = pl.program_id(3)
    row = pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)
    chosen = entry[row * entries + step]

    @pl.when(step == 0)
    def _():
        scaled_ref[...] = scaled(q_ref[...], scale)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def add(masked: bool) -> None:
        first_key = (chosen >> 1) * shape.keys
        _, for_score = _tile(bounds_ref, scaled_ref[...], k_ref, v_ref, do_ref, lse_ref, delta_ref, first_key, masked)
        acc_ref[...] += dot(for_score.astype(k_ref.dtype), k_ref[...], 0, 0)

    when_listed(step < count[row], chosen, add)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * (_LN2 * scale)).astype(dq_ref.dtype)


def _for_keys(
    operands: tuple, plan: AttentionPlan, shape: TileShape, scale: float, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """The queries of all heads of a group are summed in one accumulator, head by head."""
    _, q, k, v = operands[:4]
    tiles, width, group = plan.by_key, q.shape[3], q.shape[1] // k.shape[1]
    _, num_tiles, entries = tiles.entry.shape

    def query_tile(b, j, step, entry):
        return entry[(b * num_tiles + j) * entries + step] >> 1

    def query_map(b, h, j, g, step, count, entry):
        return b, h * group + g, query_tile(b, j, step, entry), 0

    def row_map(b, h, j, g, step, count, entry):
        return b, h * group + g, 0, query_tile(b, j, step, entry)

    def bounds_map(b, h, j, g, step, count, entry):
        return b, 0, query_tile(b, j, step, entry)

    query_spec = pl.BlockSpec((None, None, shape.queries, width), query_map)
    key_spec = pl.BlockSpec((None, None, shape.keys, width), lambda b, h, j, *_: (b, h, j, 0))
    row_spec = pl.BlockSpec((None, None, 1, shape.queries), row_map)
    for_k, for_v = pl.pallas_call(
        functools.partial(_key_kernel, shape=shape, entries=entries, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(*k.shape[:2], num_tiles, group, steps(tiles, interpret)),
            in_specs=[
                pl.BlockSpec((None, 4, shape.queries), bounds_map),
                query_spec,
                key_spec,
                key_spec,
                query_spec,
                row_spec,
                row_spec,
            ],
            out_specs=[key_spec, key_spec],
            scratch_shapes=[pltpu.VMEM((shape.keys, width), jnp.float32)] * 2,
        ),
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=cost(q, k, products=4),
        interpret=interpret,
        name="interval_attention_backward_kv",
    )(tiles.count.reshape(-1), tiles.entry.reshape(-1), *operands)
    return for_k, for_v


def _key_kernel(
    count,
    entry,
    bounds_ref,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dk_ref,
    dv_ref,
    k_acc_ref,
    v_acc_ref,
    *,
    shape,
    entries,
    scale,
):
    tile, head, step = (pl.program_id(axis) for axis in (2, 3, 4))
    row = pl.program_id(0) * pl.num_programs(2) + tile
    chosen = entry[row * entries + step]

    @pl.when((step == 0) & (head == 0))
    def _():
        k_acc_ref[...] = jnp.zeros_like(k_acc_ref)
        v_acc_ref[...] = jnp.zeros_like(v_acc_ref)

    def add(masked: bool) -> None:
        query = scaled(q_ref[...], scale)
        weight, for_score = _tile(
            bounds_ref, query, k_ref, v_ref, do_ref, lse_ref, delta_ref, tile * shape.keys, masked
        )
        v_acc_ref[...] += dot(weight.astype(do_ref.dtype), do_ref[...], 1, 0)
        k_acc_ref[...] += dot(for_score.astype(query.dtype), query, 1, 0)

    when_listed(step < count[row], chosen, add)

    @pl.when((step == pl.num_programs(4) - 1) & (head == pl.num_programs(3) - 1))
    def _():
        dk_ref[...] = (k_acc_ref[...] * _LN2).astype(dk_ref.dtype)
        dv_ref[...] = v_acc_ref[...].astype(dv_ref.dtype)


def _tile(
    bounds_ref: Any,
    query: jax.Array,
    k_ref: Any,
    v_ref: Any,
    do_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    first_key: jax.Array,
    masked: bool,
) -> tuple[jax.Array, jax.Array]:
    """(weights, gradient of the scores without its ln 2), both float32 [keys, queries]."""
    score = dot(k_ref[...], query, 1, 1)
    if masked:
        score = jnp.where(visible(bounds_ref, first_key, score.shape), score, HIDDEN)
    weight = jnp.exp2(score - lse_ref[...])
    return weight, weight * (dot(v_ref[...], do_ref[...], 1, 1) - delta_ref[...])

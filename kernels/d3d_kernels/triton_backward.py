"""Training attention on GPU through Triton, backward: one kernel for the queries' gradient, one for keys and values.

With `p` the weights, computed again, `do` the output's gradient and `ds = p * (do . v - delta)`: dq = ds k,
dk = ds' q, dv = p' do, times ln 2 for scores in base 2.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from d3d_kernels.differentiable import TileShape
from d3d_kernels.plan import AttentionPlan, in_phases
from d3d_kernels.scores import HIDDEN, cost, dot, inside, scaled
from d3d_kernels.triton_attention import compiler_params
from d3d_kernels.tuning import TRITON_BACKWARD

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
    operands = (bounds_B4T, q_BNTH, k_BKSH, v_BKSH, for_output_BNTH, lse_BNT, delta_BNT)
    for_q = _for_queries(operands, plan, shape, scale, interpret)
    for_k, for_v = _for_keys(operands, plan, shape, scale, interpret)
    return for_q, for_k, for_v


def _for_queries(operands: tuple, plan: AttentionPlan, shape: TileShape, scale: float, interpret: Any) -> jax.Array:
    _, q, k = operands[:3]
    batch, heads, num_queries, width = q.shape
    group, entries = heads // k.shape[1], plan.by_query.entry.shape[-1]
    phases = in_phases(plan.by_query, entries)
    query_spec = pl.BlockSpec((None, None, shape.queries, width), lambda b, n, i: (b, n, i, 0))
    key_spec = pl.BlockSpec((None, None, k.shape[2], width), lambda b, n, i: (b, n // group, 0, 0))
    row_spec = pl.BlockSpec((None, None, shape.queries), lambda b, n, i: (b, n, i))
    return pl.pallas_call(
        functools.partial(_query_kernel, shape=shape, scale=scale),
        grid=(batch, heads, num_queries // shape.queries),
        in_specs=[
            pl.BlockSpec((None, None, 3), lambda b, n, i: (b, i, 0)),
            pl.BlockSpec((None, None, entries), lambda b, n, i: (b, i, 0)),
            pl.BlockSpec((None, 4, shape.queries), lambda b, n, i: (b, 0, i)),
            query_spec,
            key_spec,
            key_spec,
            query_spec,
            row_spec,
            row_spec,
        ],
        out_specs=query_spec,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=compiler_params(TRITON_BACKWARD),
        cost_estimate=cost(q, k, products=3),
        interpret=interpret,
        name="interval_attention_backward_q",
    )(phases.count, phases.entry, *operands)


def _query_kernel(
    ends_ref, entry_ref, bounds_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, *, shape, scale
):
    query, for_output = scaled(q_ref[...], scale), do_ref[...]
    lse, delta = lse_ref[...][:, None], delta_ref[...][:, None]
    bounds = [bounds_ref[i, :][:, None] for i in range(4)]

    def add(masked: bool, n: jax.Array, for_query: jax.Array) -> jax.Array:
        first = (entry_ref[n] >> 1) * shape.keys
        keys = pl.ds(first, shape.keys)
        key = k_ref[keys, :]
        score = dot(query, key, 1, 1)
        if masked:
            slot = first + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
            score = jnp.where(inside(slot, *bounds), score, HIDDEN)
        for_score = jnp.exp2(score - lse) * (dot(for_output, v_ref[keys, :], 1, 1) - delta)
        return for_query + dot(for_score.astype(key.dtype), key, 1, 0)

    for_query = jnp.zeros(query.shape, jnp.float32)
    for_query = jax.lax.fori_loop(0, ends_ref[0], functools.partial(add, True), for_query)
    for_query = jax.lax.fori_loop(ends_ref[0], ends_ref[1], functools.partial(add, False), for_query)
    dq_ref[...] = (for_query * (_LN2 * scale)).astype(dq_ref.dtype)


def _for_keys(
    operands: tuple, plan: AttentionPlan, shape: TileShape, scale: float, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """One program sums over the queries of all heads that read its key head."""
    _, q, k, v = operands[:4]
    batch, heads, num_queries, width = q.shape
    kv_heads, group, entries = k.shape[1], heads // k.shape[1], plan.by_key.entry.shape[-1]
    phases = in_phases(plan.by_key, entries)
    query_spec = pl.BlockSpec((None, group, num_queries, width), lambda b, h, j: (b, h, 0, 0))
    key_spec = pl.BlockSpec((None, None, shape.keys, width), lambda b, h, j: (b, h, j, 0))
    row_spec = pl.BlockSpec((None, group, num_queries), lambda b, h, j: (b, h, 0))
    for_k, for_v = pl.pallas_call(
        functools.partial(_key_kernel, shape=shape, scale=scale, group=group),
        grid=(batch, kv_heads, k.shape[2] // shape.keys),
        in_specs=[
            pl.BlockSpec((None, None, 3), lambda b, h, j: (b, j, 0)),
            pl.BlockSpec((None, None, entries), lambda b, h, j: (b, j, 0)),
            pl.BlockSpec((None, 4, num_queries), lambda b, h, j: (b, 0, 0)),
            query_spec,
            key_spec,
            key_spec,
            query_spec,
            row_spec,
            row_spec,
        ],
        out_specs=[key_spec, key_spec],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        compiler_params=compiler_params(TRITON_BACKWARD),
        cost_estimate=cost(q, k, products=4),
        interpret=interpret,
        name="interval_attention_backward_kv",
    )(phases.count, phases.entry, *operands)
    return for_k, for_v


def _key_kernel(
    ends_ref,
    entry_ref,
    bounds_ref,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dk_ref,
    dv_ref,
    *,
    shape,
    scale,
    group,
):
    """All query tiles of one key tile; tiles are transposed, [keys, queries], so that no product needs a transpose."""
    key, value = k_ref[...], v_ref[...]
    first_key = pl.program_id(2) * shape.keys

    def add(masked: bool, start: jax.Array | int, length: jax.Array, n: jax.Array, state: tuple) -> tuple:
        for_key, for_value = state
        head = n // length
        rows = pl.ds((entry_ref[start + n - head * length] >> 1) * shape.queries, shape.queries)
        query, for_output = scaled(q_ref[head, rows, :], scale), do_ref[head, rows, :]
        score = dot(key, query, 1, 1)
        if masked:
            slot = first_key + jax.lax.broadcasted_iota(jnp.int32, score.shape, 0)
            score = jnp.where(inside(slot, *(bounds_ref[i, rows][None, :] for i in range(4))), score, HIDDEN)
        weight = jnp.exp2(score - lse_ref[head, rows][None, :])
        for_score = weight * (dot(value, for_output, 1, 1) - delta_ref[head, rows][None, :])
        for_value += dot(weight.astype(for_output.dtype), for_output, 1, 0)
        return for_key + dot(for_score.astype(query.dtype), query, 1, 0), for_value

    state = jnp.zeros(key.shape, jnp.float32), jnp.zeros(key.shape, jnp.float32)
    start = 0
    for phase, masked in enumerate((True, False)):
        length = ends_ref[phase] - start
        state = jax.lax.fori_loop(0, length * group, functools.partial(add, masked, start, length), state)
        start = ends_ref[phase]
    dk_ref[...] = (state[0] * _LN2).astype(dk_ref.dtype)
    dv_ref[...] = state[1].astype(dv_ref.dtype)

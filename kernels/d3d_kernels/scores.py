"""Arithmetic that the kernels of all backends share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

HIDDEN = -1e30  # score of a key that a query may not see
LOWEST = -5e29  # a maximum starts here: exp2(HIDDEN - LOWEST) is 0, also for a query that sees nothing


def scaled(queries: jax.Array, scale: float) -> jax.Array:
    """Queries times `scale`, rounded to their type: the same numbers in the forward and the backward pass."""
    return (queries.astype(jnp.float32) * scale).astype(queries.dtype)


def dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """A product summed over one axis of each, in float32; float32 operands are not rounded for it."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def inside(key: jax.Array, lo1: jax.Array, hi1: jax.Array, lo2: jax.Array, hi2: jax.Array) -> jax.Array:
    """The mask of a tile, from key slots and bounds that broadcast to it."""
    return ((key >= lo1) & (key < hi1)) | ((key >= lo2) & (key < hi2))


def cost(q_BNTH: jax.Array, k_BKSH: jax.Array, products: int, share: float = 0.5) -> pl.CostEstimate:
    """For the scheduler around a kernel. The mask is not known here: `share` of the scores are taken as visible."""
    batch, heads, num_queries, width = q_BNTH.shape
    scores = int(share * batch * heads * num_queries * k_BKSH.shape[2])
    return pl.CostEstimate(
        flops=2 * products * width * scores,
        transcendentals=scores,
        bytes_accessed=2 * q_BNTH.size * q_BNTH.dtype.itemsize + 2 * k_BKSH.size * k_BKSH.dtype.itemsize,
    )

"""The reference and fallback backend: plain jax.numpy, on every device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from d3d_kernels.intervals import Intervals, dense_mask

_NEGATIVE = -1e30  # finite, so that a fully masked row gives 0 and no NaN, forward and backward


def attention(
    q_BNTH: jax.Array, sources: Sequence[tuple[jax.Array, jax.Array]], intervals: Intervals, scale: float
) -> jax.Array:
    """Softmax attention over the keys of all `sources`, addressed one after another.

    The scores of the sources are joined, not their keys: a cache is read where it lies.
    """
    batch, heads, num_queries, width = q_BNTH.shape
    kv_heads = sources[0][0].shape[1]
    q = q_BNTH.reshape(batch, kv_heads, -1, width)  # the heads of a group are rows of one product
    scores = [jnp.einsum("bkth,bksh->bkts", q, k, preferred_element_type=jnp.float32) for k, _ in sources]
    score = scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1)
    num_keys = score.shape[-1]
    score = score.reshape(batch, kv_heads, heads // kv_heads, num_queries, num_keys) * scale
    visible = dense_mask(intervals, num_keys)[:, None, None]
    score = jnp.where(visible, score, _NEGATIVE)
    highest = jax.lax.stop_gradient(score.max(axis=-1, keepdims=True))
    weight = jnp.where(visible, jnp.exp(score - highest), 0.0)
    total = weight.sum(axis=-1, keepdims=True)
    weight = (weight / jnp.where(total == 0, 1.0, total)).reshape(batch, kv_heads, -1, num_keys)
    weight = weight.astype(sources[0][1].dtype)
    output, first = 0.0, 0
    for _, v in sources:
        part = weight[..., first : first + v.shape[2]]
        output += jnp.einsum("bkts,bksh->bkth", part, v, preferred_element_type=jnp.float32)
        first += v.shape[2]
    return jnp.asarray(output).reshape(batch, heads, num_queries, width).astype(q_BNTH.dtype)

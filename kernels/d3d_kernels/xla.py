"""The reference and fallback backend: plain jax.numpy, on every device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from d3d_kernels.intervals import Intervals, dense_mask

LOG2E = math.log2(math.e)
_NEGATIVE = -1e30  # finite, so that a fully masked row gives 0 and no NaN, forward and backward

# Scores that exist at one time. On CPU, chunks that fit a core's share of the cache make a training step's attention
# (8 rows of 608, 4 heads) 1.4 times faster than one array of scores.
SCORES_BYTES = 8 * 2**20
MIN_CHUNK = 64


def attention(
    q_BNTH: jax.Array,
    sources: Sequence[tuple[jax.Array, jax.Array]],
    intervals: Intervals,
    scale: float,
    return_lse: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Softmax attention over the keys of all `sources`, addressed one after another, and its lse if asked for.

    Many queries are taken in chunks whose scores are computed again in the backward pass, so that no [T, S] array is
    kept for it or lies in memory whole.
    """
    num_queries = q_BNTH.shape[2]
    chunk = queries_at_once(q_BNTH.shape, sum(k.shape[2] for k, _ in sources))
    if num_queries <= chunk:
        return _attend(q_BNTH, sources, intervals, scale, return_lse)
    pad = -num_queries % chunk
    queries = jnp.pad(q_BNTH, ((0, 0), (0, 0), (0, pad), (0, 0)))
    bounds = [jnp.pad(bound, ((0, 0), (0, pad))) for bound in intervals]  # rows that see nothing

    @jax.checkpoint
    def body(_: None, part: tuple) -> tuple[None, tuple]:
        return None, _attend(part[0], sources, Intervals(*part[1:]), scale, return_lse)

    parts = (_chunks(queries, 2, chunk), *(_chunks(bound, 1, chunk) for bound in bounds))
    _, (output, lse) = jax.lax.scan(body, None, parts)
    output = jnp.moveaxis(output, 0, 2).reshape(queries.shape)[:, :, :num_queries]
    if lse is not None:
        lse = jnp.moveaxis(lse, 0, 2).reshape(queries.shape[:3])[:, :, :num_queries]
    return output, lse


def queries_at_once(q_shape: tuple[int, ...], num_keys: int) -> int:
    """How many queries of each row share one array of scores."""
    batch, heads, _, _ = q_shape
    return max(MIN_CHUNK, SCORES_BYTES // (4 * batch * heads * num_keys))


def _chunks(x: jax.Array, axis: int, size: int) -> jax.Array:
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _attend(
    q_BNTH: jax.Array,
    sources: Sequence[tuple[jax.Array, jax.Array]],
    intervals: Intervals,
    scale: float,
    return_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """The scores of the sources are joined, not their keys: a cache is read where it lies."""
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
    lse = None
    if return_lse:
        lse = highest * LOG2E + jnp.log2(jnp.where(total == 0, 1.0, total))
        lse = jnp.where(total == 0, -jnp.inf, lse).reshape(batch, heads, num_queries)
    weight = (weight / jnp.where(total == 0, 1.0, total)).reshape(batch, kv_heads, -1, num_keys)
    weight = weight.astype(sources[0][1].dtype)
    output, first = 0.0, 0
    for _, v in sources:
        part = weight[..., first : first + v.shape[2]]
        output += jnp.einsum("bkts,bksh->bkth", part, v, preferred_element_type=jnp.float32)
        first += v.shape[2]
    return jnp.asarray(output).reshape(batch, heads, num_queries, width).astype(q_BNTH.dtype), lse

"""The one mask type: every query row sees two half-open intervals of key slots.

Key `s` is visible to a row when ``lo1 <= s < hi1`` or ``lo2 <= s < hi2``. The bounds are ordinary
traced integers, so a new length or a new block start never compiles anything again. An interval with
``lo >= hi`` is empty; a row that sees nothing attends to nothing (its output is exactly 0).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Intervals(NamedTuple):
    """Bounds of the two visible key intervals, each int32 [B, T]."""

    lo1: jax.Array
    hi1: jax.Array
    lo2: jax.Array
    hi2: jax.Array


def dense_mask(intervals: Intervals, num_keys: int) -> jax.Array:
    """The mask as bool [B, T, S], for S = `num_keys`."""
    key = jnp.arange(num_keys, dtype=jnp.int32)
    lo1, hi1, lo2, hi2 = (bound[..., None] for bound in intervals)
    return ((key >= lo1) & (key < hi1)) | ((key >= lo2) & (key < hi2))


def _intervals(first: tuple, second: tuple | None = None) -> Intervals:
    if second is None:
        second = (jnp.zeros_like(first[1]), jnp.zeros_like(first[1]))
    bounds = jnp.broadcast_arrays(*first, *second)
    return Intervals(*(bound.astype(jnp.int32) for bound in bounds))


def causal_intervals(document_start_BT: jax.Array) -> Intervals:
    """Row i sees `[document_start, i+1)`: plain causal attention inside packed documents.

    A padding row, marked by a start below 0, sees nothing.
    """
    slot = jnp.arange(document_start_BT.shape[1])[None]
    end = jnp.where(document_start_BT < 0, 0, slot + 1)
    return _intervals((jnp.maximum(document_start_BT, 0), end))


def training_intervals(
    document_start_BT: jax.Array, block_start_BK: jax.Array, block_size: int, block_attention: str = "bidirectional"
) -> Intervals:
    """A clean copy of T tokens followed by K masked blocks (docs/algorithm.md 7).

    Args:
        document_start_BT: slot where each clean token's document starts; below 0 on padding.
        block_start_BK: slot, in the clean copy, of the first position of each block; below 0 if unused.
        block_size: G.
        block_attention: `bidirectional` inside a block, or `causal`.

    Returns:
        Intervals for T + K*G query rows over T + K*G keys in the same order. The rows of block k see their
        document's clean tokens before the block's start, and their own block.
    """
    num_clean = document_start_BT.shape[1]
    clean = causal_intervals(document_start_BT)
    used = block_start_BK >= 0
    start = jnp.maximum(block_start_BK, 0)
    document = jnp.take_along_axis(document_start_BT, start, axis=1)
    own = num_clean + jnp.arange(block_start_BK.shape[1])[None] * block_size
    offset = jnp.arange(block_size)
    last = offset + 1 if block_attention == "causal" else jnp.full_like(offset, block_size)

    def rows(value: jax.Array) -> jax.Array:
        return jnp.where(used[..., None], value, 0).reshape(used.shape[0], -1)

    blank = jnp.zeros((*used.shape, block_size), jnp.int32)
    masked = _intervals(
        (rows(document[..., None] + blank), rows(start[..., None] + blank)),
        (rows(own[..., None] + blank), rows(own[..., None] + last)),
    )
    return Intervals(*(jnp.concatenate(pair, axis=1) for pair in zip(clean, masked, strict=True)))


def verify_intervals(length_B: jax.Array, num_tokens: int) -> Intervals:
    """Row i of T new tokens, whose keys are in slots `length..`, sees `[0, length+i+1)`."""
    end = length_B[:, None] + jnp.arange(1, num_tokens + 1)
    return _intervals((jnp.zeros_like(end), end))


def packed_intervals(
    context_BA: jax.Array, block_size: int, num_slots: int, block_attention: str = "bidirectional"
) -> Intervals:
    """Rows of A blocks of G tokens, whose keys are not in the cache but appended after its slots.

    Args:
        context_BA: cached keys that each block sees: block a sees slots `[0, context)`.
        block_size: G.
        num_slots: S, capacity of the cache; appended key j is addressed as slot S + j.
        block_attention: `bidirectional` inside a block, or `causal`.

    Returns:
        Intervals for A*G rows, block by block.
    """
    _, num_blocks = context_BA.shape
    offset = jnp.arange(block_size)
    own = num_slots + jnp.arange(num_blocks)[:, None] * block_size + jnp.zeros_like(offset)
    last = offset + 1 if block_attention == "causal" else jnp.full_like(offset, block_size)
    context = jnp.repeat(context_BA, block_size, axis=1)
    rows = (own.reshape(1, -1), (own + last).reshape(1, -1))
    return _intervals((jnp.zeros_like(context), context), tuple(jnp.broadcast_to(r, context.shape) for r in rows))

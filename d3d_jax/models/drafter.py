"""The standalone block-diffusion drafter (docs/algorithm.md 2 and 3).

A Qwen3 with its own embeddings and head that never sees the target. *Clean* tokens are causal and cached;
their logits predict the next token. The rows of a *block* stand at the positions they predict, see the clean
tokens before the block and the whole block, and leave no trace in the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from d3d_jax.config import AttentionConfig, DrafterConfig, ModelConfig
from d3d_jax.models.attention import AUTO
from d3d_jax.models.cache import KVCache
from d3d_jax.models.qwen3 import Params, cached_forward
from d3d_kernels import Intervals, packed_intervals, verify_intervals


def draft_pass(
    params: Params,
    clean_BT: jax.Array,
    blocks_BAG: jax.Array,
    context_BA: jax.Array,
    cache: KVCache,
    config: ModelConfig,
    drafter: DrafterConfig,
    attention: AttentionConfig = AUTO,
    slot: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """One forward pass over clean tokens and any number of blocks, each with its own context.

    Args:
        clean_BT: tokens written to the cache at each row's length; T may be 0.
        blocks_BAG: A blocks of G tokens: the mask id, or a visible token (an anchor).
        context_BA: how many cached tokens each block sees, which is also the position it starts at.
            It may reach into this pass's clean tokens.
        slot: all of this, with a batch of 1, for this row of a cache of many.

    Returns:
        Hidden states of the clean rows [B, T, D], of the blocks [B, A, G, D], and the cache with the clean
        rows written and its length unchanged.
    """
    batch, num_clean = clean_BT.shape
    _, num_blocks, block = blocks_BAG.shape
    start = cache.lengths(slot)
    tokens = jnp.concatenate([clean_BT, blocks_BAG.reshape(batch, -1)], axis=1)
    clean_positions = start[:, None] + jnp.arange(num_clean)
    block_positions = context_BA[:, :, None] + jnp.arange(block)
    positions = jnp.concatenate([clean_positions, block_positions.reshape(batch, -1)], axis=1)
    clean_rows = verify_intervals(start, num_clean)
    block_rows = packed_intervals(context_BA, block, cache.capacity, drafter.block_attention)
    intervals = Intervals(*(jnp.concatenate(pair, axis=1) for pair in zip(clean_rows, block_rows, strict=True)))
    hidden, cache = cached_forward(params, tokens, positions, intervals, cache, num_clean, config, attention, slot)
    blocks = hidden[:, num_clean:].reshape(batch, num_blocks, block, -1)
    return hidden[:, :num_clean], blocks, cache


def masked_blocks(batch: int, num_blocks: int, drafter: DrafterConfig) -> jax.Array:
    """Blocks of nothing but masks, int32 [B, A, G]."""
    return jnp.full((batch, num_blocks, drafter.block_size), drafter.mask_token_id, jnp.int32)


def anchored_block(anchor_B: jax.Array, drafter: DrafterConfig) -> jax.Array:
    """One block `[anchor, MASK x (G-1)]` a row, int32 [B, 1, G]."""
    return masked_blocks(anchor_B.shape[0], 1, drafter).at[:, 0, 0].set(anchor_B)


def with_mean_mask_row(params: Params, mask_token_id: int) -> Params:
    """Parameters whose untrained mask row is the mean of the rows before it (the tokenizer's own)."""
    table = params["embed_tokens"]
    mean = table[:mask_token_id].astype(jnp.float32).mean(axis=0).astype(table.dtype)
    return {**params, "embed_tokens": table.at[mask_token_id].set(mean)}

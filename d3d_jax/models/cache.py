"""The key/value cache: a value that is passed in, donated, and returned.

Per layer `[B, K, S, H]`, head-major as the kernels read it, and one length per row. Slots at and past a
row's length hold leftovers that no query sees, so rolling back is setting the length.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from d3d_jax.config import ModelConfig


class KVCache(NamedTuple):
    """`k`, `v`: one array [B, K, S, H] per layer; `length`: valid slots of each row, int32 [B]."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: jax.Array

    @property
    def capacity(self) -> int:
        """S, slots of each row."""
        return self.k[0].shape[2]


def empty_cache(config: ModelConfig, batch: int, capacity: int, dtype: jnp.dtype = jnp.float32) -> KVCache:
    """A cache with no valid slot."""
    shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
    layers = range(config.num_hidden_layers)
    return KVCache(
        tuple(jnp.zeros(shape, dtype) for _ in layers),
        tuple(jnp.zeros(shape, dtype) for _ in layers),
        jnp.zeros(batch, jnp.int32),
    )


def write(slots_BKSH: jax.Array, new_BKTH: jax.Array, start_B: jax.Array) -> jax.Array:
    """`slots` with row b's new keys in `start[b]..`.

    XLA clamps a start that would run over the end, and so would overwrite valid slots without a word:
    callers prove the room on the host first (`slots_past_end`).
    """
    new_BKTH = new_BKTH.astype(slots_BKSH.dtype)
    if slots_BKSH.shape[0] == 1:  # an update in place; a batched start becomes a scatter
        return jax.lax.dynamic_update_slice(slots_BKSH, new_BKTH, (0, 0, start_B[0], 0))
    return jax.vmap(lambda slots, new, start: jax.lax.dynamic_update_slice(slots, new, (0, start, 0)))(
        slots_BKSH, new_BKTH, start_B
    )


def slots_past_end(block_size: int) -> int:
    """Slots that decoding may touch after prompt and new tokens.

    The last round may start just before the end and accept a whole block; a round launched before its outcome
    was known then writes one more block where it stopped.
    """
    return 2 * block_size

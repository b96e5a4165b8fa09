"""Attention over parts of the keys, put together.

A log-sum-exp is kept in base 2: `lse = log2(sum(exp(score)))` over the visible keys of a row, -inf where there
is none. Kernels exponentiate in base 2, which is what the hardware does.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def merge_lse(outputs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The attention over all keys, from attentions over disjoint parts of them.

    Args:
        outputs: each [..., T, H], normalised over its own part.
        lses: each float32 [..., T], in base 2; -inf where a row saw no key of the part.

    Returns:
        (output [..., T, H] in the type of the first, lse [..., T]). A row without any key gives exactly 0 and -inf.

    Raises:
        ValueError: if there is not one lse for each output.
    """
    if not outputs or len(outputs) != len(lses):
        raise ValueError(f"merge_lse: expected one lse for each output, got {len(outputs)} and {len(lses)}")
    output, lse = merge_stacked(jnp.stack([part.astype(jnp.float32) for part in outputs]), jnp.stack(list(lses)))
    return output.astype(outputs[0].dtype), lse


def merge_stacked(outputs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `merge_lse`, for float32 parts on axis 0."""
    highest = jax.lax.stop_gradient(lses.max(axis=0))
    anchor = jnp.where(highest == -jnp.inf, 0.0, highest)  # no (-inf) - (-inf)
    weight = jnp.exp2(lses - anchor)
    total = weight.sum(axis=0)
    some = total > 0
    share = weight / jnp.where(some, total, 1.0)
    # a part that gives nothing may hold anything, so it is left out and not multiplied by 0
    output = jnp.where(weight[..., None] > 0, outputs, 0.0) * share[..., None]
    return output.sum(axis=0), jnp.where(some, anchor + jnp.log2(jnp.where(some, total, 1.0)), -jnp.inf)

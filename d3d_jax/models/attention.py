"""Where a layer's keys and values go, and what its queries see: the bridge to `d3d_kernels`.

Each function makes an `Attend` for `models.layers.layer`. A compiler does not split a kernel over devices: under
`jax.set_mesh`, kernels run on each device's own rows and heads. The `xla` backend is left to the compiler.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from d3d_jax.config import AttentionConfig, ModelConfig
from d3d_jax.errors import CompatibilityError
from d3d_jax.models.cache import write
from d3d_jax.models.layers import Attend
from d3d_kernels import Intervals, interval_attention, interval_decode
from d3d_kernels.backends import ATTENTION, DECODE, choose

_ROWS = ("data", "fsdp")  # mesh axes over the batch, as in `devices.sharding`
_HEADS = "tensor"


AUTO = AttentionConfig()


def resolve_attention(
    attention: AttentionConfig, operation: str, config: ModelConfig, dtype: Any, device: jax.Device | None = None
) -> AttentionConfig:
    """With the backend that `auto` means for this model, at this type, on `device` (the default one when None).

    Raises:
        CompatibilityError: none of the backends asked for can do it, with the reason and those that can.
    """
    try:
        chosen = choose(attention.backend, operation, config.head_dim, [dtype], device)
    except ValueError as error:
        raise CompatibilityError(f"attention.backend: {error}") from error
    return replace(attention, backend=chosen)


def attend_within(intervals: Intervals, attention: AttentionConfig = AUTO, keep: bool = False) -> Attend:
    """Queries and keys of the same rows: training, and any pass without a cache. `keep`: keep (k, v)."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        how = _chosen(attention, ATTENTION, q, k, v)
        output = _each_device(partial(interval_attention, **how), q, k, v, intervals)
        return output, (k, v) if keep else None

    return attend


def attend_after(
    k_context_BKSH: jax.Array, v_context_BKSH: jax.Array, intervals: Intervals, attention: AttentionConfig = AUTO
) -> Attend:
    """Queries see the keys of an earlier pass, slots 0..S-1, and those of their own pass, slots S, S+1, ..."""
    within = attend_within(intervals, attention)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        # Joined, not handed over apart as `attend_cached` does: these are many queries, as in training.
        k, v = (jnp.concatenate(pair, axis=2) for pair in ((k_context_BKSH, k), (v_context_BKSH, v)))
        return within(q, k, v)[0], None

    return attend


def attend_cached(
    k_cache_BKSH: jax.Array,
    v_cache_BKSH: jax.Array,
    start_B: jax.Array,
    num_clean: int,
    intervals: Intervals,
    attention: AttentionConfig = AUTO,
    slot: jax.Array | None = None,
) -> Attend:
    """The first `num_clean` rows are written to the cache at `start`; later rows (the masked ones) are
    seen in this pass alone, as slots S, S+1, ... Keeps the new (k_cache, v_cache).

    slot: the queries are of this one row of a cache of many.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k_slots = write(k_cache_BKSH, k[:, :, :num_clean], start_B, slot)
        v_slots = write(v_cache_BKSH, v[:, :, :num_clean], start_B, slot)
        new = (k[:, :, num_clean:], v[:, :, num_clean:]) if num_clean < k.shape[2] else ()
        if slot is not None:
            k_rows, v_rows = (jax.lax.dynamic_slice_in_dim(slots, slot, 1) for slots in (k_slots, v_slots))
        else:
            k_rows, v_rows = (k_slots[None], v_slots[None]) if k_slots.ndim == 3 else (k_slots, v_slots)
        decode = partial(_decode, **_chosen(attention, DECODE, q, k_rows, v_rows, *new))
        return _each_device(decode, q, k_rows, v_rows, intervals, *new), (k_slots, v_slots)

    return attend


def _chosen(attention: AttentionConfig, operation: str, *operands: jax.Array) -> dict[str, Any]:
    """The kernel library's arguments."""
    backend = choose(attention.backend, operation, operands[0].shape[-1], [array.dtype for array in operands])
    return {"backend": backend, "interpret": attention.interpret}


@partial(jax.jit, static_argnames=("backend", "interpret"))  # so that layers alike are traced and lowered once
def _decode(
    q: jax.Array, k: jax.Array, v: jax.Array, intervals: Intervals, *new: jax.Array, backend: str, interpret: Any
) -> jax.Array:
    k_new, v_new = new or (None, None)
    return interval_decode(q, k, v, intervals, k_new_BKTH=k_new, v_new_BKTH=v_new, backend=backend, interpret=interpret)


def _each_device(attend: partial, *operands: Any) -> jax.Array:
    """`attend` on arrays [B, heads, ...] and intervals [B, T], split over the mesh in use if it is a kernel's."""
    mesh = jax.sharding.get_abstract_mesh()
    if attend.keywords["backend"] == "xla" or mesh.empty or mesh.size == 1:
        return attend(*operands)
    heads, rows = PartitionSpec(_ROWS, _HEADS), PartitionSpec(_ROWS)
    specs = tuple(rows if isinstance(operand, Intervals) else heads for operand in operands)
    # which values differ between devices is not tracked through kernels, so it cannot be checked
    return jax.shard_map(attend, in_specs=specs, out_specs=heads, check_vma=False)(*operands)

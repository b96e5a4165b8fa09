"""Where a layer's keys and values go, and what its queries see: the bridge to `d3d_kernels`.

Each function makes an `Attend` for `models.layers.layer`.
"""

from __future__ import annotations

import jax

from d3d_jax.models.cache import write
from d3d_jax.models.layers import Attend
from d3d_kernels import Intervals, interval_attention, interval_decode


def attend_within(intervals: Intervals, backend: str = "auto") -> Attend:
    """Queries and keys of the same rows: training, and any pass without a cache."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        return interval_attention(q, k, v, intervals, backend=backend), None

    return attend


def attend_cached(
    k_cache_BKSH: jax.Array,
    v_cache_BKSH: jax.Array,
    start_B: jax.Array,
    num_clean: int,
    intervals: Intervals,
    backend: str = "auto",
    slot: jax.Array | None = None,
) -> Attend:
    """The first `num_clean` rows are written to the cache at `start`; later rows (the masked ones) are
    seen in this pass alone, as slots S, S+1, ... Keeps the new (k_cache, v_cache).

    slot: the queries are of this one row of a cache of many.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k_slots = write(k_cache_BKSH, k[:, :, :num_clean], start_B, slot)
        v_slots = write(v_cache_BKSH, v[:, :, :num_clean], start_B, slot)
        k_new, v_new = (k[:, :, num_clean:], v[:, :, num_clean:]) if num_clean < k.shape[2] else (None, None)
        if slot is not None:
            k_rows, v_rows = (jax.lax.dynamic_slice_in_dim(slots, slot, 1) for slots in (k_slots, v_slots))
        else:
            k_rows, v_rows = (k_slots[None], v_slots[None]) if k_slots.ndim == 3 else (k_slots, v_slots)
        output = interval_decode(q, k_rows, v_rows, intervals, k_new_BKTH=k_new, v_new_BKTH=v_new, backend=backend)
        return output, (k_slots, v_slots)

    return attend

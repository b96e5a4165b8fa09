"""Names that JAX changed between the versions that this package runs on (0.10.2 to 0.12)."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

_SINCE_0_11 = jax.__version_info__ >= (0, 11)


def transposed(ref: Any) -> Any:
    """A view of a [rows, columns] reference in shared memory as [columns, rows]."""
    return ref.transpose((1, 0)) if _SINCE_0_11 else plgpu.transpose_ref(ref, (1, 0))


def load_row(ref: Any, row: int, layout: Any) -> jax.Array:
    """One row of a reference in shared memory, in `layout`; not vectorised."""
    where: Any = (ref.at[row],) if _SINCE_0_11 else (ref, (row,))
    return plgpu.load(*where, layout=layout, optimized=False)

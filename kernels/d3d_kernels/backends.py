"""Which backend computes an attention: what each can take, and what `auto` means on a device.

`auto` looks at the device alone, then at what its kernels can take. It never ends at another kind of
implementation because the shapes are awkward: that is an error, which names the limit and the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BACKENDS = ("xla", "mosaic_gpu", "triton", "mosaic_tpu")
ATTENTION, DECODE = "interval_attention", "interval_decode"

_BF16, _F16, _F32 = "bfloat16", "float16", "float32"


class Limit(NamedTuple):
    """What the kernels of a backend take. Empty `dtypes` or `head_dims`: anything."""

    operations: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()


LIMITS = {
    "xla": Limit((ATTENTION, DECODE)),
    "triton": Limit((ATTENTION, DECODE), (_BF16, _F16, _F32), (16, 32, 64, 128)),
    "mosaic_tpu": Limit((ATTENTION, DECODE), (_BF16, _F32), (64, 128, 256)),
    # wgmma multiplies 16-bit numbers, and its tiles of 128-byte rows hold 64 of them
    "mosaic_gpu": Limit((DECODE,), (_BF16, _F16), (64, 128)),
}

# What `auto` tries on a platform, in this order. Kernels of Mosaic GPU need Hopper: see `_preferred`.
_AUTO = {"cpu": ("xla",), "tpu": ("mosaic_tpu",), "gpu": ("mosaic_gpu", "triton")}
_HOPPER = 9.0


def fault(backend: str, operation: str, head_dim: int, dtypes: Sequence[jax.typing.DTypeLike]) -> str | None:
    """Why `backend` cannot compute `operation` on these operands, or None if it can."""
    limit = LIMITS[backend]
    names = sorted({jnp.dtype(dtype).name for dtype in dtypes})
    if operation not in limit.operations:
        return f"it has no {operation}"
    if limit.dtypes and (len(names) > 1 or names[0] not in limit.dtypes):
        return f"it takes q, k and v of one type of {', '.join(limit.dtypes)}, not {', '.join(names)}"
    if limit.head_dims and head_dim not in limit.head_dims:
        return f"it takes a head dim H of {', '.join(map(str, limit.head_dims))}, not {head_dim}"
    return None


def choose(
    backend: str,
    operation: str,
    head_dim: int,
    dtypes: Sequence[jax.typing.DTypeLike],
    device: jax.Device | None = None,
) -> str:
    """The backend to use.

    Args:
        backend: one of `BACKENDS`, which is used or refused, never replaced; or `auto`, the first backend of
            the device's platform that takes the operands.
        operation: `ATTENTION` or `DECODE`.
        head_dim: H.
        dtypes: types of q, k and v.
        device: where it will run; the default device when None.

    Raises:
        ValueError: no such backend, or none of those asked for takes the operands. The message names the
            limit and the backends that do.
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"attention backend {backend!r} is not there; available: auto, {', '.join(BACKENDS)}")
    asked = _preferred(device) if backend == "auto" else (backend,)
    faults = {name: fault(name, operation, head_dim, dtypes) for name in BACKENDS}
    for name in asked:
        if faults[name] is None:
            return name
    reasons = "; ".join(f"{name}: {faults[name]}" for name in asked)
    able = ", ".join(name for name in BACKENDS if faults[name] is None)
    raise ValueError(
        f"{operation}: backend {backend!r} cannot take these operands ({reasons}); backends that can: {able}"
    )


def _preferred(device: Any = None) -> tuple[str, ...]:
    """Backends of a device, or else of that on which arrays lie by default, best first."""
    if device is None:
        device = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
    platform = device if isinstance(device, str) else device.platform
    names = _AUTO.get({"cuda": "gpu", "rocm": "gpu"}.get(platform, platform))
    if names is None:
        raise ValueError(f"attention backend 'auto' knows no kernels for platform {platform!r}; name one: xla")
    capability = getattr(device, "compute_capability", None)
    if platform in ("gpu", "cuda") and (capability is None or float(capability) != _HOPPER):
        return tuple(name for name in names if name != "mosaic_gpu")
    return names

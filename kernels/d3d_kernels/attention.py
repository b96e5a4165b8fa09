"""The two attentions of the project, and their checks.

`interval_attention` is for training: keys and queries come from the same row. `interval_decode` is for
verification and the packed pass: few queries against a long cache, plus keys that are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax

from d3d_kernels import xla
from d3d_kernels.backends import ATTENTION, DECODE, choose
from d3d_kernels.intervals import Intervals
from d3d_kernels.plan import AttentionPlan


def interval_attention(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    intervals: Intervals,
    *,
    plan: AttentionPlan | None = None,
    scale: float | None = None,
    backend: str = "auto",
    interpret: Any = False,
    return_lse: bool = False,
) -> Any:
    """Grouped-query attention under a two-interval mask. Differentiable, also through its lse.

    Args:
        q_BNTH: queries [B, N, T, H]; query head n reads key head n // (N/K).
        k_BKSH, v_BKSH: keys and values [B, K, S, H].
        intervals: visible key slots of every query row, int32 [B, T].
        plan: the tiles to work on, from `attention_plan` for the same shapes and backend; made here when None.
            Layers that share their intervals share a plan. `xla` has no use for it.
        scale: multiplies the scores; H**-0.5 when None.
        backend: one of `BACKENDS`, or `auto`: that of the default device. Used or refused, never replaced.
        interpret: runs a kernel backend on the CPU, slowly and with the same arithmetic: True, or the
            interpreter's parameters. The device is then not looked at.
        return_lse: whether to return the log-sum-exp too.

    Returns:
        [B, N, T, H] in the queries' type, accumulated in float32. A row that sees no key gives exactly 0,
        and finite gradients. With `return_lse` also float32 [B, N, T]: base 2, -inf for a row without keys.

    Raises:
        ValueError: shapes that do not fit, or a backend that is not there or cannot take the operands.
    """
    chosen = _choose(ATTENTION, [q_BNTH, k_BKSH, v_BKSH], backend, interpret)
    _check(q_BNTH, k_BKSH, v_BKSH, intervals)
    scale = _scale(q_BNTH, scale)
    if chosen == "xla":
        output, lse = xla.attention(q_BNTH, [(k_BKSH, v_BKSH)], intervals, scale, return_lse)
    else:
        from d3d_kernels.differentiable import attention  # Pallas takes half a second to import

        output, lse = attention(q_BNTH, k_BKSH, v_BKSH, intervals, plan, scale, chosen, interpret)
    return (output, lse) if return_lse else output


def interval_decode(
    q_BNTH: jax.Array,
    k_cache_BKSH: jax.Array,
    v_cache_BKSH: jax.Array,
    intervals: Intervals,
    *,
    k_new_BKTH: jax.Array | None = None,
    v_new_BKTH: jax.Array | None = None,
    scale: float | None = None,
    num_splits: int | Literal["auto"] = "auto",
    backend: str = "auto",
    interpret: Any = False,
    return_lse: bool = False,
) -> Any:
    """As `interval_attention`, over a cache and, optionally, keys that are not in it.

    Key j of `k_new` is addressed by the intervals as slot S + j. The cache is never copied. Only `xla` can be
    differentiated.

    Args:
        num_splits: into how many parts, worked on at the same time, a kernel cuts the keys; `auto` fills the
            device. `xla` has no use for it.
    """
    if (k_new_BKTH is None) != (v_new_BKTH is None):
        raise ValueError("interval_decode: k_new and v_new come together; got only one of them")
    sources = [(k_cache_BKSH, v_cache_BKSH)]
    if k_new_BKTH is not None and v_new_BKTH is not None:
        sources.append((k_new_BKTH, v_new_BKTH))
    chosen = _choose(DECODE, [q_BNTH, *(array for source in sources for array in source)], backend, interpret)
    _check(q_BNTH, k_cache_BKSH, v_cache_BKSH, intervals)
    for new in sources[1:]:
        _check_new(*new, k_cache_BKSH)
    if num_splits != "auto" and num_splits < 1:
        raise ValueError(f"interval_decode: num_splits is 'auto' or at least 1, not {num_splits}")
    scale = _scale(q_BNTH, scale)
    if chosen == "xla":
        output, lse = xla.attention(q_BNTH, sources, intervals, scale, return_lse)
    else:
        from d3d_kernels.split_decode import decode

        output, lse = decode(q_BNTH, sources, intervals, scale, num_splits, chosen, interpret)
    return (output, lse) if return_lse else output


def attention_plan(
    q_BNTH: jax.Array, k_BKSH: jax.Array, intervals: Intervals, *, backend: str = "auto"
) -> AttentionPlan | None:
    """The tiles that `interval_attention` works on, for arrays (or shapes) like these; None where none are used."""
    chosen = choose(backend, ATTENTION, q_BNTH.shape[-1], [q_BNTH.dtype, k_BKSH.dtype])
    if chosen == "xla":
        return None
    from d3d_kernels.differentiable import make_plan

    return make_plan(intervals, q_BNTH.shape[2], k_BKSH.shape[2], chosen)


def _scale(q_BNTH: jax.Array, scale: float | None) -> float:
    return q_BNTH.shape[-1] ** -0.5 if scale is None else scale


def _choose(operation: str, operands: Sequence[jax.Array], backend: str, interpret: Any) -> str:
    chosen = choose(backend, operation, operands[0].shape[-1], [array.dtype for array in operands])
    if interpret and chosen == "xla":
        raise ValueError(
            f"{operation}: interpret is for kernels, and backend {backend!r} means xla here; name a kernel backend"
        )
    return chosen


def _check(q: jax.Array, k: jax.Array, v: jax.Array, intervals: Intervals) -> None:
    batch, heads, num_queries, width = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != width or heads % k.shape[1]:
        raise ValueError(
            f"attention shapes do not fit: q {q.shape} [B,N,T,H], k {k.shape} and v {v.shape} [B,K,S,H]; "
            "expected equal B and H, and N a multiple of K"
        )
    for bound in intervals:
        if bound.shape != (batch, num_queries):
            raise ValueError(f"interval bounds have shape {bound.shape}; expected [B, T] = {(batch, num_queries)}")


def _check_new(k_new: jax.Array, v_new: jax.Array, k_cache: jax.Array) -> None:
    batch, kv_heads, _, width = k_cache.shape
    if k_new.shape != v_new.shape or k_new.shape[:2] != (batch, kv_heads) or k_new.shape[3] != width:
        raise ValueError(
            f"attention shapes do not fit: k_new {k_new.shape} and v_new {v_new.shape} beside a cache of "
            f"{k_cache.shape} [B,K,S,H]; expected equal B, K and H"
        )

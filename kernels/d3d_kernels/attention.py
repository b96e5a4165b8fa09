"""The two attentions of the project, and the choice of their backend.

`interval_attention` is for training: keys and queries come from the same row. `interval_decode` is for
verification and the packed pass: few queries against a long cache, plus keys that are not in it.
"""

from __future__ import annotations

import jax

from d3d_kernels import xla
from d3d_kernels.intervals import Intervals

BACKENDS = ("xla",)


def interval_attention(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    intervals: Intervals,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> jax.Array:
    """Grouped-query attention under a two-interval mask.

    Args:
        q_BNTH: queries [B, N, T, H]; query head n reads key head n // (N/K).
        k_BKSH, v_BKSH: keys and values [B, K, S, H].
        intervals: visible key slots of every query row.
        scale: multiplies the scores; H**-0.5 when None.
        backend: one of `BACKENDS`, or `auto`.

    Returns:
        [B, N, T, H] in the queries' type, accumulated in float32. A row that sees no key gives exactly 0,
        and finite gradients.

    Raises:
        ValueError: shapes that do not fit, or a backend that is not there.
    """
    _check(q_BNTH, k_BKSH, v_BKSH, intervals, backend)
    return xla.attention(q_BNTH, [(k_BKSH, v_BKSH)], intervals, _scale(q_BNTH, scale))


def interval_decode(
    q_BNTH: jax.Array,
    k_cache_BKSH: jax.Array,
    v_cache_BKSH: jax.Array,
    intervals: Intervals,
    *,
    k_new_BKTH: jax.Array | None = None,
    v_new_BKTH: jax.Array | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> jax.Array:
    """As `interval_attention`, over a cache and, optionally, keys that are not in it.

    Key j of `k_new` is addressed by the intervals as slot S + j. The cache is never copied.
    """
    _check(q_BNTH, k_cache_BKSH, v_cache_BKSH, intervals, backend)
    sources = [(k_cache_BKSH, v_cache_BKSH)]
    if (k_new_BKTH is None) != (v_new_BKTH is None):
        raise ValueError("interval_decode: k_new and v_new come together; got only one of them")
    if k_new_BKTH is not None and v_new_BKTH is not None:
        sources.append((k_new_BKTH, v_new_BKTH))
    return xla.attention(q_BNTH, sources, intervals, _scale(q_BNTH, scale))


def _scale(q_BNTH: jax.Array, scale: float | None) -> float:
    return q_BNTH.shape[-1] ** -0.5 if scale is None else scale


def _check(q: jax.Array, k: jax.Array, v: jax.Array, intervals: Intervals, backend: str) -> None:
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"attention backend {backend!r} is not there; available: auto, {', '.join(BACKENDS)}")
    batch, heads, num_queries, width = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != width or heads % k.shape[1]:
        raise ValueError(
            f"attention shapes do not fit: q {q.shape} [B,N,T,H], k {k.shape} and v {v.shape} [B,K,S,H]; "
            "expected equal B and H, and N a multiple of K"
        )
    for bound in intervals:
        if bound.shape != (batch, num_queries):
            raise ValueError(f"interval bounds have shape {bound.shape}; expected [B, T] = {(batch, num_queries)}")

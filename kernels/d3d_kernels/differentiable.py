"""`interval_attention` on a kernel backend: padding, tile plan, and the rule that JAX differentiates by.

The kernels see whole tiles, and scores in base 2: `p = exp2(s - lse)` with `s = (scale * log2(e) * q) . k`. They scale
the queries themselves, rounded to the queries' type and the same way in every pass: scaling the scores would cost more,
and scaled queries in memory would be one more array of the queries' size.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from d3d_kernels.intervals import Intervals
from d3d_kernels.plan import AttentionPlan, key_tiles, query_tiles, within
from d3d_kernels.tuning import ATTENTION_TILES, tile_for

LOG2E = math.log2(math.e)


class TileShape(NamedTuple):
    """Queries and keys of one tile."""

    queries: int
    keys: int


class Settings(NamedTuple):
    """What a compiled kernel depends on beside shapes and types."""

    backend: str
    forward: TileShape
    backward: TileShape
    scale: float  # of the scores in base 2
    interpret: Any


def attention(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    intervals: Intervals,
    plan: AttentionPlan | None,
    scale: float,
    backend: str,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """(output, lse) of `interval_attention`, computed by a kernel `backend`."""
    num_queries, num_keys = q_BNTH.shape[2], k_BKSH.shape[2]
    forward, backward, padded_queries, padded_keys = _tiles(num_queries, num_keys, backend)
    settings = Settings(backend, forward, backward, scale * LOG2E, interpret)
    made = make_plan(intervals, num_queries, num_keys, backend) if plan is None else plan
    _check_plan(made, settings, padded_queries, padded_keys)
    q, k, v = _pad(q_BNTH, padded_queries), _pad(k_BKSH, padded_keys), _pad(v_BKSH, padded_keys)
    bounds = jnp.stack(_padded(intervals, num_keys, padded_queries), axis=1)
    result: Any = _attend(settings, q, k, v, bounds, made)
    output, lse = result
    return output[:, :, :num_queries], lse[:, :, :num_queries]


def make_plan(intervals: Intervals, num_queries: int, num_keys: int, backend: str) -> AttentionPlan:
    """The tiles of all three kernels for these intervals."""
    forward, backward, padded_queries, padded_keys = _tiles(num_queries, num_keys, backend)
    padded = _padded(intervals, num_keys, padded_queries)
    return AttentionPlan(
        key_tiles(padded, [(padded_keys, forward.keys)], forward.queries),
        key_tiles(padded, [(padded_keys, backward.keys)], backward.queries),
        query_tiles(padded, padded_keys, backward.queries, backward.keys),
    )


def _tiles(num_queries: int, num_keys: int, backend: str) -> tuple[TileShape, TileShape, int, int]:
    """Tile shapes, forward and backward, for rows of these lengths; and the lengths rounded up to whole tiles."""
    table = ATTENTION_TILES[backend]

    def fitted(shape: tuple[int, int]) -> TileShape:
        return TileShape(tile_for(num_queries, shape[0], table.least), tile_for(num_keys, shape[1], table.least))

    forward, backward = fitted(table.forward), fitted(table.backward)
    queries = math.lcm(forward.queries, backward.queries)
    keys = math.lcm(forward.keys, backward.keys)
    return forward, backward, -(-num_queries // queries) * queries, -(-num_keys // keys) * keys


def _pad(array: jax.Array, size: int) -> jax.Array:
    return jnp.pad(array, ((0, 0), (0, 0), (0, size - array.shape[2]), (0, 0)))


def _padded(intervals: Intervals, num_keys: int, size: int) -> Intervals:
    """Bounds within the keys there are. Queries of padding repeat the last one, so they hide no full tile."""
    pad = size - intervals.lo1.shape[1]
    return Intervals(*(jnp.pad(bound, ((0, 0), (0, pad)), mode="edge") for bound in within(intervals, num_keys)))


def _check_plan(plan: AttentionPlan, settings: Settings, num_queries: int, num_keys: int) -> None:
    queries, keys = num_queries // settings.backward.queries, num_keys // settings.backward.keys
    expected = (
        (num_queries // settings.forward.queries, num_keys // settings.forward.keys),
        (queries, keys),
        (keys, queries),
    )
    found = tuple(tuple(tiles.entry.shape[1:]) for tiles in plan)
    if found != expected:
        raise ValueError(
            f"interval_attention: the plan's lists cover {found} tiles, but these shapes and backend "
            f"{settings.backend!r} have {expected}; make the plan by attention_plan from the same arrays and backend"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    settings: Settings, q: jax.Array, k: jax.Array, v: jax.Array, bounds: jax.Array, plan: AttentionPlan
) -> tuple[jax.Array, jax.Array]:
    return _forward(settings, q, k, v, bounds, plan)[0]


def _forward(
    settings: Settings, q: jax.Array, k: jax.Array, v: jax.Array, bounds: jax.Array, plan: AttentionPlan
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    kernels = importlib.import_module(f"d3d_kernels.{settings.backend}_attention")
    output, lse = kernels.forward(q, k, v, bounds, plan.forward, settings.forward, settings.scale, settings.interpret)
    seen = ((bounds[:, 0] < bounds[:, 1]) | (bounds[:, 2] < bounds[:, 3]))[:, None]
    return (output, jnp.where(seen, lse, -jnp.inf)), (q, k, v, bounds, plan, output, jnp.where(seen, lse, 0.0))


def _backward(settings: Settings, kept: tuple, gradients: tuple[jax.Array, jax.Array]) -> tuple:
    """With `s` the scores in base 2, dL/ds = ln 2 * p * (do . v - delta); the lse's gradient goes into delta."""
    q, k, v, bounds, plan, output, lse = kept
    for_output, for_lse = gradients
    delta = jnp.sum(output.astype(jnp.float32) * for_output.astype(jnp.float32), axis=-1) - for_lse * LOG2E
    kernels = importlib.import_module(f"d3d_kernels.{settings.backend}_backward")
    for_q, for_k, for_v = kernels.backward(
        q, k, v, bounds, plan, for_output, lse, delta, settings.backward, settings.scale, settings.interpret
    )
    return for_q, for_k, for_v, None, None


_attend.defvjp(_forward, _backward)

"""Every kernel, interpreted, against the float32 reference at random ragged shapes: values, lse and gradients."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_kernels import (
    Intervals,
    attention_plan,
    interval_attention,
    interval_decode,
    packed_intervals,
    verify_intervals,
)
from d3d_kernels.backends import ATTENTION, DECODE, LIMITS

TRAINING = [name for name in ("mosaic_tpu", "triton") if ATTENTION in LIMITS[name].operations]
DECODING = [name for name in ("mosaic_tpu", "triton") if DECODE in LIMITS[name].operations]


class Case(NamedTuple):
    batch: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    width: int
    dtype: str = "float32"


CASES = [
    Case(2, 2, 2, 150, 150, 64),
    pytest.param(Case(1, 1, 8, 40, 300, 128), marks=pytest.mark.slow),
    pytest.param(Case(3, 2, 1, 257, 129, 64, "bfloat16"), marks=pytest.mark.slow),
]
DECODE_CASES = [
    Case(2, 2, 4, 9, 300, 64),
    Case(1, 1, 8, 20, 1030, 128, "bfloat16"),
    Case(4, 2, 1, 5, 33, 64),
]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def arrays(case: Case, seed: int = 0) -> list[jax.Array]:
    """q, k, v and a gradient of the output."""
    rng = np.random.default_rng(seed)
    heads = case.kv_heads * case.group
    shapes = [(heads, case.queries), (case.kv_heads, case.keys), (case.kv_heads, case.keys), (heads, case.queries)]
    return [jnp.asarray(rng.normal(size=(case.batch, *shape, case.width)), case.dtype) for shape in shapes]


def random_intervals(case: Case, num_keys: int, seed: int = 0) -> Intervals:
    """Neighbours that see much the same, some that see nothing, some past the end; and a first part that sees all."""
    rng = np.random.default_rng(seed)
    bounds = np.sort(rng.integers(-3, num_keys + 4, (4, case.batch, case.queries)), axis=2)
    bounds[0, :, : case.queries // 2], bounds[1, :, : case.queries // 2] = 0, num_keys
    bounds[:, :, -3::2] = 1
    bounds[:, 0, 1] = 2
    return Intervals(*jnp.asarray(bounds, jnp.int32))


def exact(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32)


def close(found: jax.Array, expected: jax.Array, tolerance: float) -> None:
    """Absolute, in units of the largest expected number."""
    expected = np.asarray(exact(expected))
    np.testing.assert_allclose(exact(found), expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", TRAINING)
def test_training_attention_its_lse_and_gradients_are_those_of_the_reference(backend, case):
    q, k, v, gradient = arrays(case)
    intervals = random_intervals(case, case.keys)
    for_lse = jnp.asarray(np.random.default_rng(9).normal(size=q.shape[:3]), jnp.float32)

    def both(attend, q, k, v, gradient):
        def visible(q, k, v):
            output, lse = attend(q, k, v, intervals, return_lse=True)
            return output, jnp.where(jnp.isfinite(lse), lse, 0.0)

        value, back = jax.vjp(visible, q, k, v)
        return *value, *back((gradient, for_lse))

    kernel = functools.partial(interval_attention, backend=backend, interpret=True)
    found = jax.jit(functools.partial(both, kernel))(q, k, v, gradient)
    expected = jax.jit(functools.partial(both, interval_attention))(*map(exact, (q, k, v, gradient)))
    assert found[0].dtype == q.dtype and found[1].dtype == jnp.float32
    for a, b in zip(found, expected, strict=True):
        close(a, b, TOLERANCE[case.dtype])
    assert not np.asarray(exact(found[0]))[0, :, 1].any() and not np.asarray(exact(found[2]))[0, :, 1].any()


@pytest.mark.parametrize(("case", "num_splits"), [*zip(DECODE_CASES, (1, 3, 2), strict=True)], ids=str)
@pytest.mark.parametrize("backend", DECODING)
def test_decoding_over_cache_and_new_keys_is_that_of_the_reference(backend, case, num_splits):
    q, k, v, _ = arrays(case)
    new_k, new_v = (2 * array[:, :, :21] for array in (k, v))
    intervals = random_intervals(case, case.keys + 21)

    def decode(q, k, v, new_k, new_v, **chosen):
        return interval_decode(q, k, v, intervals, k_new_BKTH=new_k, v_new_BKTH=new_v, return_lse=True, **chosen)

    kernel = functools.partial(decode, backend=backend, interpret=True, num_splits=num_splits)
    output, lse = jax.jit(kernel)(q, k, v, new_k, new_v)
    expected, expected_lse = jax.jit(decode)(*map(exact, (q, k, v, new_k, new_v)))
    assert output.dtype == q.dtype
    close(output, expected, TOLERANCE[case.dtype])
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-3 if case.dtype == "float32" else 2e-2)
    assert not np.asarray(exact(output))[0, :, 1].any()


@pytest.mark.parametrize("backend", DECODING)
def test_verify_and_packed_pass_at_ragged_lengths(backend):
    block, capacity = 4, 200
    length = jnp.asarray([0, 131])
    clean = verify_intervals(length, block)
    blocks = packed_intervals(length[:, None] + jnp.arange(block) + 1, block, capacity)
    intervals = Intervals(*(jnp.concatenate(pair, axis=1) for pair in zip(clean, blocks, strict=True)))
    q, k, v, _ = arrays(Case(2, 2, 2, block + block * block, capacity, 64))
    new = {"k_new_BKTH": k[:, :, 50:66], "v_new_BKTH": v[:, :, 50:66]}
    kernel = jax.jit(functools.partial(interval_decode, backend=backend, interpret=True))
    expected = jax.jit(interval_decode)(q, k, v, intervals, **new)
    close(kernel(q, k, v, intervals, **new), expected, 2e-5)
    close(kernel(q[:, :, :block], k, v, clean), expected[:, :, :block], 2e-5)


@pytest.mark.parametrize("backend", DECODING)
def test_what_lies_in_unseen_slots_changes_no_bit(backend):
    case = Case(1, 1, 2, 4, 90, 64)
    q, k, v, _ = arrays(case)
    intervals = verify_intervals(jnp.asarray([20]), 4)
    decode = jax.jit(functools.partial(interval_decode, backend=backend, interpret=True))
    expected = decode(q, k, v, intervals)
    k, v = k.at[:, :, 24:].set(1e4), v.at[:, :, 24:].set(-1e4)
    assert np.array_equal(decode(q, k, v, intervals), expected)


@pytest.mark.parametrize("backend", TRAINING)
def test_a_plan_made_once_serves_layers_under_scan_and_remat(backend):
    q, k, v, _ = arrays(Case(1, 1, 2, 130, 130, 64))
    intervals = random_intervals(Case(1, 1, 2, 130, 130, 64), 130)

    def loss(q, plan, **chosen):
        @jax.checkpoint
        def layer(x, _):
            return x + interval_attention(x, k, v, intervals, plan=plan, **chosen), None

        return (jax.lax.scan(layer, q, None, length=2)[0] ** 2).sum()

    plan = attention_plan(q, k, intervals, backend=backend)
    found = jax.jit(jax.grad(functools.partial(loss, backend=backend, interpret=True)))(q, plan)
    close(found, jax.jit(jax.grad(loss))(q, None), 2e-5)

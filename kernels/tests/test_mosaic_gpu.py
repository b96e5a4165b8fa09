"""The Hopper kernel in the GPU interpreter: barriers and arithmetic, not the speed or the races of the hardware."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from d3d_kernels import Intervals, interval_decode, packed_intervals, verify_intervals

interpreter = getattr(plgpu, "InterpretGPUParams", None)
interpreted = pytest.mark.skipif(interpreter is None, reason="the GPU interpreter needs JAX 0.11.2 or newer")

BLOCK, CAPACITY, WIDTH = 4, 300, 64  # the last key tile of the cache reaches over its end


def arrays(*shapes: tuple[int, int]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, *shape, WIDTH)), jnp.bfloat16) for shape in shapes]


@functools.cache
def kernel(num_splits: int):
    return jax.jit(
        functools.partial(
            interval_decode, backend="mosaic_gpu", interpret=interpreter(), num_splits=num_splits, return_lse=True
        )
    )


def compare(found, expected) -> None:
    for a, b, tolerance in zip(found, expected, (2e-2, 2e-2), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=0, atol=tolerance)


@interpreted
def test_verification_split_in_two_with_a_row_that_sees_nothing():
    q, k, v = arrays((4, BLOCK), (2, CAPACITY), (2, CAPACITY))
    intervals = verify_intervals(jnp.asarray([0, 296]), BLOCK)
    intervals = intervals._replace(hi1=intervals.hi1.at[0, 0].set(0))
    expected = interval_decode(q, k, v, intervals, return_lse=True)
    output, lse = kernel(2)(q, k, v, intervals)
    compare((output, lse), expected)
    assert not np.asarray(output.astype(jnp.float32))[0, :, 0].any() and (np.asarray(lse)[0, :, 0] == -np.inf).all()


@interpreted
def test_the_packed_pass_with_keys_that_are_not_in_the_cache():
    q, k, v, new_k, new_v = arrays((2, 20), (1, CAPACITY), (1, CAPACITY), (1, 16), (1, 16))
    length = jnp.asarray([5, 290])
    clean = verify_intervals(length, BLOCK)
    blocks = packed_intervals(length[:, None] + jnp.arange(BLOCK) + 1, BLOCK, CAPACITY)
    intervals = Intervals(*(jnp.concatenate(pair, axis=1) for pair in zip(clean, blocks, strict=True)))
    new = {"k_new_BKTH": new_k, "v_new_BKTH": new_v}
    compare(kernel(1)(q, k, v, intervals, **new), interval_decode(q, k, v, intervals, **new, return_lse=True))


def test_it_traces_on_every_jax_at_the_shapes_of_qwen3_8b():
    def shape(*dims: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    q, cache, new = shape(1, 32, 272, 128), shape(1, 8, 32768, 128), shape(1, 8, 256, 128)
    intervals = Intervals(*[shape(1, 272, dtype=jnp.int32)] * 4)

    def decode(q, k, v, intervals, new_k, new_v):
        return interval_decode(q, k, v, intervals, k_new_BKTH=new_k, v_new_BKTH=new_v, backend="mosaic_gpu")

    found = jax.jit(decode).trace(q, cache, cache, intervals, new, new).out_info
    assert (found.shape, found.dtype) == (q.shape, q.dtype)

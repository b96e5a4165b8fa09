"""The TPU kernels in the TPU interpreter: grids as long as the data says, DMAs, and memory that begins as NaN."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from d3d_kernels import Intervals, interval_attention, interval_decode, packed_intervals, verify_intervals
from d3d_kernels.intervals import training_intervals

INTERPRETED = {"backend": "mosaic_tpu", "interpret": pltpu.InterpretParams(uninitialized_memory="nan")}
WIDTH = 64


def arrays(*shapes: tuple[int, int]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, *shape, WIDTH)), jnp.float32) for shape in shapes]


def close(found: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


def test_a_packed_pass_over_a_ragged_cache():
    """The last key tile reaches over the end of the cache, and one sequence is empty."""
    block, capacity, length = 4, 1100, jnp.asarray([0, 1050])
    clean = verify_intervals(length, block)
    blocks = packed_intervals(length[:, None] + jnp.arange(block) + 1, block, capacity)
    intervals = Intervals(*(jnp.concatenate(pair, axis=1) for pair in zip(clean, blocks, strict=True)))
    q, k, v, new_k, new_v = arrays((4, 20), (2, capacity), (2, capacity), (2, 16), (2, 16))
    decode = functools.partial(interval_decode, k_new_BKTH=new_k, v_new_BKTH=new_v)
    found = jax.jit(functools.partial(decode, **INTERPRETED))(q, k, v, intervals)
    close(found, decode(q, k, v, intervals))


@pytest.mark.slow
def test_training_over_documents_and_blocks_with_gradients():
    clean, block = 180, 6
    start = jnp.where(jnp.arange(clean) < 70, 0, 70)[None].repeat(2, 0)
    intervals = training_intervals(start, jnp.asarray([[5, 90, 130], [60, -1, 171]]), block)
    rows = intervals.lo1.shape[1]
    operands = arrays((2, rows), (1, rows), (1, rows))

    def loss(q, k, v, **chosen):
        return (interval_attention(q, k, v, intervals, **chosen) ** 2).sum()

    found = jax.jit(jax.grad(functools.partial(loss, **INTERPRETED), (0, 1, 2)))(*operands)
    for a, b in zip(found, jax.grad(loss, (0, 1, 2))(*operands), strict=True):
        close(a, b)

"""The real GPU compilers on the kernels at the shapes they are for, for an H200. Compiled for, not run on hardware."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from d3d_kernels import Intervals, ahead_of_time, interval_attention, interval_decode

pytestmark = [pytest.mark.aot, pytest.mark.timeout(600)]

KV_HEADS, WIDTH, CACHE = 8, 128, 32768
HEADS = {"8B": 32, "32B": 64}


def shape(*dims: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def bounds(batch: int, rows: int) -> Intervals:
    return Intervals(*[shape(batch, rows, dtype=jnp.int32)] * 4)


def decode_with(backend: str, **chosen):
    def decode(q, k, v, intervals, *new):
        new_k, new_v = new or (None, None)
        return interval_decode(q, k, v, intervals, k_new_BKTH=new_k, v_new_BKTH=new_v, backend=backend, **chosen)

    return decode


def train(q, k, v, gradient, intervals):
    def attend(q, k, v):
        return interval_attention(q, k, v, intervals, backend="triton")

    return jax.vjp(attend, q, k, v)[1](gradient)


def verify_shapes(heads: int) -> tuple:
    cache = shape(4, KV_HEADS, CACHE, WIDTH)
    return shape(4, heads, 16, WIDTH), cache, cache, bounds(4, 16)


def packed_shapes(heads: int) -> tuple:
    cache, new = shape(1, KV_HEADS, CACHE, WIDTH), shape(1, KV_HEADS, 256, WIDTH)
    return shape(1, heads, 272, WIDTH), cache, cache, bounds(1, 272), new, new


@pytest.mark.parametrize("shapes", [verify_shapes, packed_shapes])
@pytest.mark.parametrize("model", HEADS)
def test_hopper_decoding_multiplies_by_wgmma_loads_by_tma_and_spills_nothing(mesh_of, dump, model, shapes):
    mesh = mesh_of("h200")
    compiled = ahead_of_time.compile_for(mesh, decode_with("mosaic_gpu"), *shapes(HEADS[model]))
    assert compiled.memory_analysis().temp_size_in_bytes < 100e6  # partial results, never a cache
    (kernel,) = ahead_of_time.gpu_resources(dump)
    assert kernel.spill_bytes == 0 and kernel.registers <= 240
    assert kernel.wgmma > 0 and kernel.tma_loads > 0


@pytest.mark.parametrize("model", HEADS)
def test_triton_kernels_compile_and_keep_little(mesh_of, model):
    mesh, heads = mesh_of("h200"), HEADS[model]
    for shapes in (verify_shapes, packed_shapes):
        compiled = ahead_of_time.compile_for(mesh, decode_with("triton"), *shapes(heads))
        assert compiled.memory_analysis().temp_size_in_bytes < 100e6
    q, k = shape(2, heads, 8192, WIDTH), shape(2, KV_HEADS, 8192, WIDTH)
    compiled = ahead_of_time.compile_for(mesh, train, q, k, k, q, bounds(2, 8192))
    assert compiled.memory_analysis().temp_size_in_bytes < 150e6


@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_small_and_ragged_shapes_compile(mesh_of, backend):
    """The embedded pair's head dim, a cache that is no whole number of tiles, few new keys, and several splits."""
    cache, new = shape(2, 2, 1032, 64), shape(2, 2, 17, 64)
    decode = decode_with(backend, num_splits=3)
    ahead_of_time.compile_for(mesh_of("h200"), decode, shape(2, 4, 20, 64), cache, cache, bounds(2, 20), new, new)

"""The real GPU compilers on the kernels at the shapes they are for, for an H200. Compiled for, not run on hardware."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from d3d_kernels import Intervals, ahead_of_time, interval_attention, interval_decode
from d3d_kernels.tuning import ATTENTION_TILES, AttentionTiles

pytestmark = [pytest.mark.aot, pytest.mark.timeout(600)]

KV_HEADS, WIDTH, CACHE = 8, 128, 32768
HEADS = {"8B": 32, "32B": 64}
MODELS = ["8B", pytest.param("32B", marks=pytest.mark.slow)]


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


def training_shapes(heads: int) -> tuple:
    q, k = shape(2, heads, 8192, WIDTH), shape(2, KV_HEADS, 8192, WIDTH)
    return q, k, k, q, bounds(2, 8192)


@pytest.mark.parametrize("shapes", [verify_shapes, packed_shapes])
@pytest.mark.parametrize("model", MODELS)
def test_hopper_decoding_multiplies_by_wgmma_loads_by_tma_and_spills_nothing(mesh_of, dump, model, shapes):
    mesh = mesh_of("h200")
    compiled = ahead_of_time.compile_for(mesh, decode_with("mosaic_gpu"), *shapes(HEADS[model]))
    assert compiled.memory_analysis().temp_size_in_bytes < 100e6  # partial results, never a cache
    (kernel,) = ahead_of_time.gpu_resources(dump)
    assert kernel.spill_bytes == 0 and kernel.registers <= 240
    assert kernel.wgmma > 0 and kernel.tma_loads > 0


@pytest.mark.parametrize("model", MODELS)
def test_triton_kernels_compile_spill_nothing_and_keep_little(mesh_of, model):
    mesh, heads = mesh_of("h200"), HEADS[model]
    for shapes in (verify_shapes, packed_shapes):
        compiled = ahead_of_time.compile_for(mesh, decode_with("triton"), *shapes(heads), refuse_spills=True)
        assert compiled.memory_analysis().temp_size_in_bytes < 100e6
    compiled = ahead_of_time.compile_for(mesh, train, *training_shapes(heads), refuse_spills=True)
    assert compiled.memory_analysis().temp_size_in_bytes < 150e6


@pytest.mark.slow
def test_a_tile_that_is_too_large_for_the_registers_is_refused(mesh_of, monkeypatch):
    monkeypatch.setitem(ATTENTION_TILES, "triton", AttentionTiles((256, 128), (128, 128), 16))
    with pytest.raises(ahead_of_time.Spills):
        ahead_of_time.compile_for(mesh_of("h200"), train, *training_shapes(32), refuse_spills=True)


@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_small_and_ragged_shapes_compile(mesh_of, backend):
    """The embedded pair's head dim, a cache that is no whole number of tiles, few new keys, and several splits."""
    cache, new = shape(2, 2, 1032, 64), shape(2, 2, 17, 64)
    decode = decode_with(backend, num_splits=3)
    ahead_of_time.compile_for(mesh_of("h200"), decode, shape(2, 4, 20, 64), cache, cache, bounds(2, 20), new, new)

"""The real TPU compiler on the kernels at the shapes they are for. Compiled for, not run on hardware."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from d3d_kernels import (
    Intervals,
    ahead_of_time,
    interval_attention,
    interval_decode,
    mosaic_tpu_attention,
    mosaic_tpu_backward,
    mosaic_tpu_decode,
)

pytestmark = [pytest.mark.aot, pytest.mark.timeout(600)]

KV_HEADS, WIDTH, CACHE = 8, 128, 32768
HEADS = {"8B": 32, "32B": 64}
MODELS = ["8B", pytest.param("32B", marks=pytest.mark.slow)]
DEVICES = ["v5e", pytest.param("v6e", marks=pytest.mark.slow)]


def shape(*dims: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def bounds(batch: int, rows: int) -> Intervals:
    return Intervals(*[shape(batch, rows, dtype=jnp.int32)] * 4)


def train(q, k, v, gradient, intervals):
    def attend(q, k, v):
        return interval_attention(q, k, v, intervals, backend="mosaic_tpu")

    return jax.vjp(attend, q, k, v)[1](gradient)


def decode(q, k, v, intervals, *new):
    new_k, new_v = new or (None, None)
    return interval_decode(q, k, v, intervals, k_new_BKTH=new_k, v_new_BKTH=new_v, backend="mosaic_tpu")


def training_shapes(heads: int, rows: int = 8192, batch: int = 2) -> tuple:
    q, k = shape(batch, heads, rows, WIDTH), shape(batch, KV_HEADS, rows, WIDTH)
    return q, k, k, q, bounds(batch, rows)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", DEVICES)
def test_training_attention_compiles_and_keeps_little(mesh_of, device, model):
    compiled = ahead_of_time.compile_for(mesh_of(device), train, *training_shapes(HEADS[model]))
    kept = compiled.memory_analysis().temp_size_in_bytes
    assert kept < 150e6 * HEADS[model] / 32  # the output, and numbers per row


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", DEVICES)
def test_verification_and_packed_pass_compile_and_copy_no_cache(mesh_of, device, model):
    heads, mesh = HEADS[model], mesh_of(device)
    cache, rows = shape(4, KV_HEADS, CACHE, WIDTH), 16
    verify = ahead_of_time.compile_for(mesh, decode, shape(4, heads, rows, WIDTH), cache, cache, bounds(4, rows))
    cache, new, rows = shape(1, KV_HEADS, CACHE, WIDTH), shape(1, KV_HEADS, 256, WIDTH), 272
    packed = ahead_of_time.compile_for(
        mesh, decode, shape(1, heads, rows, WIDTH), cache, cache, bounds(1, rows), new, new
    )
    for compiled in (verify, packed):
        assert compiled.memory_analysis().temp_size_in_bytes < 4e6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_small_and_ragged_shapes_compile(mesh_of, dtype):
    """The embedded pair's head dim, lengths that are no whole tile, and several splits."""
    mesh, q, k = mesh_of("v5e"), shape(2, 4, 200, 64, dtype=dtype), shape(2, 2, 200, 64, dtype=dtype)
    ahead_of_time.compile_for(mesh, train, q, k, k, q, bounds(2, 200))
    q, new = shape(2, 4, 20, 64, dtype=dtype), shape(2, 2, 17, 64, dtype=dtype)
    cache = shape(2, 2, 1032, 64, dtype=dtype)
    ahead_of_time.compile_for(mesh, decode, q, cache, cache, bounds(2, 20), new, new)


@pytest.fixture
def path_bundles(mesh_of, dump, monkeypatch):
    """Bundles that one way through a tile takes: those of the kernel with this way alone, less those without any."""

    def measure(masked: bool, kernel: str, function, *shapes) -> int:
        found = []
        for way in (lambda listed, add: pl.when(listed)(lambda: add(masked)), lambda listed, add: None):
            for module in (mosaic_tpu_attention, mosaic_tpu_backward, mosaic_tpu_decode):
                monkeypatch.setattr(module, "when_listed", lambda listed, chosen, add, way=way: way(listed, add))
            jax.clear_caches()
            ahead_of_time.compile_for(mesh_of("v5e"), function, *shapes)
            found.append(ahead_of_time.tpu_bundles(dump, kernel)[len(found)])
        jax.clear_caches()
        return found[0] - found[1]

    return measure


def test_a_full_training_tile_takes_at_most_1400_bundles(path_bundles):
    def forward(q, k, v, gradient, intervals):
        return interval_attention(q, k, v, intervals, backend="mosaic_tpu")

    assert path_bundles(False, "attention_forward", forward, *training_shapes(32)) <= 1400


def test_a_decode_tile_of_64_rows_and_1024_keys_stays_below_the_time_its_keys_take_to_arrive(path_bundles):
    cache = shape(4, KV_HEADS, CACHE, WIDTH)
    shapes = (shape(4, 32, 16, WIDTH), cache, cache, bounds(4, 16))
    assert path_bundles(True, "interval_decode", decode, *shapes) <= 989

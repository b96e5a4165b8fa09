"""Attention and the decoding form under a mesh: each device works on its own rows and heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from d3d_jax.config import AttentionConfig, MeshConfig, ModelConfig, RopeConfig
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.devices.sharding import tree_shardings
from d3d_jax.models.attention import AUTO, attend_within
from d3d_jax.models.cache import empty_cache
from d3d_jax.models.qwen3 import append, decoding_table, for_decoding, init_params
from d3d_kernels import causal_intervals
from d3d_kernels.compiled_text import collectives, parse


def test_a_kernel_and_its_gradients_are_the_same_on_a_mesh_as_on_one_device():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, heads, 20, 64)).astype(np.float32) for heads in (4, 2, 2))
    start = np.zeros((2, 20), np.int32)

    def loss(q, k, v, attention=AUTO):
        output, _ = attend_within(causal_intervals(jnp.asarray(start)), attention)(q, k, v)
        return (output**2).sum()

    expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
    placed = jax.device_put((q, k, v), NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor")))
    with jax.set_mesh(mesh):
        interpreted = AttentionConfig("triton", interpret=True)
        found = jax.jit(jax.value_and_grad(lambda *args: loss(*args, interpreted), (0, 1, 2)))(*placed)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    assert found[1][0].sharding.spec[1] == "tensor"


def test_the_decoding_form_on_a_mesh_gives_the_same_hidden_states_and_caches():
    """Whole pairs and triples of a layer's joined matrices lie on each device, and a part of the embedding's rows."""
    config = ModelConfig(24, 32, 48, 2, 4, 2, 16, RopeConfig(1e4))
    params, cache = for_decoding(init_params(config)), empty_cache(config, 2, 40)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (2, 5)))
    run = jax.jit(lambda params, tokens, cache: append(params, tokens, cache, config))
    expected = run(params, tokens, cache)
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=2), jax.devices()[:2])
    placed = jax.device_put(params, tree_shardings(mesh, decoding_table(config)))
    with jax.set_mesh(mesh):
        found = run(placed, tokens, cache)
        text = run.lower(placed, tokens[:1, :1], jax.tree.map(lambda x: x[:1], cache)).compile().as_text()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    exchanged = collectives(parse(text))
    assert exchanged == {"all-reduce": 2 * config.num_hidden_layers + 1}

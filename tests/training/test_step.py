"""The training step: frozen parameters, an average of the weights, and how much memory it takes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from d3d_jax.checkpoints.training_run import read_run
from d3d_jax.config import (
    AttentionConfig,
    BlockConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RopeConfig,
    TrainConfig,
)
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.devices.sharding import BATCH, on_mesh, replicated, tree_shardings
from d3d_jax.errors import CompatibilityError
from d3d_jax.models.qwen3 import init_params, parameter_table
from d3d_jax.training import loss as losses
from d3d_jax.training.loop import train
from d3d_jax.training.plan import plan_run
from d3d_jax.training.state import fresh_params, joined, split
from d3d_jax.training.step import make_gradient
from tests.training.toy import MODEL, assert_equal, saved

ONE = MeshConfig(1, 1, 1)


def begin(run: TrainConfig) -> Any:
    return fresh_params(MODEL, run.seed, make_mesh(ONE, jax.devices()[:1]))


# ---- frozen parameters


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_parameters_stay_and_the_optimiser_keeps_nothing_for_them(config, short_corpus, name):
    frozen = ("embed_tokens", "lm_head", "layers.q_proj")
    run = config(train_data=str(short_corpus), objective="ar", frozen=frozen, steps=2, optimizer=OptimizerConfig(name))
    train(run, jax.devices()[:1])
    state = saved(run, 1)
    trained, fixed = split(state.params, frozen)
    before, kept = split(begin(run), frozen)
    assert_equal(fixed, kept)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(trained), strict=True):
        assert not np.array_equal(old, new)
    assert_equal(joined(trained, fixed), state.params)
    moments = [moment for _, moment in optax.tree_utils.tree_get_all_with_path(state.opt_state, "mu")]
    assert sum(len(jax.tree.leaves(moment)) for moment in moments) == len(jax.tree.leaves(trained)) == 11


# ---- an average of the weights


def test_an_average_follows_the_weights_and_is_what_is_exported(config, short_corpus):
    run = config(
        train_data=str(short_corpus), objective="ar", steps=3, save_every=1, keep_last=3, ema_decay=0.2, micro_batches=2
    )
    train(run, jax.devices()[:1])
    expected = begin(run)
    for step in (1, 2, 3):
        state = saved(run, 1, step)
        decay = min(0.2, step / (step + 9))
        expected = jax.tree.map(lambda old, new, d=decay: d * old + (1 - d) * new, expected, state.params)
        for found, wanted in zip(jax.tree.leaves(state.average), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    assert state.best() is state.average
    assert_equal(read_run(run.output_dir).params, state.average)


# ---- memory of the loss

VOCABULARY, TOKENS, BLOCK = 151_936, 4096, 4


def compiled(name: str, rows: int, mesh: MeshConfig) -> Any:
    """The gradient's program for Qwen3's vocabulary and 4,096 tokens, in so many rows, that is never run."""
    model = ModelConfig(VOCABULARY, 8, 8, 1, 2, 2, 8, RopeConfig(1e6), tie_word_embeddings=True)
    run = {"train_data": "", "output_dir": "", "steps": 1, "batch_size": rows, "mask_token_id": 7, "dtype": "bfloat16"}
    config = TrainConfig(name, **run, loss=LossConfig(gamma=3.0), blocks=BlockConfig(BLOCK))  # pyright: ignore
    length = TOKENS // rows
    places = length // 2 // BLOCK  # half of the tokens are masked ones
    clean = length - places * BLOCK if name == "d3d" else length
    integers = jax.ShapeDtypeStruct((rows, clean), jnp.int32)
    batch = dict.fromkeys(("tokens", "document", "start", "position"), integers)
    batch["response"] = jax.ShapeDtypeStruct((rows, clean), jnp.bool_)
    blocks = ("block_start", "block_visible", "block_length")
    batch |= dict.fromkeys(blocks, jax.ShapeDtypeStruct((rows, places), jnp.int32))
    devices = make_mesh(mesh, jax.devices()[: mesh.data * mesh.fsdp * mesh.tensor])
    where, gradient = tree_shardings(devices, parameter_table(model)), make_gradient(config, model)

    def on_devices(params: Any, batch: Any) -> Any:
        with on_mesh(devices):
            return gradient(params, batch)

    place = {"in_shardings": (where, NamedSharding(devices, BATCH)), "out_shardings": (where, replicated(devices))}
    return jax.jit(on_devices, **place).lower(jax.eval_shape(lambda: init_params(model)), batch).compile()


@pytest.mark.parametrize(("name", "rows"), [("ar", 8), ("d3d", 2)])
def test_the_loss_of_4096_tokens_and_the_whole_vocabulary_takes_under_400_mb(name, rows, monkeypatch):
    """[tokens, vocabulary] in float32 is 2.5 GB. Temporaries of the whole program, the model's few included."""
    assert compiled(name, rows, ONE).memory_analysis().temp_size_in_bytes < 400e6
    if name == "ar":
        monkeypatch.setattr(losses, "LOGITS_BYTES", 1e12)
        monkeypatch.setattr(losses.jax, "checkpoint", lambda body: body)
        whole = compiled(name, rows, ONE).memory_analysis().temp_size_in_bytes
        assert whole > 4 * TOKENS * VOCABULARY, "the measurement sees the array when it is there"


def test_on_a_mesh_each_device_has_its_rows_logits_over_its_part_of_the_vocabulary(monkeypatch):
    monkeypatch.setattr(losses, "LOGITS_BYTES", 40e6)  # two chunks, so that the head could be gathered twice
    program = compiled("ar", 8, MeshConfig(data=2, fsdp=2, tensor=2))
    text = program.as_text()
    moved = re.findall(r"= (\S+?)\{\S* (?:all-gather|all-reduce|reduce-scatter|all-to-all)", text)
    assert moved and not [
        shape for shape in moved if re.fullmatch(rf"\w+\[\d+,\d+,({VOCABULARY}|{VOCABULARY // 2})\]", shape)
    ]
    assert f"{VOCABULARY}]" not in text and f"[{VOCABULARY}," not in text, "a device holds all of the vocabulary"


# ---- the kernels inside the model


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "mosaic_tpu"])
def test_interpreted_kernels_give_the_gradients_of_the_reference(config, short_corpus, backend):
    """Through scan and remat, on a mesh that splits rows and heads."""
    model = dataclasses.replace(MODEL, head_dim=64)  # kernels of Mosaic TPU have no heads of 16
    fixed = {"train_data": str(short_corpus), "model": model, "remat": True, "batch_size": 2}
    mesh = make_mesh(MeshConfig(1, 2, 2), jax.devices()[:4])
    found = []
    for attention in (AttentionConfig("xla"), AttentionConfig(backend, interpret=True)):
        run = config(**fixed, attention=attention)
        batch = jax.device_put(plan_run(run).train.at(0), NamedSharding(mesh, BATCH))
        gradient = make_gradient(run, model)

        def on_the_mesh(params, batch, gradient=gradient):
            with on_mesh(mesh):
                return gradient(params, batch)

        found.append(jax.jit(on_the_mesh)(fresh_params(model, 0, mesh), batch))
    for expected, kernel in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(kernel, expected, rtol=1e-4, atol=1e-6)


def test_a_backend_that_cannot_train_is_refused_before_the_first_step(config, short_corpus):
    run = config(train_data=str(short_corpus), attention=AttentionConfig("mosaic_gpu"))
    with pytest.raises(CompatibilityError, match=r"attention.backend: interval_attention: .*mosaic_gpu.*can: xla"):
        train(run, jax.devices()[:1])

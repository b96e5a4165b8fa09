"""Whole runs on a toy corpus: they learn, say what they do, start where they should, and refuse."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from d3d_jax.checkpoints.convert import load_params
from d3d_jax.checkpoints.export import save_params
from d3d_jax.config import (
    DrafterConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
)
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.errors import ConfigError, DataError, DeviceError, TrainingError
from d3d_jax.models.qwen3 import Qwen3, init_params, parameter_count
from d3d_jax.training import loop
from d3d_jax.training.checkpointing import Checkpoints
from d3d_jax.training.loop import train
from d3d_jax.training.optimizer import make_optimizer
from d3d_jax.training.plan import plan_run
from d3d_jax.training.state import (
    StatePlan,
    TrainState,
    abstract_state,
    fresh_params,
    new_state,
    places_of,
    state_shardings,
)
from tests.training.toy import MASK, MODEL, VOCAB, assert_equal, records

# ---- learning, and what is told


def test_the_loss_falls_on_the_copy_task(config, corpus):
    run = config(steps=60, batch_size=16, save_every=60, log_every=10, validation_data=str(corpus), validate_every=30)
    last = train(run, jax.devices()[:1])
    told = records(run)
    training = [record["loss"] for record in told if "loss" in record]
    validation = [record["validation_loss"] for record in told if "validation_loss" in record]
    assert len(validation) == 2 and last["loss"] == validation[-1] < validation[0] < training[0]
    assert training[-1] < 0.6 * training[0]
    assert last["accuracy_3"] > 0.9  # the end of the response, which stands at the same place


def test_every_step_that_is_told_has_its_loss_parts_and_the_last_step_is_told(whole):
    run, last = whole
    told = records(run)
    assert [record["step"] for record in told] == [2, 4, 6]
    for record in told:
        assert record["loss"] == pytest.approx(record["block_loss"] + record["ar_loss"])
    assert {"loss", "block_loss", "ar_loss", "grad_norm", "ar_accuracy", "accuracy_0", "accuracy_3"} <= set(last)
    assert told[-1]["loss"] == last["loss"]


def test_a_state_gone_astray_is_not_saved(config, monkeypatch):
    nothing = np.float32(np.nan)
    metrics = dict.fromkeys(("block_loss_sum", "ar_loss_sum", "ar_correct", "grad_norm"), nothing)
    metrics |= dict.fromkeys(("block_loss_count", "ar_loss_count", "ar_count"), np.float32(1))
    monkeypatch.setattr(loop, "make_train_step", lambda *args: lambda state, batch: (state, metrics))
    run = config(log_every=100)
    with pytest.raises(TrainingError, match=r"at step 3 the loss is nan.*lower the learning rate"):
        train(run, jax.devices()[:2])
    with Checkpoints(Path(run.output_dir) / "checkpoints", 2) as checkpoints:
        assert checkpoints.latest() is None


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_gradient_of_zeros_moves_no_parameter(name):
    """What a batch without a response gives; Muon divides by the norm of its momentum."""
    params = init_params(MODEL)
    optimizer = make_optimizer(OptimizerConfig(name), 10)
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_what_the_optimizer_keeps_of_a_parameter_lies_where_the_parameter_does(name):
    """Here q_proj and o_proj have one shape and lie across each other."""
    square, optimizer = dataclasses.replace(MODEL, head_dim=8), make_optimizer(OptimizerConfig(name), 10)

    def build():
        params = init_params(square)
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    mesh = make_mesh(MeshConfig(1, 2, 2), jax.devices()[:4])
    places = state_shardings(jax.eval_shape(build), square, mesh)
    kept = optax.tree_utils.tree_get_all_with_path(places.opt_state, "mu")
    layers = [moment["layers"] for _, moment in kept if isinstance(moment["layers"]["o_proj"], NamedSharding)]
    assert len(layers) == 1 and layers[0]["q_proj"].spec != layers[0]["o_proj"].spec
    for weight in ("q_proj", "o_proj", "down_proj"):
        assert layers[0][weight] == places.params["layers"][weight]


# ---- starting fresh


def test_fresh_parameters_are_made_where_they_lie_and_are_the_same_on_every_mesh():
    one = fresh_params(MODEL, 5, make_mesh(MeshConfig(), jax.devices()[:1]))
    mesh = make_mesh(MeshConfig(1, 2, 4), jax.devices())
    assert_equal(fresh_params(MODEL, 5, mesh), one)
    assert not np.array_equal(fresh_params(MODEL, 6, mesh)["embed_tokens"], one["embed_tokens"])
    plan = StatePlan(MODEL, make_optimizer(OptimizerConfig(), 10), averaged=True)
    layout = abstract_state(plan, mesh)
    params = fresh_params(MODEL, 5, mesh)
    held = params["layers"]["down_proj"].addressable_shards[3].data.unsafe_buffer_pointer()
    state = new_state(params, plan, places_of(layout))
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), layout
    )
    kept = state.params["layers"]["down_proj"].addressable_shards[3].data.unsafe_buffer_pointer()
    assert kept == held, "the parameters were copied"


def test_no_device_makes_more_than_its_part_of_the_fresh_parameters():
    wide = dataclasses.replace(MODEL, vocab_size=8192)
    mesh = make_mesh(MeshConfig(1, 2, 4), jax.devices())
    plan = StatePlan(wide, make_optimizer(OptimizerConfig(), 10))
    places = places_of(abstract_state(plan, mesh)).params
    memory = jax.jit(lambda: init_params(wide, 0), out_shardings=places).lower().compile().memory_analysis()
    whole = 4 * parameter_count(wide)
    assert memory.output_size_in_bytes < whole / 7 and memory.temp_size_in_bytes < whole / 4


# ---- starting from a folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    params = Qwen3(MODEL, rngs=nnx.Rngs(3), scale=0.1).params()
    path = tmp_path_factory.mktemp("init") / "model"
    save_params(path, params, MODEL, eos_ids=(3, 2), extras={"pad_token_id": 0})
    return path


def test_a_folder_is_read_straight_into_the_mesh_and_its_mask_row_is_the_mean(config, folder):
    plan = plan_run(config(model=None, init=str(folder), init_layers=(1,)))
    assert plan.model.num_hidden_layers == 1
    params = loop._initial(plan, make_mesh(MeshConfig(1, 2, 2), jax.devices()[:4]))
    plain = load_params(folder, dtype="float32")
    for name, weight in params["layers"].items():
        assert np.array_equal(weight, plain["layers"][name][1:])
    assert params["layers"]["down_proj"].sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert params["lm_head"].addressable_shards[0].data.shape == (VOCAB // 2, 32 // 2)
    rows = np.asarray(plain["embed_tokens"])
    np.testing.assert_allclose(params["embed_tokens"][MASK], rows[:MASK].mean(axis=0), atol=1e-6)


def test_a_drafter_that_is_trained_on_keeps_its_own_mask_row(config, folder, tmp_path):
    plain = load_params(folder, dtype="float32")
    save_params(tmp_path / "drafter", plain, MODEL, drafter=DrafterConfig(4, MASK), eos_ids=(3,))
    plan = plan_run(config(model=None, init=str(tmp_path / "drafter")))
    params = loop._initial(plan, make_mesh(MeshConfig(), jax.devices()[:1]))
    assert np.array_equal(params["embed_tokens"], plain["embed_tokens"])


# ---- refused before any work


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model": None}, ConfigError, "exactly one of `model` .* and `init`"),
        ({"init": "FOLDER"}, ConfigError, "exactly one of `model` .* and `init`"),
        ({"mask_token_id": None}, ConfigError, "objective 'd3d' needs mask_token_id"),
        ({"mask_token_id": VOCAB}, ConfigError, "mask_token_id=24 has no row in an embedding of 24 rows"),
        ({"model": None, "init": "FOLDER", "mask_token_id": 2}, ConfigError, "mask_token_id=2 is also an end-of-sequ"),
        ({"model": None, "init": "FOLDER", "mask_token_id": 0}, ConfigError, "mask_token_id=0 is also a padding id"),
        ({"init_layers": (0,)}, ConfigError, r"init_layers=\(0,\) must pick layers 0..1 of init"),
        ({"model": None, "init": "FOLDER", "init_layers": (0, 2)}, ConfigError, r"init_layers=\(0, 2\) must pick"),
        ({"model": None, "init": "FOLDER", "init_layers": ()}, ConfigError, r"init_layers=\(\) must pick"),
        ({"loss": LossConfig()}, ConfigError, "loss.gamma has no default for block_size=4"),
        ({"train_data": "nowhere.jsonl"}, DataError, "nowhere.jsonl: no such file"),
        ({"train_data": ()}, ConfigError, r"data \[\]: expected at least one file or folder"),
        ({"validation_data": ("a", "a")}, ConfigError, r"data \['a', 'a'\]: .* each named once"),
        ({"validation_data": "nowhere.jsonl"}, DataError, "nowhere.jsonl: no such file"),
        ({"model": dataclasses.replace(MODEL, vocab_size=18), "mask_token_id": 17}, DataError, "token id 19, but the"),
        ({"batch_size": 400}, DataError, "batch_size 400; expected a batch to fit"),
        ({"batch_size": 3}, ConfigError, "batch_size=3 does not divide by the 2 parts of the mesh"),
        ({"micro_batches": 4}, ConfigError, "parts of the mesh .*, times micro_batches=4; use a multiple of 8"),
        ({"frozen": ("layers.q_prj",)}, ConfigError, "'layers.q_prj' is no parameter .*did you mean 'layers.q_proj'"),
        ({"frozen": ("layers", "embed_tokens", "norm", "lm_head")}, ConfigError, "leaves no parameter to train"),
        ({"mesh": MeshConfig(data=3)}, DeviceError, "needs 3 devices, but there are 2"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_any_work(config, folder, tmp_path, monkeypatch, changes, error, said):
    changes = {name: str(folder) if value == "FOLDER" else value for name, value in changes.items()}
    monkeypatch.setattr(loop, "new_state", None)
    with pytest.raises(error, match=said):
        train(config(output_dir=str(tmp_path / "output"), **changes), jax.devices()[:2])
    assert not (tmp_path / "output").exists()

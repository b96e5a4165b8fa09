"""Whole runs on a toy corpus: they learn, stop on a signal, go on bit by bit as if never stopped, and refuse."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

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
    BlockConfig,
    DrafterConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RopeConfig,
    TrainConfig,
)
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.errors import ConfigError, DataError, DeviceError, TrainingError
from d3d_jax.models.qwen3 import Qwen3, init_params
from d3d_jax.training import loop
from d3d_jax.training.checkpointing import Checkpoints
from d3d_jax.training.loop import plan_run, train
from d3d_jax.training.optimizer import make_optimizer
from d3d_jax.training.step import TrainState, new_state, state_shardings

VOCAB, MASK = 24, 20
MODEL = ModelConfig(VOCAB, 32, 48, 2, 4, 2, 16, RopeConfig(1e4))
BLOCKS = BlockConfig(block_size=4, blocks_per_row=6)
STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy task: `1 x x x 2`, and the response is `x x x 3`."""
    path, rng = tmp_path_factory.mktemp("corpus") / "copy.jsonl", np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(80):
            word = rng.integers(4, MASK, 3).tolist()
            file.write(json.dumps({"id": str(number), "ids": [1, *word, 2, *word, 3], "prompt_length": 5}) + "\n")
    return path


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory):
    """A short drafter run; every call has an output folder of its own unless told otherwise."""

    def make(**changes: Any) -> TrainConfig:
        fixed: dict[str, Any] = dict(
            objective="d3d", train_data=str(corpus), steps=STEPS, batch_size=4, row_length=27, model=MODEL,
            mask_token_id=MASK, save_every=3, log_every=2, blocks=BLOCKS, loss=LossConfig(gamma=4.0, chunk=16),
            optimizer=OptimizerConfig(learning_rate=1e-2),
        )  # fmt: skip
        changes.setdefault("output_dir", str(tmp_path_factory.mktemp("run") / "output"))
        return TrainConfig(**{**fixed, **changes})

    return make


def saved(run: TrainConfig, devices: int = 2, step: int | None = None) -> TrainState:
    """A saved state, the newest one if no step is given, laid out on a mesh of so many devices."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    empty = new_state(init_params(MODEL), make_optimizer(run.optimizer, run.steps), MODEL, mesh)
    with Checkpoints(Path(run.output_dir) / "checkpoints", 9) as checkpoints:
        return checkpoints.restore(empty, step)


def assert_equal(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.array_equal(a, b)


def records(run: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run.output_dir) / "metrics.jsonl").read_text().splitlines()]


def signal_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal in the given call of a function of the loop."""
    real, calls = getattr(loop, name), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, name, counting)


@pytest.fixture(scope="module")
def whole(config) -> tuple[TrainConfig, dict[str, float]]:
    """A run on two devices that nothing disturbs."""
    run = config()
    return run, train(run, jax.devices()[:2])


# ---- stopping and going on


def test_a_run_that_was_stopped_and_resumed_is_bit_equal_to_one_that_was_not(config, whole, monkeypatch, capsys):
    run = config()
    signal_at(monkeypatch, "_place", 3)
    train(run, jax.devices()[:2])
    assert "stopped by a signal; step 3 is saved" in capsys.readouterr().out
    assert int(saved(run).step) == 3
    assert_equal(saved(run), saved(whole[0], step=3))  # what was saved while the other run went on
    last = train(run, jax.devices()[:2])
    assert "resumed at step 3 of 6" in capsys.readouterr().out
    resumed = saved(run)
    assert int(resumed.step) == STEPS
    assert_equal(resumed, saved(whole[0]))
    assert last == whole[1]


def test_a_signal_during_validation_is_heeded_and_the_step_saved(config, corpus, monkeypatch, capsys):
    """The step of a validation need not be one of those that are saved anyway."""
    run = config(validation_data=str(corpus), validate_every=2)
    monkeypatch.setattr(loop, "validate", lambda *args: {"loss": 1.0})
    signal_at(monkeypatch, "validate", 1)
    train(run, jax.devices()[:2])
    assert "step 2 is saved" in capsys.readouterr().out
    assert int(saved(run).step) == 2


def test_the_second_signal_is_left_to_whoever_handled_it_before():
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with loop._stop_signal() as stopped:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopped == [signal.SIGTERM] and not got
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(stopped) == 1 and got == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(got) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_state_saved_on_two_devices_is_restored_on_any_number(whole, devices):
    state = saved(whole[0], devices)
    assert_equal(state, saved(whole[0], 2))
    for leaf in jax.tree.leaves(state):
        assert len(leaf.sharding.device_set) == devices
    assert int(state.step) == STEPS


def test_a_state_is_restored_under_an_active_mesh(whole):
    plain = saved(whole[0], 4)
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:4])):
        assert_equal(saved(whole[0], 4), plain)


def test_a_run_goes_on_on_another_number_of_devices(config, whole, monkeypatch):
    """Sums over devices round differently, so this one is close, not equal."""
    run = config()
    signal_at(monkeypatch, "_place", 3)
    train(run, jax.devices()[:2])
    train(run, jax.devices()[:1])
    for a, b in zip(jax.tree.leaves(saved(run).params), jax.tree.leaves(saved(whole[0]).params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3)


def test_a_run_that_is_complete_is_not_run_again(whole):
    before = records(whole[0])
    train(whole[0], jax.devices()[:2])
    assert records(whole[0]) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"blocks": BlockConfig(block_size=3, blocks_per_row=6)}, "block_size: saved 4, now 3"),
        ({"mask_token_id": 21}, "mask_token_id: saved 20, now 21"),
        ({"loss": LossConfig(gamma=2.0, chunk=16)}, "loss: saved .*'gamma': 4.0.* now .*'gamma': 2.0"),
        ({"block_attention": "causal"}, "block_attention: saved 'bidirectional', now 'causal'"),
        ({"objective": "ar"}, "objective: saved 'd3d', now 'ar'"),
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"steps": 9}, "steps: saved 6, now 9"),
        ({"model": dataclasses.replace(MODEL, rope=RopeConfig(1e6))}, "model: saved .*10000.0.* now .*1000000.0"),
    ],
)
def test_a_resume_under_another_contract_is_refused_and_leaves_the_run_as_it_was(whole, monkeypatch, changes, said):
    run, _ = whole
    monkeypatch.setattr(loop, "new_state", None)  # refused before any parameter is made
    files = {path: path.read_bytes() for path in Path(run.output_dir).glob("*.*")}
    with pytest.raises(TrainingError, match=f"step 6 was saved under another contract .*{said}"):
        train(dataclasses.replace(run, **changes), jax.devices()[:2])
    assert {path: path.read_bytes() for path in Path(run.output_dir).glob("*.*")} == files


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
        ({"validation_data": "nowhere.jsonl"}, DataError, "nowhere.jsonl: no such file"),
        ({"model": dataclasses.replace(MODEL, vocab_size=18), "mask_token_id": 17}, DataError, "token id 19, but the"),
        ({"batch_size": 400}, DataError, "batch_size 400; expected a batch to fit"),
        ({"batch_size": 3}, ConfigError, "batch_size=3 does not divide by the 2 parts of the mesh"),
        ({"mesh": MeshConfig(data=3)}, DeviceError, "needs 3 devices, but there are 2"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_any_work(config, folder, tmp_path, monkeypatch, changes, error, said):
    changes = {name: str(folder) if value == "FOLDER" else value for name, value in changes.items()}
    monkeypatch.setattr(loop, "new_state", None)
    with pytest.raises(error, match=said):
        train(config(output_dir=str(tmp_path / "output"), **changes), jax.devices()[:2])
    assert not (tmp_path / "output").exists()

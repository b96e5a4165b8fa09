"""A training run from its configuration to its last checkpoint.

The loop itself only feeds batches and reads metrics of an earlier step, so the devices never wait for the
host. SIGTERM or the first Ctrl-C saves and leaves; a second one leaves at once.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from jax.sharding import Mesh, NamedSharding

from d3d_jax.checkpoints.convert import load_params
from d3d_jax.checkpoints.hf_config import has_drafter_config, read_drafter_config, read_model_config
from d3d_jax.checkpoints.special_tokens import check_mask_id, read_eos_ids, read_pad_ids
from d3d_jax.config import ModelConfig, TrainConfig, to_mapping
from d3d_jax.data.chat import load_tokenizer, tokenizer_hash
from d3d_jax.data.documents import load_documents
from d3d_jax.data.loader import Batches, BlockArguments
from d3d_jax.data.packing import PackingReport, pack
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.devices.sharding import BATCH, param_sharding
from d3d_jax.errors import ConfigError, TrainingError
from d3d_jax.models.drafter import with_mean_mask_row
from d3d_jax.models.qwen3 import init_params, parameter_count
from d3d_jax.training.checkpointing import Checkpoints
from d3d_jax.training.loss import position_decay
from d3d_jax.training.optimizer import make_optimizer
from d3d_jax.training.step import (
    Metrics,
    TrainState,
    make_eval_step,
    make_loss,
    make_train_step,
    new_state,
    state_shardings,
)


@dataclass(frozen=True)
class Plan:
    """Everything a run needs, checked before any device work."""

    config: TrainConfig
    model: ModelConfig
    contract: dict[str, Any]
    train: Batches
    validation: Batches | None
    report: PackingReport


def plan_run(config: TrainConfig) -> Plan:
    """Read the data and check that the run can be done.

    Raises:
        ConfigError, DataError: what was found, what was expected, what to do.
    """
    if (config.model is None) == (config.init is None):
        raise ConfigError("set exactly one of `model` (fresh weights) and `init` (a HF folder to start from)")
    model = config.model if config.init is None else read_model_config(config.init)
    assert model is not None
    if config.init_layers is not None:
        layers = config.init_layers
        if config.init is None or not layers or not all(0 <= i < model.num_hidden_layers for i in layers):
            raise ConfigError(f"init_layers={layers} must pick layers 0..{model.num_hidden_layers - 1} of init")
        model = replace(model, num_hidden_layers=len(layers))
    if config.objective == "d3d":
        _check_mask(config, model)
        position_decay(config.blocks.block_size, config.loss)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    blocks = None
    if config.objective == "d3d":
        b = config.blocks
        shares = (b.visible_none, b.visible_one)
        blocks = BlockArguments(b.block_size, b.blocks_per_row, b.starts, shares, b.visible_decay)

    def batches(path: str, seed: int, prefetch: bool) -> tuple[Batches, PackingReport]:
        rows, report = pack(load_documents(path, tokenizer, model.vocab_size), config.row_length, config.seed)
        process = (jax.process_index(), jax.process_count())
        return Batches(rows, config.batch_size, seed, *process, blocks=blocks, prefetch=prefetch), report

    train, report = batches(config.train_data, config.seed, True)
    validation = batches(config.validation_data, config.seed + 1, False)[0] if config.validation_data else None
    contract = {
        "objective": config.objective,
        "model": to_mapping(model),
        "block_size": config.blocks.block_size if config.objective == "d3d" else None,
        "mask_token_id": config.mask_token_id,
        "block_attention": config.block_attention,
        "loss": to_mapping(config.loss),
        "optimizer": to_mapping(config.optimizer),
        "steps": config.steps,
        "batch_size": config.batch_size,
        "row_length": config.row_length,
        "seed": config.seed,
        "tokenizer": tokenizer_hash(config.tokenizer) if config.tokenizer else None,
    }
    return Plan(config, model, contract, train, validation, report)


def train(config: TrainConfig, devices: Sequence[jax.Device] | None = None) -> dict[str, float]:
    """Run, or resume, on `devices` (all when None); returns the last validation (or training) metrics."""
    plan = plan_run(config)
    mesh = make_mesh(config.mesh, devices)
    _check_batch(config, mesh)
    output = Path(config.output_dir)
    last: dict[str, float] = {}
    with Checkpoints(output / "checkpoints", config.keep_last) as checkpoints, plan.train, _stop_signal() as stopped:
        resumed = checkpoints.latest() is not None
        if resumed:
            checkpoints.check_contract(plan.contract)
        optimizer = make_optimizer(config.optimizer, config.steps)
        state = new_state(_initial(plan, mesh), optimizer, plan.model, mesh)
        shardings = state_shardings(state, plan.model, mesh)
        step = make_train_step(make_loss(config, plan.model), optimizer, shardings, mesh)
        # Held-out loss is per response token, whatever weight prompts have in training.
        held_out = replace(config, loss=replace(config.loss, prompt_weight=0.0))
        evaluate = make_eval_step(make_loss(held_out, plan.model), shardings, mesh)
        if resumed:
            state = checkpoints.restore(state)
        # Only now: a resume that is refused leaves the files of the run as they are.
        (output / "config.yaml").write_text(yaml.safe_dump(to_mapping(config), sort_keys=False))
        (output / "model.json").write_text(json.dumps(to_mapping(plan.model), indent=2))
        log = _Log(output / "metrics.jsonl")
        parameters = f"{parameter_count(plan.model):,} parameters"
        log.say(f"{config.objective}: {parameters}, {plan.report}, mesh {dict(mesh.shape)}")
        done = int(state.step)
        if resumed:
            log.say(f"resumed at step {done} of {config.steps}")
        plan.train.restore(done)
        pending: Metrics | None = None
        reported, clock = done, time.perf_counter()
        for number in range(done + 1, config.steps + 1):
            state, metrics = step(state, _place(next(plan.train), mesh))
            if pending is not None and (number - 1) % config.log_every == 0:
                last = _checked(number - 1, pending, config)  # of the step before: this one is still running
                seconds, clock = time.perf_counter() - clock, time.perf_counter()
                tokens = (number - 1 - reported) * config.batch_size * config.row_length
                reported = number - 1
                log.write(reported, {**last, "tokens_per_s": tokens / seconds})
            pending = metrics
            final = number == config.steps
            if number % config.save_every == 0 or final:
                last = _checked(number, metrics, config)
                checkpoints.save(number, state, plan.contract, wait=final)
            if final:
                log.write(number, last)
            if plan.validation is not None and (number % config.validate_every == 0 or final):
                last = validate(evaluate, state, plan.validation, mesh, config)
                log.write(number, {f"validation_{k}": v for k, v in last.items()})
                reported, clock = number, time.perf_counter()
            if stopped and not final:  # also by a signal that came during the validation above
                checkpoints.save(number, state, plan.contract, wait=True)
                log.say(f"stopped by a signal; step {number} is saved, run the same command to go on")
                break
        if done >= config.steps and plan.validation is not None:
            last = validate(evaluate, state, plan.validation, mesh, config)
    return last


def _check_mask(config: TrainConfig, model: ModelConfig) -> None:
    if config.mask_token_id is None:
        raise ConfigError(
            f"objective 'd3d' needs mask_token_id: a row 0..{model.vocab_size - 1} of the embedding that no text uses, "
            "usually the first one past the tokenizer (Qwen3: 151669)"
        )
    folders = [folder for folder in (config.init, config.tokenizer) if folder is not None]
    ends = [i for folder in folders for i in read_eos_ids(folder)]
    padding = [i for folder in folders for i in read_pad_ids(folder)]
    check_mask_id(config.mask_token_id, model.vocab_size, ends, padding)


def _check_batch(config: TrainConfig, mesh: Mesh) -> None:
    """Rows are dealt out over `data` and `fsdp`."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.batch_size % parts:
        raise ConfigError(
            f"batch_size={config.batch_size} does not divide by the {parts} parts of the mesh {dict(mesh.shape)}; "
            f"use a multiple of {parts}, or another mesh"
        )


def validate(evaluate: Any, state: TrainState, batches: Batches, mesh: Mesh, config: TrainConfig) -> dict[str, float]:
    """Means over one pass of the held-out batches; the masked blocks are the same every time."""
    total: Metrics | None = None
    for index in range(batches.steps_per_epoch):
        metrics = evaluate(state.params, _place(batches.at(index), mesh))
        total = metrics if total is None else jax.tree.map(lambda a, b: a + b, total, metrics)
    assert total is not None
    return _summary(total, config)


def _initial(plan: Plan, mesh: Mesh) -> Any:
    """Fresh parameters, or those of `init`, each read straight to where it lies on the mesh."""
    config = plan.config
    if config.init is None:
        return init_params(plan.model, config.seed)

    def place(path: tuple[str, ...], shape: tuple[int, ...], axes: tuple[str, ...]) -> NamedSharding:
        return param_sharding(mesh, shape, axes, ".".join(path))

    params = load_params(config.init, dtype=np.float32, sharding_for=place)
    if config.init_layers is not None:
        kept = np.asarray(config.init_layers)
        params = {**params, "layers": jax.tree.map(lambda w: w[kept], params["layers"])}
    trained = has_drafter_config(config.init) and read_drafter_config(config.init).mask_token_id == config.mask_token_id
    if config.objective == "d3d" and not trained:
        assert config.mask_token_id is not None
        params = with_mean_mask_row(params, config.mask_token_id)
    return params


def _place(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    place = NamedSharding(mesh, BATCH)
    return {name: jax.make_array_from_process_local_data(place, array) for name, array in batch.items()}


def _checked(step: int, metrics: Metrics, config: TrainConfig) -> dict[str, float]:
    """The summary of a training step, refused if the run has gone astray: such a state is never saved."""
    summary = _summary(metrics, config)
    if not np.isfinite([summary["loss"], summary["grad_norm"]]).all():
        raise TrainingError(
            f"at step {step} the loss is {summary['loss']} and the gradient's norm {summary['grad_norm']}; "
            "lower the learning rate or clip_norm"
        )
    return summary


def _summary(metrics: Metrics, config: TrainConfig) -> dict[str, float]:
    m = {name: np.asarray(value, np.float64) for name, value in metrics.items()}
    parts = [part for part in ("block", "ar") if f"{part}_loss_sum" in m]
    means = {f"{part}_loss": float(m[f"{part}_loss_sum"] / np.maximum(m[f"{part}_loss_count"], 1)) for part in parts}
    if config.objective == "ar":
        out = {"loss": means["ar_loss"]}
    else:
        out = {"loss": means["block_loss"] + config.loss.ar_weight * means["ar_loss"], **means}
    out["ar_accuracy"] = float(m["ar_correct"] / np.maximum(m["ar_count"], 1))
    if "grad_norm" in m:
        out["grad_norm"] = float(m["grad_norm"])
    if "position_correct" in m:
        accuracy = m["position_correct"] / np.maximum(m["position_count"], 1)
        out.update({f"accuracy_{o}": float(a) for o, a in enumerate(accuracy)})
    return out


class _Log:
    """One line a report on the terminal, one JSON object in metrics.jsonl."""

    def __init__(self, path: Path):
        self._path = path

    def say(self, text: str) -> None:
        print(text, flush=True)

    def write(self, step: int, values: dict[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        shown = {k: v for k, v in values.items() if not k.startswith(("accuracy_", "validation_accuracy_"))}
        positions = " ".join(f"{v:.2f}"[1:] for k, v in values.items() if "accuracy_" in k and k[-1].isdigit())
        text = "  ".join(f"{k} {v:.4g}" for k, v in shown.items())
        self.say(f"step {step}  {text}" + (f"  [{positions}]" if positions else ""))


@contextmanager
def _stop_signal() -> Iterator[list[int]]:
    """A list that becomes non-empty on the first SIGTERM or SIGINT; the second one acts as usual."""
    received: list[int] = []
    previous = {}

    def note(number: int, _: Any) -> None:
        received.append(number)
        for which, handler in previous.items():
            signal.signal(which, handler)

    try:
        for which in (signal.SIGTERM, signal.SIGINT):
            previous[which] = signal.signal(which, note)
    except ValueError:  # not the main thread: the caller handles signals
        previous.clear()
    try:
        yield received
    finally:
        for which, handler in previous.items():
            signal.signal(which, handler)

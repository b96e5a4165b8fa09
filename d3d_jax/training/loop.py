"""A training run from its configuration to its last checkpoint.

The loop itself only feeds batches and reads metrics of an earlier step, so the devices never wait for the
host. SIGTERM or the first Ctrl-C saves and leaves; a second one leaves at once.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from jax.sharding import NamedSharding

from d3d_jax.checkpoints.convert import load_params
from d3d_jax.checkpoints.hf_config import read_model_config
from d3d_jax.config import ModelConfig, TrainConfig, to_mapping
from d3d_jax.data.chat import load_tokenizer, tokenizer_hash
from d3d_jax.data.documents import load_documents
from d3d_jax.data.loader import Batches, BlockArguments
from d3d_jax.data.packing import PackingReport, pack
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.devices.sharding import BATCH
from d3d_jax.errors import ConfigError, TrainingError
from d3d_jax.models.drafter import with_mean_mask_row
from d3d_jax.models.qwen3 import init_params, parameter_count
from d3d_jax.training.checkpointing import Checkpoints
from d3d_jax.training.optimizer import make_optimizer
from d3d_jax.training.step import Metrics, TrainState, make_eval_step, make_loss, make_train_step, new_state, state_shardings


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
        if config.init is None or not all(0 <= i < model.num_hidden_layers for i in config.init_layers):
            raise ConfigError(f"init_layers={config.init_layers} must pick layers 0..{model.num_hidden_layers - 1} of init")
        model = replace(model, num_hidden_layers=len(config.init_layers))
    if config.objective == "d3d" and not 0 <= (config.mask_token_id or -1) < model.vocab_size:
        raise ConfigError(
            f"mask_token_id={config.mask_token_id} must be a row of the embedding (0..{model.vocab_size - 1}), "
            "usually the first one past the tokenizer"
        )
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


def train(config: TrainConfig) -> dict[str, float]:
    """Run, or resume, and return the last validation (or training) metrics."""
    plan = plan_run(config)
    mesh = make_mesh(config.mesh)
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.yaml").write_text(yaml.safe_dump(to_mapping(config), sort_keys=False))
    (output / "model.json").write_text(json.dumps(to_mapping(plan.model), indent=2))
    optimizer = make_optimizer(config.optimizer, config.steps)
    loss = make_loss(config, plan.model)
    state = new_state(_initial(plan), optimizer, plan.model, mesh)
    shardings = state_shardings(state, plan.model, mesh)
    step = make_train_step(loss, optimizer, shardings, mesh)
    # Held-out loss is per response token, whatever weight prompts have in training.
    held_out = replace(config, loss=replace(config.loss, prompt_weight=0.0))
    evaluate = make_eval_step(make_loss(held_out, plan.model), shardings, mesh)
    log = _Log(output / "metrics.jsonl")
    log.say(f"{config.objective}: {parameter_count(plan.model):,} parameters, {plan.report}, mesh {dict(mesh.shape)}")

    last: dict[str, float] = {}
    with Checkpoints(output / "checkpoints", config.keep_last) as checkpoints, plan.train, _stop_signal() as stopped:
        if checkpoints.latest() is not None:
            state = checkpoints.restore(state, plan.contract)
            log.say(f"resumed at step {int(state.step)}")
        done = int(state.step)
        plan.train.restore(done)
        pending: Metrics | None = None
        clock = time.perf_counter()
        for number in range(done + 1, config.steps + 1):
            state, metrics = step(state, _place(next(plan.train), mesh))
            if pending is not None and (number - 1) % config.log_every == 0:
                last = _summary(pending)  # of the step before: this one is still running
                if not np.isfinite(last["loss"]):
                    raise TrainingError(f"the loss is {last['loss']} at step {number - 1}; lower the learning rate or clip_norm")
                seconds, clock = time.perf_counter() - clock, time.perf_counter()
                tokens = config.log_every * config.batch_size * config.row_length
                log.write(number - 1, {**last, "tokens_per_s": tokens / seconds})
            pending = metrics
            final = number == config.steps or bool(stopped)
            if number % config.save_every == 0 or final:
                checkpoints.save(number, state, plan.contract, wait=final)
            if plan.validation is not None and (number % config.validate_every == 0 or number == config.steps):
                last = validate(evaluate, state, plan.validation, mesh)
                log.write(number, {f"validation_{k}": v for k, v in last.items()})
                clock = time.perf_counter()
            if stopped:
                log.say(f"stopped by a signal; step {number} is saved, run the same command to go on")
                break
    return last


def validate(evaluate: Any, state: TrainState, batches: Batches, mesh: Any) -> dict[str, float]:
    """Metrics over one pass of the held-out batches; the masked blocks are the same every time."""
    total: Metrics | None = None
    for index in range(batches.steps_per_epoch):
        metrics = evaluate(state.params, _place(batches.at(index), mesh))
        total = metrics if total is None else jax.tree.map(lambda a, b: a + b, total, metrics)
    assert total is not None
    return _summary(total)


def _initial(plan: Plan) -> Any:
    config = plan.config
    if config.init is None:
        return init_params(plan.model, config.seed)
    params = load_params(config.init, read_model_config(config.init), dtype=np.float32)
    if config.init_layers is not None:
        kept = np.asarray(config.init_layers)
        params = {**params, "layers": jax.tree.map(lambda w: w[kept], params["layers"])}
    if config.objective == "d3d":
        assert config.mask_token_id is not None
        params = with_mean_mask_row(params, config.mask_token_id)
    return params


def _place(batch: dict[str, np.ndarray], mesh: Any) -> dict[str, jax.Array]:
    place = NamedSharding(mesh, BATCH)
    return {name: jax.make_array_from_process_local_data(place, array) for name, array in batch.items()}


def _summary(metrics: Metrics) -> dict[str, float]:
    m = {name: np.asarray(value, np.float64) for name, value in metrics.items()}
    out = {"loss": float(m["loss_sum"] / np.maximum(m["loss_count"], 1e-9))}
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
        self.say(f"step {step}  " + "  ".join(f"{k} {v:.4g}" for k, v in shown.items()) + (f"  [{positions}]" if positions else ""))


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

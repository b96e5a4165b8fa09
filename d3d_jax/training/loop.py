"""A training run from its configuration to its last checkpoint.

The loop itself only feeds batches and reads metrics of an earlier step, so the devices never wait for the
host. SIGTERM or the first Ctrl-C saves and leaves; a second one leaves at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from jax.sharding import Mesh, NamedSharding

from d3d_jax.checkpoints.convert import load_params
from d3d_jax.checkpoints.hf_config import has_drafter_config, read_drafter_config
from d3d_jax.config import TrainConfig, to_mapping
from d3d_jax.data.loader import Batches
from d3d_jax.devices.distributed import compiled_together
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.devices.sharding import BATCH, param_sharding
from d3d_jax.errors import TrainingError
from d3d_jax.models.drafter import with_mean_mask_row
from d3d_jax.models.qwen3 import parameter_count
from d3d_jax.training.checkpointing import Checkpoints
from d3d_jax.training.held_out import HeldOut
from d3d_jax.training.optimizer import make_optimizer
from d3d_jax.training.plan import Plan, check_batch, plan_run
from d3d_jax.training.reporting import Reports, check_installed
from d3d_jax.training.state import StatePlan, TrainState, abstract_state, fresh_params, new_state, places_of
from d3d_jax.training.step import Metrics, make_eval_step, make_train_step
from d3d_jax.training.stopping import asked_to_stop, stop_signal
from d3d_jax.training.throughput import Throughput, Work, peak_flops, work_of


def train(config: TrainConfig, devices: Sequence[jax.Device] | None = None) -> dict[str, float]:
    """Run, or resume, on `devices` (all when None); returns the last held-out (or training) figures."""
    check_installed(config.watch)
    plan = plan_run(config)
    mesh = make_mesh(config.mesh, devices)
    check_batch(config, mesh)
    output = Path(config.output_dir)
    last: dict[str, float] = {}
    with Checkpoints(output / "checkpoints", config.keep_last) as checkpoints, plan.train, stop_signal() as stopped:
        resumed = checkpoints.latest() is not None
        if resumed:
            checkpoints.check_contract(plan.contract)
        optimizer = make_optimizer(config.optimizer, config.steps)
        form = StatePlan(plan.model, optimizer, config.frozen, config.ema_decay is not None)
        # A resume reads into this layout, so that only one state is ever there.
        layout = abstract_state(form, mesh)
        shardings = places_of(layout)
        step = compiled_together(make_train_step(config, form, shardings, mesh), "training step")
        examine = _make_examination(config, plan, shardings, mesh)
        state = checkpoints.restore(layout) if resumed else new_state(_initial(plan, mesh), form, shardings)
        # Only now: a resume that is refused leaves the files of the run as they are.
        first = jax.process_index() == 0
        if first:
            (output / "config.yaml").write_text(yaml.safe_dump(to_mapping(config), sort_keys=False))
            (output / "model.json").write_text(json.dumps(to_mapping(plan.model), indent=2))
        with Reports(config, first) as reports:
            parameters = f"{parameter_count(plan.model):,} parameters"
            reports.say(f"{config.objective}: {parameters}, {plan.report}, mesh {dict(mesh.shape)}")
            done = int(state.step)
            if resumed:
                reports.say(f"resumed at step {done} of {config.steps}")
            plan.train.restore(done)
            pending: Metrics | None = None
            speed = _throughput(plan, mesh)
            for number in range(done + 1, config.steps + 1):
                batch = speed.next_batch(plan.train, lambda pending=pending: _ready(pending))
                state, metrics = step(state, _place(batch, mesh))
                if pending is not None and (number - 1) % config.log_every == 0:
                    last = _checked(number - 1, pending, config)  # of the step before: this one is still running
                    reports.write(number - 1, {**last, **speed.report()})
                    checkpoints.check()
                pending = metrics
                reports.at_step(number)
                final = number == config.steps
                if number % config.save_every == 0 or final:
                    last = _checked(number, metrics, config)
                    checkpoints.save(number, state, plan.contract, wait=final)
                if final:
                    reports.write(number, last)
                if found := examine(state, number, final):
                    last = _without_prefix(found)
                    reports.write(number, found)
                    speed.restart()
                # Processes agree only now and then, since it makes them wait for one another.
                due = jax.process_count() == 1 or number % config.log_every == 0
                if not final and due and asked_to_stop(stopped):  # also by a signal during the validation above
                    checkpoints.save(number, state, plan.contract, wait=True)
                    reports.say(f"stopped by a signal; step {number} is saved, run the same command to go on")
                    break
            if done >= config.steps:
                last = _without_prefix(examine(state, done, True))
    return last


def _make_examination(
    config: TrainConfig, plan: Plan, shardings: TrainState, mesh: Mesh
) -> Callable[[TrainState, int, bool], dict[str, float]]:
    """`(state, step, final) -> figures` on the held-out data, those that are due at the step."""
    if plan.validation is None:
        return lambda state, number, final: {}
    batches = plan.validation
    # Held-out loss is per response token, whatever weight prompts have in training.
    held_out = replace(config, loss=replace(config.loss, prompt_weight=0.0, kd_weight=0.0))
    evaluate = compiled_together(make_eval_step(held_out, plan.model, shardings, mesh), "validation")
    every = config.acceptance_every if config.objective == "d3d" else None
    accept = None if every is None else HeldOut(config, plan, shardings, mesh)

    def examine(state: TrainState, number: int, final: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        if number % config.validate_every == 0 or final:
            means = validate(evaluate, state, batches, mesh, config)
            found = {f"validation_{name}": value for name, value in means.items()}
        if accept is not None and every is not None and (number % every == 0 or final):
            found |= accept(state.best())
        return found

    return examine


def _without_prefix(found: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("validation_"): value for name, value in found.items()}


def _throughput(plan: Plan, mesh: Mesh) -> Throughput:
    def work(batch: dict[str, np.ndarray]) -> Work:
        mine = work_of(batch, plan.model, plan.config)
        return Work(*(jax.process_count() * amount for amount in mine))

    peak = peak_flops(mesh.devices.flat[0], plan.config)
    return Throughput(work, None if peak is None else peak * mesh.size)


def _ready(metrics: Metrics | None) -> bool:
    """Whether the step that gives these figures has finished; yes if there is none."""
    leaves: list[Any] = [] if metrics is None else [leaf for leaf in metrics.values() if isinstance(leaf, jax.Array)]
    return all(leaf.is_ready() for leaf in leaves)


def validate(evaluate: Any, state: TrainState, batches: Batches, mesh: Mesh, config: TrainConfig) -> dict[str, float]:
    """Means over one pass of the held-out batches; the masked blocks are the same every time."""
    total: Metrics | None = None
    for index in range(batches.steps_per_epoch):
        metrics = evaluate(state.best(), _place(batches.at(index), mesh))
        total = metrics if total is None else jax.tree.map(lambda a, b: a + b, total, metrics)
    assert total is not None
    return _summary(total, config)


def _initial(plan: Plan, mesh: Mesh) -> Any:
    """Fresh parameters, or those of `init`, each read straight to where it lies on the mesh."""
    config = plan.config
    if config.init is None:
        return fresh_params(plan.model, config.seed, mesh)

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
    parts = [part for part in ("block", "ar", "kd") if f"{part}_loss_sum" in m]
    means = {f"{part}_loss": float(m[f"{part}_loss_sum"] / np.maximum(m[f"{part}_loss_count"], 1)) for part in parts}
    if config.objective == "ar":
        out = {"loss": means["ar_loss"]}
    else:
        distilled = config.loss.kd_weight * means.get("kd_loss", 0.0)
        out = {"loss": means["block_loss"] + config.loss.ar_weight * means["ar_loss"] + distilled, **means}
    out["ar_accuracy"] = float(m["ar_correct"] / np.maximum(m["ar_count"], 1))
    if "grad_norm" in m:
        out["grad_norm"] = float(m["grad_norm"])
    if "position_correct" in m:
        accuracy = m["position_correct"] / np.maximum(m["position_count"], 1)
        out.update({f"accuracy_{o}": float(a) for o, a in enumerate(accuracy)})
    return out

"""One compiled training step, and one validation step, on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from d3d_jax.config import ModelConfig, TrainConfig
from d3d_jax.devices.sharding import BATCH, constrain, on_mesh, replicated
from d3d_jax.models.qwen3 import Params
from d3d_jax.training.loss import ar_loss, d3d_loss, loss_counts
from d3d_jax.training.state import StatePlan, TrainState, joined, split

Metrics = dict[str, jax.Array]


def make_loss(config: TrainConfig, model: ModelConfig) -> Callable[..., tuple[jax.Array, Metrics]]:
    """`(params, batch, counts=None) -> (loss, metrics)` of the run's objective; see `loss.ar_loss` for `counts`."""
    dtype = jnp.dtype(config.dtype)

    def loss(params: Params, batch: Any, counts: Metrics | None = None) -> tuple[jax.Array, Metrics]:
        if config.objective == "ar":
            return ar_loss(params, batch, model, config.loss, dtype, config.remat, counts, config.attention)
        assert config.mask_token_id is not None  # checked when the run is planned
        return d3d_loss(
            params,
            batch,
            model,
            config.loss,
            block_size=config.blocks.block_size,
            mask_token_id=config.mask_token_id,
            block_attention=config.block_attention,
            dtype=dtype,
            remat=config.remat,
            counts=counts,
            attention=config.attention,
        )

    return loss


def make_gradient(config: TrainConfig, model: ModelConfig) -> Callable[[Params, Any], tuple[Params, Metrics]]:
    """`(params, batch) -> (gradient, metrics)` of the whole batch, computed in `config.micro_batches` parts.

    Each part's sums are divided by the counts of the whole batch, so that the parts' gradients add up to its
    gradient, however unevenly the supervised tokens are spread. Frozen parameters are None in the gradient.
    """
    loss = make_loss(config, model)

    def gradient(params: Params, batch: Any) -> tuple[Params, Metrics]:
        trained, fixed = split(params, config.frozen)

        def part_loss(trained: Params, part: Any, counts: Metrics | None) -> tuple[jax.Array, Metrics]:
            return loss(joined(trained, fixed), part, counts)

        part_gradient = jax.grad(part_loss, has_aux=True)
        if config.micro_batches == 1:
            return part_gradient(trained, batch, None)
        counts = loss_counts(config, batch)
        parts = jax.tree.map(lambda x: _in_parts(x, config.micro_batches), batch)
        first = jax.tree.map(lambda x: x[0], parts)
        empty = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part_gradient, trained, first, counts)
        )

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, part_gradient(trained, part, counts)), None

        return jax.lax.scan(add, empty, parts)[0]

    return gradient


def _in_parts(x: jax.Array, count: int) -> jax.Array:
    """[B, ...] -> [count, B / count, ...]; every part has rows of every device, so that no row moves."""
    parts = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
    return constrain(parts, None, "batch", *[None] * (x.ndim - 1))


def make_train_step(
    config: TrainConfig, plan: StatePlan, shardings: TrainState, mesh: Mesh
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """`(state, batch) -> (state, metrics)`; the state is donated: its memory becomes the new state's."""
    gradient = make_gradient(config, plan.model)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        with on_mesh(mesh):
            grads, metrics = gradient(state.params, batch)
        grads = jax.lax.with_sharding_constraint(grads, split(shardings.params, config.frozen)[0])
        metrics["grad_norm"] = optax.tree.norm(grads)
        trained, fixed = split(state.params, config.frozen)
        updates, opt_state = plan.optimizer.update(grads, state.opt_state, trained)
        params = joined(optax.apply_updates(trained, updates), fixed)  # pyright: ignore[reportArgumentType]
        average = state.average
        if average is not None:
            assert config.ema_decay is not None
            # Early on the average follows closely: else it would long remember the weights it began with.
            decay = jnp.minimum(config.ema_decay, (1 + state.step) / (10 + state.step))
            average = jax.tree.map(lambda old, new: new + decay * (old - new), average, params)
        return TrainState(params, opt_state, state.step + 1, average), metrics

    data = NamedSharding(mesh, BATCH)
    return jax.jit(step, donate_argnums=0, in_shardings=(shardings, data), out_shardings=(shardings, replicated(mesh)))


def make_eval_step(
    config: TrainConfig, model: ModelConfig, shardings: TrainState, mesh: Mesh
) -> Callable[[Params, Any], Metrics]:
    """`(params, batch) -> metrics`."""
    loss = make_loss(config, model)

    def evaluate(params: Params, batch: Any) -> Metrics:
        with on_mesh(mesh):
            return loss(params, batch)[1]

    return jax.jit(
        evaluate,
        in_shardings=(shardings.params, NamedSharding(mesh, BATCH)),
        out_shardings=replicated(mesh),
    )

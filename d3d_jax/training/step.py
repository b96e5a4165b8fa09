"""One compiled training step, and one validation step, on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from d3d_jax.config import ModelConfig, TrainConfig
from d3d_jax.devices.sharding import BATCH, replicated
from d3d_jax.models.qwen3 import Params
from d3d_jax.training.loss import ar_loss, d3d_loss
from d3d_jax.training.state import TrainState

Metrics = dict[str, jax.Array]


def make_loss(config: TrainConfig, model: ModelConfig) -> Callable[[Params, Any], tuple[jax.Array, Metrics]]:
    """`(params, batch) -> (loss, metrics)` of the run's objective."""
    dtype = jnp.dtype(config.dtype)

    def loss(params: Params, batch: Any) -> tuple[jax.Array, Metrics]:
        if config.objective == "ar":
            return ar_loss(params, batch, model, config.loss, dtype, config.remat)
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
        )

    return loss


def make_train_step(
    loss: Callable[[Params, Any], tuple[jax.Array, Metrics]],
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    mesh: Mesh,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """`(state, batch) -> (state, metrics)`; the state is donated: its memory becomes the new state's."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        grads, metrics = jax.grad(loss, has_aux=True)(state.params, batch)
        metrics["grad_norm"] = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1), metrics

    data = NamedSharding(mesh, BATCH)
    return jax.jit(step, donate_argnums=0, in_shardings=(shardings, data), out_shardings=(shardings, replicated(mesh)))


def make_eval_step(
    loss: Callable[[Params, Any], tuple[jax.Array, Metrics]], shardings: TrainState, mesh: Mesh
) -> Callable[[Params, Any], Metrics]:
    """`(params, batch) -> metrics`."""
    return jax.jit(
        lambda params, batch: loss(params, batch)[1],
        in_shardings=(shardings.params, NamedSharding(mesh, BATCH)),
        out_shardings=replicated(mesh),
    )

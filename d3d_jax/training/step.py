"""One compiled training step, and one validation step, on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from d3d_jax.config import ModelConfig, TrainConfig
from d3d_jax.devices.sharding import BATCH, replicated, tree_shardings
from d3d_jax.models.qwen3 import Params, parameter_table
from d3d_jax.training.loss import ar_loss, d3d_loss

Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """Float32 master weights (stacked form), optimiser state, and steps done, int32 []."""

    params: Params
    opt_state: Any
    step: jax.Array


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


def state_shardings(state: TrainState, model: ModelConfig, mesh: Mesh) -> TrainState:
    """Parameters by their logical axes; what the optimiser keeps per parameter lies with it, scalars everywhere."""
    params = tree_shardings(mesh, parameter_table(model))
    places = dict(jax.tree_util.tree_leaves_with_path(params))
    shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}

    def place(path: tuple, leaf: Any) -> NamedSharding:
        """A parameter's moments end in its path; two parameters of one shape may lie differently."""
        for start in range(len(path)):
            if shapes.get(path[start:]) == leaf.shape:
                return places[path[start:]]
        return replicated(mesh)

    opt_state = jax.tree_util.tree_map_with_path(place, state.opt_state)
    return TrainState(params, opt_state, replicated(mesh))  # pyright: ignore[reportArgumentType]


def new_state(params: Params, optimizer: optax.GradientTransformation, model: ModelConfig, mesh: Mesh) -> TrainState:
    """The state before the first step, placed on the mesh."""
    params = jax.device_put(params, tree_shardings(mesh, parameter_table(model)))

    def build(params: Params) -> TrainState:
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    return jax.jit(build, out_shardings=state_shardings(jax.eval_shape(build, params), model, mesh))(params)


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

"""What a training run keeps between steps, and where on the mesh each piece of it lies."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from d3d_jax.config import ModelConfig
from d3d_jax.devices.sharding import replicated, tree_shardings
from d3d_jax.models.qwen3 import Params, init_params, parameter_table


class TrainState(NamedTuple):
    """Float32 master weights (stacked form), optimiser state, and steps done, int32 []."""

    params: Params
    opt_state: Any
    step: jax.Array


def _before_training(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


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


def abstract_state(optimizer: optax.GradientTransformation, model: ModelConfig, mesh: Mesh) -> TrainState:
    """The state's shapes, types and places as `jax.ShapeDtypeStruct`; no array is made."""
    shapes = jax.eval_shape(lambda: _before_training(init_params(model), optimizer))
    places = state_shardings(shapes, model, mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def places_of(state: TrainState) -> TrainState:
    """The shardings of a state, or of an abstract one."""
    return jax.tree.map(lambda x: x.sharding, state)


def fresh_params(model: ModelConfig, seed: int, mesh: Mesh) -> Params:
    """Random parameters, each device making only its own part; the same values on every mesh."""
    return jax.jit(lambda: init_params(model, seed), out_shardings=tree_shardings(mesh, parameter_table(model)))()


def new_state(params: Params, optimizer: optax.GradientTransformation, places: TrainState) -> TrainState:
    """The state before the first step. `params` become a part of it: where they lie right they are not copied."""
    params = jax.device_put(params, places.params)
    opt_state, step = jax.jit(
        lambda params: _before_training(params, optimizer)[1:], out_shardings=(places.opt_state, places.step)
    )(params)
    return TrainState(params, opt_state, step)

"""What a training run keeps between steps, and where on the mesh each piece of it lies."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from d3d_jax.config import ModelConfig
from d3d_jax.devices.sharding import replicated, tree_shardings
from d3d_jax.errors import ConfigError, nearest
from d3d_jax.models.qwen3 import Params, init_params, parameter_table


class TrainState(NamedTuple):
    """Float32 master weights (stacked form), optimiser state, steps done, int32 [], and the weights' average or None.

    The optimiser keeps something only for parameters that are trained.
    """

    params: Params
    opt_state: Any
    step: jax.Array
    average: Params | None = None

    def items(self) -> dict[str, Any]:
        """What there is of the four, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def best(self) -> Params:
        """The weights to validate and to keep: the average where there is one."""
        return self.params if self.average is None else self.average


class StatePlan(NamedTuple):
    """What decides the form of a state: model, optimiser, names of frozen parameters, whether there is an average."""

    model: ModelConfig
    optimizer: optax.GradientTransformation
    frozen: tuple[str, ...] = ()
    averaged: bool = False


def check_frozen(frozen: tuple[str, ...], model: ModelConfig) -> None:
    """Refuse names that freeze nothing, or a choice that leaves nothing to train.

    Raises:
        ConfigError: with the nearest name.
    """
    table = parameter_table(model)
    known = {*table, *(f"layers.{name}" for name in table["layers"])}
    for name in frozen:
        if name not in known:
            raise ConfigError(f"frozen: {name!r} is no parameter of the model{nearest(name, known)}")
    if not jax.tree.leaves(split(parameter_table(model), frozen)[0]):
        raise ConfigError(f"frozen={list(frozen)} leaves no parameter to train")


def split(params: Params, frozen: tuple[str, ...]) -> tuple[Params, Params]:
    """Trained and frozen parameters, in two trees of the same form; None stands where a leaf is in the other."""

    def is_frozen(path: tuple) -> bool:
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        return any(".".join(names[:length]) in frozen for length in range(1, len(names) + 1))

    def choose(wanted: bool) -> Params:
        return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if is_frozen(path) is wanted else None, params)

    return choose(False), choose(True)


def joined(trained: Params, fixed: Params) -> Params:
    """The tree that :func:`split` has taken apart."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, fixed, is_leaf=lambda x: x is None)


def _before_training(params: Params, plan: StatePlan) -> TrainState:
    opt_state = plan.optimizer.init(split(params, plan.frozen)[0])
    # A copy: the step reuses the memory of both.
    average = jax.tree.map(jnp.copy, params) if plan.averaged else None
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32), average)


def state_shardings(state: TrainState, model: ModelConfig, mesh: Mesh) -> TrainState:
    """Parameters by their logical axes; what the optimiser keeps per parameter lies with it, scalars everywhere."""
    params = tree_shardings(mesh, parameter_table(model))
    places = dict(jax.tree_util.tree_leaves_with_path(params))
    shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}

    def place(path: tuple, leaf: Any) -> NamedSharding:
        """A parameter's moments and average end in its path; two parameters of one shape may lie differently."""
        for start in range(len(path)):
            if shapes.get(path[start:]) == leaf.shape:
                return places[path[start:]]
        return replicated(mesh)

    rest = jax.tree_util.tree_map_with_path(place, (state.opt_state, state.step, state.average))
    return TrainState(params, *rest)


def abstract_state(plan: StatePlan, mesh: Mesh) -> TrainState:
    """The state's shapes, types and places as `jax.ShapeDtypeStruct`; no array is made."""
    shapes = jax.eval_shape(lambda: _before_training(init_params(plan.model), plan))
    places = state_shardings(shapes, plan.model, mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def places_of(state: TrainState) -> TrainState:
    """The shardings of a state, or of an abstract one."""
    return jax.tree.map(lambda x: x.sharding, state)


def fresh_params(model: ModelConfig, seed: int, mesh: Mesh) -> Params:
    """Random parameters, each device making only its own part; the same values on every mesh."""
    return jax.jit(lambda: init_params(model, seed), out_shardings=tree_shardings(mesh, parameter_table(model)))()


def new_state(params: Params, plan: StatePlan, places: TrainState) -> TrainState:
    """The state before the first step. `params` become a part of it: where they lie right they are not copied."""
    params = jax.device_put(params, places.params)
    rest = jax.jit(lambda params: _before_training(params, plan)[1:], out_shardings=tuple(places[1:]))(params)
    return TrainState(params, *rest)

"""Logical axes to mesh axes: one table says where every parameter lives."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from d3d_jax.errors import DeviceError

# The matrices of a layer are split by their feed-forward or head axis on `tensor` and by width on `fsdp`.
# Rows of a batch lie on `data` and `fsdp`, so a weight is gathered over `fsdp` before its product.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "embed": "fsdp",
    "head_dim": None,
    "pair": None,
    "layers": None,
}

BATCH = PartitionSpec(RULES["batch"])


def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The partition of an array whose dimensions have these logical axes; None is whole on every device."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def on_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
    """While a program is traced in this context, :func:`constrain` lays its arrays on `mesh`."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x` inside a program, laid out by the logical axes of its dimensions; as it is where no mesh of ours is active.

    The compiler propagates shardings by itself, but between two that both make sense it may take the costly one,
    such as summing logits over `fsdp` instead of gathering the head once.
    """
    if "fsdp" not in jax.sharding.get_abstract_mesh().axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))


def parts(*axes: str) -> int:
    """In how many parts the active mesh cuts an array along these logical axes together; 1 without one."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    names = [RULES[axis] for axis in axes]
    flat = [one for name in names if name is not None for one in ((name,) if isinstance(name, str) else name)]
    return math.prod(sizes.get(name, 1) for name in flat)


def param_sharding(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str, ...], name: str = "") -> NamedSharding:
    """Where a parameter lives on `mesh`.

    Raises:
        DeviceError: if a dimension does not divide by its mesh axis.
    """
    for size, axis in zip(shape, axes, strict=True):
        target = RULES[axis]
        if isinstance(target, str) and size % mesh.shape[target]:
            raise DeviceError(
                f"parameter {name!r} has {size} along {axis!r}, which does not divide by the mesh axis "
                f"{target!r} of {mesh.shape[target]}; choose another mesh"
            )
    return NamedSharding(mesh, spec(axes))


def tree_shardings(mesh: Mesh, table: Any) -> Any:
    """Shardings for a tree of parameter records with `shape` and `axes`."""
    return jax.tree.map(
        lambda param: param_sharding(mesh, param.shape, param.axes), table, is_leaf=lambda node: hasattr(node, "axes")
    )


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())

"""Logical axes to mesh axes: one table says where every parameter lives."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from d3d_jax.errors import DeviceError

# The matrices of a layer are split by their feed-forward or head axis on `tensor` and by width on `fsdp`.
RULES: dict[str, str | None] = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "embed": "fsdp",
    "head_dim": None,
    "layers": None,
}

BATCH = PartitionSpec(("data", "fsdp"))


def spec(axes: tuple[str, ...]) -> PartitionSpec:
    """The partition of an array whose dimensions have these logical axes."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def param_sharding(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str, ...], name: str = "") -> NamedSharding:
    """Where a parameter lives on `mesh`.

    Raises:
        DeviceError: if a dimension does not divide by its mesh axis.
    """
    for size, axis in zip(shape, axes, strict=True):
        target = RULES[axis]
        if target is not None and size % mesh.shape[target]:
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

"""Meshes: which devices a program runs on, and under which axis names."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from d3d_jax.config import MeshConfig
from d3d_jax.errors import DeviceError

AXES = ("data", "fsdp", "tensor")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes `data, fsdp, tensor` over `devices` (all of them when None).

    Axis types are Auto: the compiler propagates shardings from those of the arguments.

    Raises:
        DeviceError: if the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [config.data, config.fsdp, config.tensor]
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise DeviceError(f"mesh {dict(zip(AXES, sizes, strict=True))}: sizes are 1 or more, and at most one is -1")
    if -1 in sizes:
        sizes[sizes.index(-1)] = len(devices) // math.prod(size for size in sizes if size != -1)
    if math.prod(sizes) != len(devices):
        raise DeviceError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} needs {math.prod(sizes)} devices, but there are "
            f"{len(devices)}; change the mesh sizes, or use data=-1 to take what is there"
        )
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)

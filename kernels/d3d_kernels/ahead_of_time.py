"""Compile for an accelerator that is not there, with its real compiler, and read what the compiler says.

TPU programs need the package `libtpu`, GPU programs `jax-cuda13-plugin`, `jax-cuda13-pjrt` and
`nvidia-cuda-nvcc`. Call `prepare` before anything is computed: both compilers read their environment once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_TARGETS = Path(__file__).parent / "targets"
_NEEDED = {"tpu": ("libtpu",), "gpu": ("jax_cuda13_plugin", "jax_plugins.xla_cuda13")}


class Unavailable(RuntimeError):
    """The compiler for a target is not installed, or did not start."""


class KernelResources(NamedTuple):
    """What the GPU assembler reports of one kernel."""

    name: str
    registers: int
    spill_bytes: int
    wgmma: int  # instructions in its text
    tma_loads: int


def prepare(dump: Path | None) -> None:
    """Sets what the compilers read from the environment, so that they write their reports under `dump`, if any."""
    os.environ.update(
        JAX_PLATFORMS="cpu",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
    )
    jax.config.update("jax_platforms", "cpu")
    if dump is None:
        return
    os.environ.update(
        LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={dump}/tpu --xla_jf_dump_llo_text=true",
        MOSAIC_GPU_DUMP_PTX="1",
        MOSAIC_GPU_DUMP_TO=f"{dump}/gpu",
    )
    for folder in ("tpu", "gpu"):
        (dump / folder).mkdir(parents=True, exist_ok=True)


def tpu_mesh(topology: str, num_devices: int = 1) -> Mesh:
    """A mesh of one axis `x` over TPUs that are not there, `v5e:2x2` or `v6e:2x2` for instance."""
    return _mesh("tpu", num_devices, topology_name=topology)


def gpu_mesh(target: str = "h200", num_devices: int = 1) -> Mesh:
    """A mesh of one axis `x` over GPUs that are not there; `target` names a file in targets/."""
    description = (_TARGETS / f"{target}.txtpb").read_text()
    return _mesh("cuda", num_devices, topology_name=target, target_config=description, topology=f"1x1x{num_devices}")


def _mesh(platform: str, num_devices: int, **description: str) -> Mesh:
    from jax.experimental import topologies

    needed = _NEEDED["gpu" if platform == "cuda" else platform]
    missing = [name for name in needed if not _installed(name)]
    if missing:
        raise Unavailable(f"the {platform} compiler is not installed: no module {', '.join(missing)}")
    try:
        found = topologies.get_topology_desc(platform=platform, **description)
    except Exception as error:  # each plugin raises its own kind
        raise Unavailable(f"the {platform} compiler did not start: {error}") from error
    return Mesh(np.array(found.devices[:num_devices]), ("x",))


def _installed(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return False


class Spills(RuntimeError):
    """A kernel has more live values than registers."""


def compile_for(mesh: Mesh, function: Callable, *shapes: Any, refuse_spills: bool = False) -> Any:
    """`function`, compiled for the mesh's devices with operands of these shapes on each: a `jax.stages.Compiled`.

    Raises:
        Spills: with `refuse_spills`, on a GPU, if the assembler had to put registers of any kernel into memory.
            Kernels of Mosaic GPU are assembled apart: see `gpu_resources`.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    operands = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated), shapes)
    with jax.set_mesh(mesh):
        lowered = jax.jit(function).lower(*operands)
    if not refuse_spills:
        return lowered.compile()
    try:
        return lowered.compile(compiler_options={"xla_gpu_fail_ptx_compilation_on_register_spilling": True})
    except jax.errors.JaxRuntimeError as error:
        if "register spilling" in str(error):
            raise Spills(str(error)) from error
        raise


def tpu_bundles(dump: Path, kernel: str) -> list[int]:
    """Instruction bundles in the static schedule of each compiled kernel whose name contains `kernel`.

    One bundle is one cycle. The number is of the program text: a tile kernel holds its first and last step and
    both its masked and its full tile.
    """
    reports = sorted((dump / "tpu").glob(f"*{kernel}*final_hlo-static-per-bundle-utilization.txt"))
    return [sum(1 for _ in _rows(report.read_text())) for report in reports]


def _rows(report: str) -> Iterator[str]:
    for line in report.split("== UTILIZATION:\n")[-1].splitlines():
        if line.strip() and line.split()[0].isdigit():
            yield line


def gpu_resources(dump: Path) -> list[KernelResources]:
    """What was reported of the Mosaic GPU kernels compiled since the dump was last emptied."""
    found = []
    for report in sorted((dump / "gpu").glob("*.ptxas")):
        text = report.read_text()
        code = report.with_suffix(".ptx")
        assembly = code.read_text() if code.exists() else ""
        registers = re.findall(r"Used (\d+) registers", text)
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
        found.append(
            KernelResources(
                report.stem,
                max(map(int, registers), default=0),
                sum(map(int, spills)),
                assembly.count("wgmma.mma_async"),
                assembly.count("cp.async.bulk.tensor"),
            )
        )
    return found

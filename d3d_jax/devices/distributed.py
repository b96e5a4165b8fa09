"""Joining the processes of a multi-host run, before JAX starts."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from d3d_jax.errors import DeviceError

HEARTBEAT_S = 30
"""A process that has been silent for so long is taken for dead, and the others end."""
COMPILING_S = 3600
"""Processes may take so much longer than one another to compile a program."""


def join_processes(coordinator: str | None, process: str | None, *, detect: bool = False) -> None:
    """Make this process one of a multi-host run; call it before anything that touches a device.

    Args:
        coordinator: ``host:port`` of process 0, the same on every host.
        process: ``i/n``, this process and how many there are.
        detect: let JAX find the two: under SLURM, Open MPI, on GKE and on TPU VMs it can.

    Raises:
        DeviceError: for flags that do not go together, or when the others cannot be found or reached.
    """
    if detect and (coordinator or process):
        raise DeviceError("--multi-host lets JAX find the processes; leave --coordinator and --process out, or it")
    if not detect and (coordinator is None) != (process is None):
        raise DeviceError("--coordinator HOST:PORT and --process i/n go together; name both, or use --multi-host")
    if not detect and coordinator is None:
        return
    index, count = (None, None) if process is None else _parsed(process)
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise DeviceError(f"--coordinator {coordinator!r}: expected HOST:PORT of process 0, such as 10.0.0.2:1234")
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # only CPU devices ask for it
    try:
        jax.distributed.initialize(coordinator, count, index, heartbeat_timeout_seconds=HEARTBEAT_S)
    except (RuntimeError, ValueError) as error:
        how = "no SLURM, Open MPI, GKE or TPU VM was found" if detect else f"process {process} of {coordinator}"
        raise DeviceError(f"the run's processes could not be joined ({how}): {error}") from error


def compiled_together(program: Any, name: str) -> Callable[..., Any]:
    """A jitted program whose first call, in a run of several processes, waits until all of them have compiled it.

    A collective of CPU devices gives up after 30 s, and others after some minutes, when a process is not there yet,
    which one that compiles on a busy host may not be. So they meet without a collective.
    """
    if not several():
        return program
    met = False

    def call(*args: Any) -> Any:
        nonlocal met
        if not met:
            from jax._src import distributed  # JAX has no public way to its coordination service

            program.lower(*args).compile()
            service: Any = distributed.global_state.client
            service.wait_at_barrier(f"d3d_jax: {name}", 1000 * COMPILING_S)
            met = True
        return program(*args)

    return call


def this_host() -> str:
    """This process by name, such as ``host node7 (process 3 of 8)``."""
    import jax

    return f"host {platform.node()} (process {jax.process_index()} of {jax.process_count()})"


def several() -> bool:
    """Whether the run has more than this process."""
    import jax

    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that tells and writes."""
    import jax

    return jax.process_index() == 0


def _parsed(process: str) -> tuple[int, int]:
    first, _, second = process.partition("/")
    if not (first.isdigit() and second.isdigit() and int(first) < int(second)):
        raise DeviceError(f"--process {process!r}: expected i/n with 0 <= i < n, such as 0/2")
    return int(first), int(second)

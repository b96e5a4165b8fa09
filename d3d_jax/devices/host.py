"""The devices of this host: host cores counted as devices, and the choice of a kind that is really there."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from d3d_jax.errors import DeviceError

if TYPE_CHECKING:
    import jax

KINDS = ("cpu", "gpu", "tpu")
_COUNT = "--xla_force_host_platform_device_count"
_THREADS = "--xla_cpu_multi_thread_eigen"
_INSTALL = {
    "gpu": "for NVIDIA: pip install 'd3d-jax[cuda12]' or 'd3d-jax[cuda13]'",
    "tpu": "on a TPU host: pip install 'd3d-jax[tpu]'",
    "cpu": "unset JAX_PLATFORMS, which hides it",
}


def prepare_cpu(device_count: int) -> None:
    """Have JAX count this host as `device_count` devices of one thread each, so that two devices are two cores.

    XLA reads its flags when JAX starts its first backend, so this comes before anything that touches a device.
    Flags that the user has set otherwise stay. Imports nothing.

    Raises:
        DeviceError: when JAX has started already, with fewer devices or with threads that devices share.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if _backends_started():
        import jax

        there = len(jax.devices("cpu"))
        if there < device_count or f"{_THREADS}=false" not in flags:
            raise DeviceError(
                f"{device_count} CPU devices of one thread each are needed, but JAX has already started with {there}, "
                f"XLA_FLAGS={' '.join(flags)!r}; its flags are read once, at the start: call prepare_cpu before any "
                f"array is made, or set XLA_FLAGS='{_COUNT}={device_count} {_THREADS}=false'"
            )
        return
    others = [flag for flag in flags if flag.partition("=")[0] not in (_COUNT, _THREADS)]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{_COUNT}={device_count}", f"{_THREADS}=false"])


def pick_devices(kind: str | None, count: int) -> tuple[jax.Device, ...]:
    """The first `count` devices of a kind, or of the kind that JAX prefers here when `kind` is None.

    Never falls back to another kind. This starts the backend.

    Raises:
        DeviceError: naming what was found and what to install, when there are too few.
    """
    import jax

    if kind is not None and kind not in KINDS:
        raise DeviceError(f"device {kind!r} is not one of {', '.join(KINDS)}")
    if kind == "cpu" and not _backends_started():
        jax.config.update("jax_platforms", "cpu")  # leave an accelerator's memory alone
    try:
        devices = jax.devices(kind)
    except RuntimeError as error:
        wanted = kind or os.environ.get("JAX_PLATFORMS", "")
        raise DeviceError(
            f"no {wanted} device is there: JAX found {_found()}; {_INSTALL.get(wanted, 'see d3d doctor')}, "
            "or leave --device out to use what was found"
        ) from error
    if len(devices) < count:
        raise DeviceError(f"{count} {kind or devices[0].platform} devices are needed, but JAX found {_found()}")
    return tuple(devices[:count])


def device_pair(kind: str | None) -> tuple[jax.Device, jax.Device]:
    """Devices of target and drafter: two where there are two, else the one twice. Raises as :func:`pick_devices`."""
    (target,), drafter = device_groups(kind, 1)
    return target, drafter


def device_groups(kind: str | None, parts: int) -> tuple[tuple[jax.Device, ...], jax.Device]:
    """So many devices for the target, and the next one for the drafter, or the target's first where there is none.

    Raises as :func:`pick_devices`.
    """
    target = pick_devices(kind, parts)
    import jax

    return target, [*jax.devices(target[0].platform), *target][parts]


def describe(devices: tuple[jax.Device, ...]) -> str:
    """The devices in words, such as ``2 CPU devices of one thread each on 8 cores``; the same one twice counts once."""
    distinct = list(dict.fromkeys(devices))
    many = "s" if len(distinct) > 1 else ""
    if distinct[0].platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = " of one thread each" if f"{_THREADS}=false" in os.environ.get("XLA_FLAGS", "").split() else ""
        return f"CPU: {len(distinct)} host device{many}{threads}, on {cores} core{'' if cores == 1 else 's'}"
    return f"{distinct[0].platform.upper()}: {len(distinct)} x {distinct[0].device_kind}"


def processor() -> str:
    """The name of the host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def keep_programs() -> Path | None:
    """Have JAX keep compiled programs on disk, so that the next run of a command finds them.

    They go to the user's cache folder, apart for each processor, since a program for one may not run on another.
    A `JAX_COMPILATION_CACHE_DIR` in the environment wins; an empty one turns keeping off.

    Returns:
        The folder; None where the environment decides, or no folder can be made.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    import jax

    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "d3d-jax" / "programs" / hashlib.sha256(_cpu_facts().encode()).hexdigest()[:12]
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or one that cannot be written to
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder


def _cpu_facts() -> str:
    """What a program for this processor depends on: its name and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    facts = {line for line in lines if line.partition(":")[0].strip() in wanted}
    return "\n".join([processor(), platform.machine(), *sorted(facts)])


def _found() -> str:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return f"none ({error})"
    kinds = [device.platform for device in devices]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _backends_started() -> bool:
    """Whether JAX has a backend. It offers no public way to ask without starting one."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()

"""What a result was measured with: versions, revision, devices, prompts."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from d3d_jax import __version__
from d3d_jax.devices.host import describe, processor

_LIBRARIES = ("jax", "jaxlib", "flax", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of the libraries that matter for a figure."""
    found = {"python": platform.python_version(), "d3d_jax": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def git_revision() -> str | None:
    """The commit of the source tree, with ``-dirty`` where files differ from it; None outside a work tree of ours."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # an installed package may lie inside some other project's work tree
        return None
    try:
        words = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def device_facts(devices: tuple[jax.Device, jax.Device]) -> dict[str, Any]:
    """The devices of target and drafter, in words and in fields."""
    return {
        "words": describe(devices),
        "platform": devices[0].platform,
        "kind": processor() if devices[0].platform == "cpu" else devices[0].device_kind,
        "count": len(set(devices)),
        "target": str(devices[0]),
        "drafter": str(devices[1]),
    }


def prompts_hash(prompts: Sequence[Sequence[int]]) -> str:
    """sha256 of the prompts' ids: two results with the same hash decoded the same prompts."""
    return hashlib.sha256(json.dumps([list(map(int, prompt)) for prompt in prompts]).encode()).hexdigest()

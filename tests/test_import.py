"""Importing the library is light: no backend, no arrays, no heavy libraries, no wait."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Runs in a process of its own, since this one has imported everything long ago. A heavy library is charged to the
# first of our modules that brings it in.
PROBE = """
import importlib, json, pkgutil, sys, time
HEAVY = ("torch", "tensorflow", "tensorflow_datasets", "grain", "matplotlib", "tensorboard", "tensorboardX", "wandb")
import jax
start = time.perf_counter()
import d3d_jax
seconds = time.perf_counter() - start
import d3d_kernels
from jax._src import xla_bridge

names, brought, starters = [], {}, []
for package in (d3d_jax, d3d_kernels):
    names += [package.__name__]
    names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if name.endswith("__main__"):
        continue
    before = set(sys.modules)
    importlib.import_module(name)
    heavy = sorted(set(HEAVY) & (set(sys.modules) - before))
    if heavy:
        brought[name] = heavy
    if xla_bridge.backends_are_initialized() and not starters:
        starters.append(name)
print(json.dumps({
    "seconds": seconds, "names": names, "brought": brought, "starters": starters, "arrays": len(jax.live_arrays()),
}))
"""


@pytest.fixture(scope="module")
def probed() -> dict:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_takes_under_a_second(probed):
    assert probed["seconds"] < 1.0


def test_importing_every_module_starts_no_backend_and_makes_no_array(probed):
    assert len(probed["names"]) > 10  # an empty walk would prove nothing
    assert probed["starters"] == []
    assert probed["arrays"] == 0


def test_importing_every_module_loads_no_heavy_library(probed):
    assert probed["brought"] == {}

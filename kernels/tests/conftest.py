"""Tests marked `aot` compile for accelerators that are not there, in a process of their own: `make test-aot`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import pytest

from d3d_kernels import ahead_of_time

_DUMP = pytest.StashKey[Path]()


def _wanted(config: pytest.Config) -> bool:
    return config.option.markexpr.startswith("aot")


def pytest_configure(config: pytest.Config) -> None:
    """The compilers read their environment once, before the first test."""
    if _wanted(config):
        config.stash[_DUMP] = Path(mkdtemp())
        ahead_of_time.prepare(config.stash[_DUMP])


def pytest_unconfigure(config: pytest.Config) -> None:
    if _DUMP in config.stash:
        shutil.rmtree(config.stash[_DUMP], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _wanted(config):
        alone = pytest.mark.skip(reason="compiles for accelerators that are not there; run by `make test-aot`")
        for item in items:
            if item.get_closest_marker("aot"):
                item.add_marker(alone)


@pytest.fixture
def dump(pytestconfig: pytest.Config) -> Path:
    """Where the compilers' reports of this test lie; empty when it starts."""
    folder = pytestconfig.stash[_DUMP]
    shutil.rmtree(folder)
    for name in ("tpu", "gpu"):
        (folder / name).mkdir(parents=True)
    return folder


@pytest.fixture
def mesh_of() -> Callable:
    """`mesh_of("v5e")`: a mesh of one such device; skips where its compiler is not installed."""

    def make(device: str):
        try:
            if device.startswith("v"):
                return ahead_of_time.tpu_mesh(f"{device}:2x2")
            return ahead_of_time.gpu_mesh(device)
        except ahead_of_time.Unavailable as reason:
            pytest.skip(str(reason))

    return make

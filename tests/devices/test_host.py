"""Devices that are really there: flags in time, and no fallback that nobody asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from d3d_jax.devices import host
from d3d_jax.errors import DeviceError


def test_flags_set_before_jax_starts_make_as_many_devices_as_asked_for():
    code = (
        "from d3d_jax.devices.host import prepare_cpu, pick_devices\n"
        "prepare_cpu(3)\n"
        "print([len(pick_devices('cpu', 3)), len(__import__('jax').devices())])\n"
    )
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[3, 3]", done.stderr


def test_other_flags_of_the_user_stay(monkeypatch):
    monkeypatch.setattr(host, "_backends_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x --xla_cpu_multi_thread_eigen=true")
    host.prepare_cpu(2)
    assert os.environ["XLA_FLAGS"].split() == [
        "--xla_dump_to=/tmp/x",
        "--xla_force_host_platform_device_count=2",
        "--xla_cpu_multi_thread_eigen=false",
    ]


def test_too_late_is_said_with_the_reason(monkeypatch):
    assert len(jax.devices()) == 8
    host.prepare_cpu(8)  # it is as asked for
    with pytest.raises(DeviceError, match=r"9 CPU devices .* already started with 8.*read once, at the start"):
        host.prepare_cpu(9)
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(DeviceError, match="already started"):
        host.prepare_cpu(2)


@pytest.mark.parametrize(("kind", "extra"), [("gpu", r"d3d-jax\[cuda12\]"), ("tpu", r"d3d-jax\[tpu\]")])
def test_a_kind_that_is_not_there_is_refused_with_what_to_install(kind, extra):
    with pytest.raises(DeviceError, match=f"no {kind} device.*found 8 cpu.*{extra}"):
        host.pick_devices(kind, 1)
    with pytest.raises(DeviceError, match=f"no {kind} device"):
        host.device_pair(kind)


def test_too_few_and_unknown_devices_are_refused():
    with pytest.raises(DeviceError, match="9 cpu devices are needed, but JAX found 8 cpu"):
        host.pick_devices("cpu", 9)
    with pytest.raises(DeviceError, match="'npu' is not one of cpu, gpu, tpu"):
        host.pick_devices("npu", 1)


def test_a_pair_is_two_devices_or_one_twice(monkeypatch):
    assert host.device_pair("cpu") == tuple(jax.devices()[:2])
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda kind=None: one)
    assert host.device_pair("cpu") == (one[0], one[0])
    assert "1 host device" in host.describe((one[0], one[0]))


def test_compiled_programs_are_kept_unless_the_environment_decides(monkeypatch, tmp_path):
    kept = {}
    monkeypatch.setattr(jax.config, "update", kept.__setitem__)
    assert host.keep_programs() is None and kept == {}  # the tests' own setting stands
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = host.keep_programs()
    assert folder.is_dir() and tmp_path in folder.parents
    assert kept["jax_compilation_cache_dir"] == str(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert host.keep_programs() is None

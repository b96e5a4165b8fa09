"""Peak host memory of a load, in a process of its own, from the kernel's high-water mark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LARGE = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MEASURE = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from d3d_jax.checkpoints.convert import load
from d3d_jax.checkpoints.ledger import flatten

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

small, folder, dtype, shard = sys.argv[1:]
mesh = Mesh(np.array(jax.devices()), ("x",))
axis = {"vocab": "x", "mlp": "x", "heads": "x", "kv_heads": "x"}
def sharding_for(path, shape, axes):
    return NamedSharding(mesh, PartitionSpec(*(axis.get(a) for a in axes)))
options = {"dtype": dtype, "sharding_for": sharding_for if shard == "sharded" else None}
load(small, **options)  # what the first load of any size brings in is not what is measured
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
loaded = load(folder, **options)
peak = status("VmHWM") - before
sums = {".".join(path): float(np.asarray(leaf, np.float64).sum()) for path, leaf in flatten(loaded.params).items()}
result = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
largest = max(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
print(json.dumps({"peak": peak, "result": result, "largest": largest, "devices": jax.device_count(), "sums": sums}))
"""


@pytest.fixture
def folders(model_folder) -> list[Path]:
    return [model_folder("small"), model_folder("large", **LARGE)]


def measure(folders: list[Path], dtype: str, how: str) -> dict:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"} if how == "sharded" else {}
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, folders), dtype, how],
        # glibc may keep freed buffers of up to 32 MB, more than the leaves here; with a fixed threshold it gives
        # them back at once, as it does those of a real model.
        env={**os.environ, **flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "MALLOC_MMAP_THRESHOLD_": "131072"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's")
def test_a_load_holds_the_result_and_one_leaf_on_its_way(folders: list[Path]):
    stored = (folders[1] / "model.safetensors").stat().st_size
    assert stored > 120e6
    plain = measure(folders, "keep", "plain")
    sharded = measure(folders, "keep", "sharded")
    cast = measure(folders, "bfloat16", "plain")
    for name, run in (("plain", plain), ("sharded over 4", sharded), ("cast to bfloat16", cast)):
        over = (run["peak"] - run["result"]) / run["largest"]
        print(
            f"{name}: peak {run['peak'] / 1e6:.0f} MB, result {run['result'] / 1e6:.0f} MB, {over:.2f} x largest over"
        )
        assert run["peak"] < run["result"] + 1.5 * run["largest"], name
    assert sharded["devices"] == 4 and sharded["sums"] == plain["sums"]

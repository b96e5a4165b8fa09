"""Eight CPU devices for every test, set before JAX starts, and exact float32 products."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM's optimisations cost more time than these small programs ever win back.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"
)
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
# Tests compile far longer than they run: equal programs are compiled once, also across runs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "programs")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

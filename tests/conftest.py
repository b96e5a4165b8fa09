"""Eight CPU devices for every test, set before JAX starts, and exact float32 products."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"

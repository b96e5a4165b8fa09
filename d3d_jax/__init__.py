"""Block-diffusion drafting in parallel with verification, for Qwen3, in JAX.

Importing this package imports nothing else: no JAX backend starts and no device memory is taken.
The rooms are ``devices``, ``models``, ``checkpoints``, ``data``, ``acceptance``, ``training``,
``pruning``, ``decoding``, ``benchmarks`` and ``cli``; import from them directly.
"""

__version__ = "0.1.0"

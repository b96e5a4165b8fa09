"""What other libraries offer for the same attentions: yardsticks of the benchmark, nothing that d3d_kernels builds on.

None takes intervals. `jax.nn` and tokamax are given the mask written out as [T, S]; splash compiles it into its
program, which only training with the same mask in every step could use. None has keys beside a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from d3d_kernels import Intervals, dense_mask

Attend = Callable[[jax.Array, jax.Array, jax.Array, Intervals], jax.Array]
TILE = 512  # of splash; rows and keys are filled up to whole tiles


def baselines(kind: str, platform: str, intervals: Intervals, num_keys: int) -> Iterator[tuple[str, Attend | str]]:
    """(name, function) of each library, or (name, why it is left out).

    Args:
        kind: `verify` or `train`.
        intervals: those that will be measured, with values: splash needs its mask when it is compiled.
    """
    for implementation in ("xla", "cudnn") if platform == "gpu" else ("xla",):
        yield f"jax.nn {implementation}", functools.partial(of_jax, implementation=implementation)
    yield "tokamax", tokamax(platform)
    if kind == "train":
        yield "splash", splash(platform, intervals, num_keys)


def of_jax(q: jax.Array, k: jax.Array, v: jax.Array, intervals: Intervals, implementation: Any) -> jax.Array:
    """`jax.nn.dot_product_attention`."""
    return _in_their_order(functools.partial(jax.nn.dot_product_attention, implementation=implementation))(
        q, k, v, intervals
    )


def tokamax(platform: str) -> Attend | str:
    """Its kernel for the platform, or why there is none."""
    if platform == "cpu":
        return "its kernels take no CPU"
    try:
        import tokamax as library
    except ImportError as error:
        return f"not installed: {error}"
    return _in_their_order(functools.partial(library.dot_product_attention, implementation="mosaic"))


def splash(platform: str, intervals: Intervals, num_keys: int) -> Attend | str:
    """JAX's splash attention under this one mask, or why there is none."""
    if platform == "gpu":
        return "it is for TPU"
    bounds = [np.asarray(bound) for bound in intervals]
    if any((bound != bound[:1]).any() for bound in bounds):
        return "its mask is one for all rows of a batch"
    try:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
    except ImportError as error:
        return f"not in this JAX: {error}"
    queries = bounds[0].shape[1]
    tile = min(TILE, max(128, queries // 128 * 128))
    seen = np.asarray(dense_mask(Intervals(*(jnp.asarray(bound[:1]) for bound in bounds)), num_keys)[0])
    more = (-queries % tile, -num_keys % tile)
    seen = np.pad(seen, ((0, more[0]), (0, more[1])))
    seen[queries:, 0] = True  # rows of padding see something, so that no tile of them is left unwritten
    sizes = {f"block_{name}": tile for name in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, intervals: Intervals) -> jax.Array:
        group = q.shape[1] // k.shape[1]
        kernel = splash_attention_kernel.make_splash_mqa(
            splash_attention_mask.MultiHeadMask([splash_attention_mask.NumpyMask(seen)] * group),
            block_sizes=splash_attention_kernel.BlockSizes(**sizes, block_q_dq=tile, block_kv_dq=tile),
            head_shards=1,
            q_seq_shards=1,
            interpret=platform == "cpu",
        )
        rows = (q * q.shape[-1] ** -0.5).reshape(q.shape[0], k.shape[1], group, *q.shape[2:])
        rows, k, v = (jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, n), (0, 0)]) for x, n in zip(
            (rows, k, v), (more[0], more[1], more[1]), strict=True))  # fmt: skip
        return jax.vmap(jax.vmap(kernel))(rows, k, v)[..., :queries, :].reshape(q.shape)

    return attend


def _in_their_order(attention: Callable) -> Attend:
    """For functions that want [B, T, N, H] and a mask."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, intervals: Intervals) -> jax.Array:
        mask = dense_mask(intervals, k.shape[2])[:, None]
        q, k, v = (array.swapaxes(1, 2) for array in (q, k, v))
        return attention(q, k, v, mask=mask).swapaxes(1, 2)

    return attend

"""Verification and the packed pass on Hopper: few rows over a long cache, split over its keys.

One program takes 64 rows and one part of their list of key tiles. Of its two warpgroups, one keeps loads of keys and
values in flight (TMA, a ring of stages in shared memory), the other multiplies (wgmma) and keeps the softmax in
registers. Four barriers for each stage hand tiles over: keys and values, arrived and done with.

The GPU interpreter can run it: accumulators live in `run_scoped`, and the producer waits for every tile it handed over.
The interpreter takes the weights from shared memory, where the hardware takes them from registers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from d3d_kernels.intervals import Intervals
from d3d_kernels.jax_versions import load_row, transposed
from d3d_kernels.plan import Tiles, in_phases
from d3d_kernels.scores import HIDDEN, LOWEST, inside
from d3d_kernels.split_decode import DecodeShape
from d3d_kernels.tuning import MOSAIC_GPU_REGISTERS, MOSAIC_GPU_STAGES

_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)  # one number for each row of a tile
_SWIZZLE = 128  # bytes; rows of a tile are stored in pieces of so many, in the order that wgmma reads without conflicts


def decode(
    q_BKMH: jax.Array,
    sources: Sequence[tuple[jax.Array, jax.Array]],
    bounds: Intervals,
    tiles: Tiles,
    shape: DecodeShape,
    scale: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Partial results of every split: (output [splits, B, K, M, H], lse float32 [splits, B, K, M] in base 2).

    `tiles` are the lists of `splits` parts for every tile of 64 rows. With one split the output has the queries' type.
    Every source has at least as many keys as its tile. `interpret` is an `InterpretGPUParams`, or False.
    """
    batch, kv_heads, num_rows, width = q_BKMH.shape
    splits, (_, num_lists, _) = shape.splits, tiles.entry.shape
    phases = in_phases(tiles, -(-sources[0][0].shape[2] // shape.keys))
    dtype, output_dtype = q_BKMH.dtype, q_BKMH.dtype if splits == 1 else jnp.float32
    stages = MOSAIC_GPU_STAGES
    weights = (shape.rows, shape.keys) if interpret else (8, _SWIZZLE // 2)  # unused on hardware
    kernel = functools.partial(
        _kernel,
        sources=len(sources),
        num_keys=tuple(k.shape[2] for k, _ in sources),
        kv_heads=kv_heads,
        num_lists=num_lists,
        entries=tiles.entry.shape[2],
        shape=shape,
        scale=scale,
        weights_in_smem=bool(interpret),
    )
    operands = [array for source in sources for array in source]
    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((splits, *q_BKMH.shape), output_dtype),
            jax.ShapeDtypeStruct((splits, batch, kv_heads, num_rows), jnp.float32),
        ],
        grid=(num_lists, kv_heads * batch),
        grid_names=("list", "head"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[
            _tiled((shape.rows, width), dtype),
            _tiled((stages, shape.keys, width), dtype),
            _tiled((stages, shape.keys, width), dtype),
            _tiled((shape.rows, width), output_dtype),
            _tiled(weights, dtype),
            plgpu.SMEM((shape.rows,), jnp.float32),
            plgpu.SMEM((4, shape.rows), jnp.int32),
            plgpu.Barrier(num_arrivals=2),
            *[plgpu.Barrier(num_barriers=stages)] * 4,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": interpret} if interpret else {}),
    )(phases.count.reshape(-1), phases.entry.reshape(-1), jnp.stack(bounds, axis=1), q_BKMH, *operands)


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    columns = _SWIZZLE // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(_SWIZZLE)))


def _accumulator(shape: tuple[int, int]) -> Any:
    return plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def _kernel(
    ends_ref,
    entry_ref,
    bounds_ref,
    q_ref,
    *refs,
    sources,
    num_keys,
    kv_heads,
    num_lists,
    entries,
    shape,
    scale,
    weights_in_smem,
):
    key_refs, (o_ref, lse_ref), scratch = (
        refs[: 2 * sources],
        refs[2 * sources : 2 * sources + 2],
        refs[2 * sources + 2 :],
    )
    q_smem, k_smem, v_smem, o_smem, weight_smem, lse_smem, bounds_smem, ready, *rings = scratch
    k_full, v_full, k_free, v_free = rings
    stages, width = k_smem.shape[0], q_smem.shape[1]
    listed, head = lax.axis_index("list"), lax.axis_index("head")
    b, h = lax.div(head, jnp.int32(kv_heads)), lax.rem(head, jnp.int32(kv_heads))
    rows = pl.ds(lax.div(listed, jnp.int32(shape.splits)) * shape.rows, shape.rows)
    split = lax.rem(listed, jnp.int32(shape.splits))
    at = b * num_lists + listed
    ends = [ends_ref[at * 3 + phase] for phase in range(3)]
    cache_tiles = -(-num_keys[0] // shape.keys)

    def first_key(n: jax.Array, source: int) -> tuple[jax.Array, jax.Array]:
        """(first key of entry n, where its tile is read): a tile that would reach over the end is moved back."""
        first = (lax.shift_right_logical(entry_ref[at * entries + n], 1) - source * cache_tiles) * shape.keys
        return first, jnp.minimum(first, num_keys[source] - shape.keys)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _load():
        plgpu.set_max_registers(MOSAIC_GPU_REGISTERS[1], action="decrease")
        plgpu.copy_gmem_to_smem(q_ref.at[b, h, rows], q_smem, ready)
        plgpu.copy_gmem_to_smem(bounds_ref.at[b, :, rows], bounds_smem, ready)

        def load(source: int, n: jax.Array, _: None) -> None:
            slot = lax.rem(n, jnp.int32(stages))
            keys = pl.ds(first_key(n, source)[1], shape.keys)
            for ref, smem, full, free in zip(
                key_refs[2 * source : 2 * source + 2], (k_smem, v_smem), (k_full, v_full), (k_free, v_free), strict=True
            ):
                pl.when(n >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(ref.at[b, h, keys], smem.at[slot], full.at[slot])

        def drain(n: jax.Array, _: None) -> None:
            slot = lax.rem(n, jnp.int32(stages))
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.barrier_wait(v_free.at[slot])

        lax.fori_loop(0, ends[1], functools.partial(load, 0), None)
        if sources > 1:
            lax.fori_loop(ends[1], ends[2], functools.partial(load, 1), None)
        lax.fori_loop(jnp.maximum(0, ends[2] - stages), ends[2], drain, None)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _multiply():
        plgpu.set_max_registers(MOSAIC_GPU_REGISTERS[0], action="increase")
        plgpu.barrier_wait(ready)
        tile = (shape.rows, shape.keys)
        bounds = [lax.broadcast_in_dim(load_row(bounds_smem, i, _ROW), tile, [0]) for i in range(4)]

        def add(masked: bool, source: int, n: jax.Array, state: tuple) -> tuple:
            before, total, output = state
            slot = lax.rem(n, jnp.int32(stages))
            plgpu.barrier_wait(k_full.at[slot])

            def multiply_keys(acc: Any) -> jax.Array:
                plgpu.wgmma(acc, q_smem, transposed(k_smem.at[slot]))
                return acc[...]

            score = pl.run_scoped(multiply_keys, _accumulator(tile)) * scale
            plgpu.barrier_arrive(k_free.at[slot])
            if masked:
                first, read = first_key(n, source)
                key = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=_TILE) + read
                seen = (key >= first) & inside(key + source * num_keys[0], *bounds)
                score = jnp.where(seen, score, HIDDEN)
            highest = jnp.maximum(before, score.max(axis=1))
            weight = jnp.exp2(score - lax.broadcast_in_dim(highest, tile, [0]))
            shrink = jnp.exp2(before - highest)
            total = total * shrink + weight.sum(axis=1)
            output = output * lax.broadcast_in_dim(shrink, (shape.rows, width), [0])
            weight = weight.astype(q_smem.dtype)
            plgpu.barrier_wait(v_full.at[slot])
            if weights_in_smem:
                weight_smem[...] = weight
                plgpu.commit_smem()

            def multiply_values(acc: Any) -> jax.Array:
                plgpu.wgmma(acc, weight_smem if weights_in_smem else weight, v_smem.at[slot])
                return acc[...]

            output = output + pl.run_scoped(multiply_values, _accumulator((shape.rows, width)))
            plgpu.barrier_arrive(v_free.at[slot])
            return highest, total, output

        def filled(size: tuple[int, ...], value: float, layout: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full(size, value, jnp.float32), layout)

        row = (shape.rows,)
        state = filled(row, LOWEST, _ROW), filled(row, 0.0, _ROW), filled((shape.rows, width), 0.0, _TILE)
        state = lax.fori_loop(0, ends[0], functools.partial(add, True, 0), state)
        state = lax.fori_loop(ends[0], ends[1], functools.partial(add, False, 0), state)
        if sources > 1:
            state = lax.fori_loop(ends[1], ends[2], functools.partial(add, True, 1), state)
        highest, total, output = state
        some = total > 0
        total = jnp.where(some, total, 1.0)
        o_smem[...] = (output / lax.broadcast_in_dim(total, (shape.rows, width), [0])).astype(o_smem.dtype)
        lse_smem[...] = jnp.where(some, highest + jnp.log2(total), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_ref.at[split, b, h, rows])
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[split, b, h, rows])
        plgpu.wait_smem_to_gmem(0)

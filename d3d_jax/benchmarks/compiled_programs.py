"""Whole programs of a decode round, compiled for accelerators that are not there, and what they do to memory.

Shapes only: no weight is made. The programs are those that the engine runs, with their donated caches, and the layout
is that of the decoding form over `tensor`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from d3d_jax.config import AttentionConfig, DecodeConfig, DrafterConfig, ModelConfig
from d3d_jax.decoding.asynchronous import packed_after
from d3d_jax.decoding.autoregressive import decode_autoregressively
from d3d_jax.decoding.placement import STOP_IDS
from d3d_jax.decoding.policies import Tactic
from d3d_jax.decoding.programs import Drafting, no_successors
from d3d_jax.decoding.rounds import Until, verify_recorded
from d3d_jax.decoding.state import DraftState, Outcome, Stop
from d3d_jax.devices.mesh import AXES
from d3d_jax.devices.sharding import spec, tree_shardings
from d3d_jax.errors import ConfigError
from d3d_jax.models.cache import KVCache, empty_cache
from d3d_jax.models.layers import Param
from d3d_jax.models.qwen3 import decoding_table
from d3d_kernels import ahead_of_time, compiled_text

BLOCK, CAPACITY, TOKEN_IDS = 16, 8192, 151_669
BACKENDS = {"h200": "mosaic_gpu", "v5e": "mosaic_tpu", "v6e": "mosaic_tpu"}
# Devices that a model in bfloat16, with a cache, is cut over: a v5e has 16 GB, a v6e 32, an H200 141.
PARTS = {
    "h200": {"8B": 1, "1.7B": 1, "32B": 2},
    "v6e": {"8B": 1, "1.7B": 1, "32B": 4},
    "v5e": {"8B": 2, "1.7B": 1, "32B": 8},
}
MAX_TEMPORARY = 300e6  # bytes beyond the logits
MAX_TRAFFIC = 1.15  # times weights and cache


class Case(NamedTuple):
    """`program`: `ar`, `verify`, `packed` (all outcomes) or `packed-M`; `device` and `model` are keys of `PARTS`."""

    device: str
    model: str
    program: str

    def __str__(self) -> str:
        return ":".join(self)

    @classmethod
    def parse(cls, text: str) -> Case:
        """Raises ConfigError for a text that is no `device:model:program`."""
        parts = text.split(":")
        known = len(parts) == 3 and parts[1] in PARTS.get(parts[0], {})
        if not known or re.fullmatch(r"ar|verify|packed|packed-([1-9]|1[0-6])", parts[2]) is None:
            raise ConfigError(
                f"case {text!r} is no device:model:program; devices {', '.join(PARTS)}, "
                f"models {', '.join(PARTS['h200'])}, programs ar, verify, packed, packed-M"
            )
        return cls(*parts)


CASES = tuple(
    Case(device, model, program)
    for device in PARTS
    for model, programs in (
        ("8B", ("ar", "verify", "packed", "packed-4")),
        ("1.7B", ("packed", "packed-4")),
        ("32B", ("ar", "verify")),
    )
    for program in programs
)


def mesh_of(case: Case) -> Mesh:
    """Devices that are not there. Raises `ahead_of_time.Unavailable`."""
    count = PARTS[case.device][case.model]
    if case.device == "h200":
        devices = ahead_of_time.gpu_mesh("h200", count).devices
    else:
        devices = ahead_of_time.tpu_mesh(f"{case.device}:{'2x4' if count > 4 else '2x2'}", count).devices
    return Mesh(devices.reshape(1, 1, count), AXES, axis_types=(AxisType.Auto,) * 3)


def program(case: Case, config: ModelConfig, mesh: Mesh) -> tuple[Callable, tuple, int]:
    """The function, the shapes of its operands as they lie on the mesh, and which of them is donated."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def small(*dims: int, dtype: Any = jnp.int32) -> Any:  # a shape that plays an array
        return jax.ShapeDtypeStruct(dims, dtype, sharding=everywhere)

    table = decoding_table(config)
    params = jax.tree.map(
        lambda param, place: jax.ShapeDtypeStruct(param.shape, jnp.bfloat16, sharding=place),
        table,
        tree_shardings(mesh, table),
        is_leaf=lambda node: isinstance(node, Param),
    )
    shapes = jax.eval_shape(lambda: empty_cache(config, 1, CAPACITY, jnp.bfloat16))
    slots = NamedSharding(mesh, spec((None, "kv_heads")))
    split = partial(jax.tree.map, lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=slots))
    cache = KVCache(split(shapes.k), split(shapes.v), small(1))
    attention = AttentionConfig(BACKENDS[case.device])  # pyright: ignore[reportArgumentType]
    outcome, stop = Outcome(small(1), small(1), small(1, dtype=bool)), Stop(small(1, STOP_IDS), small(1))
    block = small(1, BLOCK)
    fixed = {"config": config, "attention": attention}
    if case.program == "ar":
        until = Until(small(), small())
        return partial(decode_autoregressively, **fixed), (params, cache, outcome, None, stop, until), 1
    if case.program == "verify":
        hit = small(1, dtype=bool)
        return partial(verify_recorded, **fixed), (params, block, hit, outcome, cache, None, stop), 4
    decode = DecodeConfig(block_size=BLOCK, outcomes=outcomes_of(case))
    how = Drafting(config, DrafterConfig(BLOCK, TOKEN_IDS), decode, TOKEN_IDS, attention)
    odds = jax.eval_shape(lambda: no_successors(how, 1)[0])
    of_all = jax.tree.map(lambda array: small(*array.shape, dtype=array.dtype), odds)
    of_block = jax.tree.map(lambda array: small(1, *array.shape[2:], dtype=array.dtype), of_all)
    state = DraftState(cache, of_all)
    packed = partial(packed_after, how=how, tactic=Tactic(True, outcomes_of(case)))
    return packed, (params, block, of_block, outcome, state, None), 4


def outcomes_of(case: Case) -> Any:
    """As `DecodeConfig.outcomes`."""
    _, _, some = case.program.partition("-")
    return int(some) if some else "all"


def compile_case(case: Case, config: ModelConfig, layers: int | None = None) -> dict[str, Any]:
    """Compile one program and read what it does.

    Args:
        layers: so many layers instead of the model's own; each is like the others.

    Returns:
        Sizes in bytes on one device, seconds, the numbers of collectives, and `faults`: sentences, one for each limit
        that the program breaks.

    Raises:
        ahead_of_time.Unavailable: no compiler for the device.
    """
    config = config if layers is None else replace(config, num_hidden_layers=layers)
    mesh = mesh_of(case)
    function, operands, donated = program(case, config, mesh)
    begin = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = jax.jit(function, donate_argnums=donated).lower(*operands)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()

    memory: Any = compiled.memory_analysis()
    text = compiled_text.parse(compiled.as_text() or "")
    params, cache = operands[0], next(part for part in operands if isinstance(part, KVCache | DraftState))
    cache = cache.cache if isinstance(cache, DraftState) else cache
    matrices = [_part(leaf) for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 1]
    slots = [_part(leaf) for leaf in (*cache.k, *cache.v)]
    parts = mesh.size
    head = 2 * config.vocab_size * config.hidden_size // parts
    rows = {"ar": 1, "verify": BLOCK}.get(case.program, 0) or BLOCK * _count(case)
    found = {
        "case": str(case),
        "devices": parts,
        "layers": config.num_hidden_layers,
        "weights": sum(matrices) + head,
        "cache": sum(slots),
        "logits": 4 * rows * config.vocab_size // parts,
        "temporary": memory.temp_size_in_bytes,
        "in_place": memory.alias_size_in_bytes,
        "copies": compiled_text.copies(text, min(*matrices, *slots) // 2),
        "collectives": dict(compiled_text.collectives(text)),
        "traffic": compiled_text.main_memory_bytes(text),
        "lower_s": middle - begin,
        "compile_s": end - middle,
    }
    return {**found, "faults": faults(found, case)}


def _count(case: Case) -> int:
    return BLOCK if outcomes_of(case) == "all" else outcomes_of(case)


def _part(leaf: Any) -> int:
    """Bytes of an array on one device."""
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def faults(found: dict[str, Any], case: Case) -> list[str]:
    """What a compiled program does that it should not."""
    beyond, needed = found["temporary"] - found["logits"], found["weights"] + found["cache"]
    sums = 2 * found["layers"] + 1  # of each attention and each feed-forward, and the embedding's
    exchanged = sum(found["collectives"].values())
    checks = [
        (not found["copies"], f"copies as large as a weight or a cache: {found['copies'][:3]}"),
        (found["in_place"] >= found["cache"], f"{found['in_place']} bytes in place; the cache has {found['cache']}"),
        (beyond <= MAX_TEMPORARY, f"{beyond / 1e6:.0f} MB of temporaries beyond the logits"),
        # On a GPU the text says too little: what a fused product keeps on the chip has no place of its own.
        (case.device == "h200" or found["traffic"] <= MAX_TRAFFIC * needed, f"moves {found['traffic'] / needed:.2f}x"),
        (found["devices"] == 1 or exchanged <= sums + 4, f"{exchanged} exchanges between devices; {sums} are sums"),
    ]
    return [text for fine, text in checks if not fine]


def as_table(results: list[dict[str, Any]]) -> str:
    """Markdown: one row for each program."""
    lines = [
        "| device | model | program | devices | weights + cache | temporaries | logits | traffic | exchanges |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        case = Case.parse(one["case"])
        needed = one["weights"] + one["cache"]
        traffic = "not read" if case.device == "h200" else f"{one['traffic'] / needed:.3f}x"
        exchanges = ", ".join(f"{count} {kind}" for kind, count in one["collectives"].items()) or "none"
        sizes = f"{needed / 1e6:,.0f} MB | {one['temporary'] / 1e6:,.0f} MB | {one['logits'] / 1e6:,.1f} MB"
        lines.append(f"| {' | '.join(case)} | {one['devices']} | {sizes} | {traffic} | {exchanges} |")
    return "\n".join(lines)

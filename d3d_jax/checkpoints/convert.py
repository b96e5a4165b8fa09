"""A Hugging Face folder -> the parameter tree, shard by shard, each piece straight to where it belongs.

Opening a folder matches its tensors with the model (`ledger.py`) and reads no tensor. Loading fills one leaf
at a time: one host buffer of the leaf, or of one device's part of it, then the device, then the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from d3d_jax.checkpoints.hf_config import read_model_config
from d3d_jax.checkpoints.ledger import Ledger, LmHead, leaves, make_ledger, nest, slots
from d3d_jax.checkpoints.names import Slot
from d3d_jax.checkpoints.safetensors_io import TensorFolder
from d3d_jax.config import ModelConfig
from d3d_jax.errors import CheckpointError, ConfigError
from d3d_jax.models.layers import Param

DTYPES = ("float32", "bfloat16", "float16")
ShardingFor = Callable[[tuple[str, ...], tuple[int, ...], tuple[str, ...]], jax.sharding.Sharding]
"""(path, shape, logical axes) of a leaf -> where it lies."""


class Loaded(NamedTuple):
    """Parameters, the config they have after padding and untying, and the proof that all of them fit."""

    params: dict[str, Any]
    config: ModelConfig
    ledger: Ledger


class Source:
    """A model folder whose tensors have been matched with the parameters; nothing is loaded yet.

    `config` is that of the parameters that come out: padded and untied as asked.

    Raises:
        CheckpointError: on opening, when the folder is incomplete or does not fit `config`.
        ConfigError: when `pad_vocab_to` is below the rows that are there.
    """

    def __init__(
        self,
        folder: str | Path,
        config: ModelConfig | None = None,
        *,
        lm_head: LmHead = "strict",
        pad_vocab_to: int | None = None,
    ):
        config = read_model_config(folder) if config is None else config
        self.tensors = TensorFolder(folder)
        self.ledger, config = make_ledger(
            self.tensors, config, source=str(self.tensors.source), lm_head=lm_head, equal=self.tensors.equal
        )
        if pad_vocab_to is not None and pad_vocab_to < config.vocab_size:
            raise ConfigError(f"pad_vocab_to={pad_vocab_to} is below the {config.vocab_size} rows that are there")
        self.config = dataclasses.replace(config, vocab_size=pad_vocab_to or config.vocab_size)

    def read_into(self, slot: Slot, out: np.ndarray, index: tuple[slice, ...] = ()) -> None:
        """Fill `out` with a slice of what belongs in `slot`, cast to its type; padding rows are zero."""
        name = self.ledger.sources[slot]
        stored_rows = self.tensors[name].shape[0]
        start = (index[0].start if index else 0) or 0
        have = max(0, min(len(out), stored_rows - start))
        out[have:] = 0
        if have:
            self.tensors.read_into(name, out[:have], (slice(start, start + have), *index[1:]))

    def leaf(self, path: tuple[str, ...], param: Param, dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
        """A new host array with ``leaf[index]``; for stacked leaves the layers are read into it one by one."""
        spans = [range(*part.indices(size)) for part, size in zip(index, param.shape, strict=True)]
        out = np.empty([len(span) for span in spans], dtype)
        parts = slots(path, param)
        whole = tuple(slice(span.start, span.stop) for span in spans)
        if parts[0].layer is None:
            self.read_into(parts[0], out, whole)
        else:
            for row, layer in enumerate(spans[0]):
                self.read_into(parts[layer], out[row], whole[1:])
        return out

    def leaf_dtype(self, path: tuple[str, ...], param: Param) -> np.dtype:
        """The type of the stored tensors of a leaf.

        Raises:
            CheckpointError: when they differ, so that no type can be kept.
        """
        kinds = {self.tensors[self.ledger.sources[slot]].dtype for slot in slots(path, param)}
        if len(kinds) > 1:
            found = ", ".join(sorted(map(str, kinds)))
            raise CheckpointError(f"{'.'.join(path)} is stored as {found} in its layers; choose one dtype for all")
        return kinds.pop()


def load(
    folder: str | Path,
    config: ModelConfig | None = None,
    *,
    dtype: Any,
    sharding_for: ShardingFor | None = None,
    lm_head: LmHead = "strict",
    pad_vocab_to: int | None = None,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> Loaded:
    """Read a Hugging Face folder into the stacked parameter tree.

    Beside what is already loaded the host holds one leaf at a time, or with `sharding_for` one device's part
    of one leaf; parts that several devices share are read once.

    Args:
        folder: config.json and safetensors files.
        config: that of the folder when None.
        dtype: of every parameter, such as ``jnp.bfloat16``; "keep" or None keeps the stored types.
        sharding_for: where each leaf goes; the default device when None.
        lm_head: what to do with a stored output matrix of a tied model, see `ledger.LmHead`.
        pad_vocab_to: rows V of embedding and output matrix; added rows are zero and their ids mean nothing.
        on_tensor: called with the name of each stored tensor once it is in place.

    Returns:
        The parameters (see `models.qwen3.parameter_table` for tree and shapes), their config, the ledger.

    Raises:
        CheckpointError: for an incomplete folder, or with every tensor that is missing, left over, doubled or
            of another shape; before any tensor is loaded.
        ConfigError: for a config.json that cannot be used.
    """
    source = Source(folder, config, lm_head=lm_head, pad_vocab_to=pad_vocab_to)
    params = fill(source, dtype=dtype, sharding_for=sharding_for, on_tensor=on_tensor)
    return Loaded(params, source.config, source.ledger)


def fill(
    source: Source,
    *,
    dtype: Any,
    sharding_for: ShardingFor | None = None,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """The parameter tree of an opened folder; see :func:`load`."""
    table = leaves(source.config)
    kinds = {path: as_dtype(dtype) or source.leaf_dtype(path, param) for path, param in table.items()}
    placed: dict[tuple[str, ...], jax.Array] = {}
    for path, param in table.items():
        sharding = sharding_for(path, param.shape, param.axes) if sharding_for else None
        placed[path] = _place(source, path, param, kinds[path], sharding)
        for slot in slots(path, param):
            on_tensor(source.ledger.sources[slot])
    return nest(placed)


def load_params(folder: str | Path, config: ModelConfig | None = None, *, dtype: Any, **options: Any) -> dict[str, Any]:
    """The parameters alone; arguments and errors are those of :func:`load`."""
    return load(folder, config, dtype=dtype, **options).params


def as_dtype(dtype: Any) -> np.dtype | None:
    """`dtype` as a numpy type; None for "keep" or None.

    Raises:
        ConfigError: when it is none of :data:`DTYPES`.
    """
    if dtype is None or (isinstance(dtype, str) and dtype == "keep"):
        return None
    try:
        kind = jax.numpy.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.name not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}; expected one of keep, {', '.join(DTYPES)}")
    return kind


def _place(
    source: Source, path: tuple[str, ...], param: Param, dtype: np.dtype, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    if sharding is None:
        everything = tuple(slice(None) for _ in param.shape)
        return jax.block_until_ready(jax.device_put(source.leaf(path, param, dtype, everything)))
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}  # (start, stop) of each axis -> who holds that part
    for device, index in sharding.addressable_devices_indices_map(param.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), param.shape, strict=True))
        devices_of.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, devices in devices_of.items():
        host = source.leaf(path, param, dtype, tuple(slice(*bound) for bound in bounds))
        # Wait, so that the host buffer is free before the next one is filled.
        arrays += jax.block_until_ready([jax.device_put(host, device) for device in devices])
    return jax.make_array_from_single_device_arrays(param.shape, sharding, arrays)

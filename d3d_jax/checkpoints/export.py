"""The parameter tree -> a Hugging Face folder that transformers loads, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from d3d_jax.checkpoints.atomic_folder import atomic_folder
from d3d_jax.checkpoints.convert import Source, as_dtype
from d3d_jax.checkpoints.hf_config import read_drafter_config, write_config
from d3d_jax.checkpoints.ledger import check_tree, flatten, leaves, slots
from d3d_jax.checkpoints.names import Slot, name_of
from d3d_jax.checkpoints.safetensors_io import MAX_SHARD_BYTES, OutgoingTensor, cast_into, write_tensors
from d3d_jax.checkpoints.special_tokens import read_eos_ids, read_json
from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def save_params(
    folder: str | Path,
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    dtype: Any = None,
    drafter: DrafterConfig | None = None,
    tokenizer_folder: str | Path | None = None,
    eos_ids: Sequence[int] | None = None,
    extras: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> int:
    """Write parameters as a Hugging Face folder; it appears under its name only when it is complete.

    Args:
        params: the stacked tree that `config` describes; jax or numpy arrays, sharded or not, as long as this
            process can read them whole.
        dtype: of the tensors written, such as ``jnp.bfloat16``; "keep" or None keeps the parameters' own.
        drafter: makes the folder a drafter: config.json gets a `d3d_config` group.
        tokenizer_folder: where the tokenizer's files and generation_config.json are copied from.
        eos_ids: the ids that end a sequence; those of `tokenizer_folder` when None.
        extras: further config.json keys, such as `bos_token_id`.
        max_shard_bytes: data in one file at most.
        overwrite: replace a model that stands there.
        on_tensor: called with each tensor's name once it is written.

    Returns:
        How many tensors were written.

    Raises:
        CheckpointError: when the folder is not empty, or the tree is not the one that `config` describes.
        ConfigError: when the drafter does not fit the model (see `hf_config.config_mapping`).
    """
    tensors = outgoing(params, config, as_dtype(dtype))
    with atomic_folder(folder, overwrite=overwrite) as partial:
        write_side_files(
            partial,
            config,
            dominant_dtype(tensors),
            drafter=drafter,
            tokenizer_folder=tokenizer_folder,
            eos_ids=eos_ids,
            extras=extras,
        )
        write_tensors(partial, tensors, max_shard_bytes=max_shard_bytes, on_tensor=on_tensor)
    return len(tensors)


def write_side_files(
    folder: Path,
    config: ModelConfig,
    dtype: str,
    *,
    drafter: DrafterConfig | None = None,
    tokenizer_folder: str | Path | None = None,
    eos_ids: Sequence[int] | None = None,
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Everything of a model folder but the tensors: config.json, generation_config.json, tokenizer files.

    Raises:
        ConfigError: as :func:`save_params`.
    """
    generation: dict[str, Any] = {}
    if tokenizer_folder is not None:
        eos_ids = read_eos_ids(tokenizer_folder) if eos_ids is None else eos_ids
        generation = read_json(Path(tokenizer_folder) / "generation_config.json")
        for name in TOKENIZER_FILES:
            if (Path(tokenizer_folder) / name).is_file():
                shutil.copyfile(Path(tokenizer_folder) / name, folder / name)
    write_config(folder, config, dtype, drafter, eos_ids=eos_ids or (), extras=extras)
    if eos_ids:
        generation["eos_token_id"] = list(eos_ids)
    if generation:
        text = json.dumps(generation, indent=2, sort_keys=True) + "\n"
        (folder / "generation_config.json").write_text(text, encoding="utf-8")
    if drafter is not None:
        read_drafter_config(folder)  # the tokenizer, too, has a say in what the mask must not be


def outgoing(params: Mapping[str, Any], config: ModelConfig, dtype: np.dtype | None) -> list[OutgoingTensor]:
    """The stacked tree as single tensors under Hugging Face names, read only when their turn comes.

    Raises:
        CheckpointError: with every leaf that is missing, left over or of another shape.
    """
    found = flatten(params)
    check_tree({path: leaf.shape for path, leaf in found.items()}, config, "the parameter tree")
    for path, leaf in found.items():
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise CheckpointError(
                f"{'.'.join(path)} lies partly on other hosts; save a training checkpoint and export that"
            )
    return [
        _outgoing(found[path], slot, param.shape, dtype)
        for path, param in leaves(config).items()
        for slot in slots(path, param)
    ]


def outgoing_from(source: Source, dtype: np.dtype | None) -> list[OutgoingTensor]:
    """The tensors of another folder on their way through, without a tree in between."""
    return [
        _passed_on(source, slot, param.shape, dtype)
        for path, param in leaves(source.config).items()
        for slot in slots(path, param)
    ]


def dominant_dtype(tensors: Sequence[OutgoingTensor]) -> str:
    """The type of the largest tensor, which is the one config.json names."""
    return max(tensors, key=lambda tensor: tensor.nbytes).dtype.name


def _outgoing(leaf: Any, slot: Slot, shape: tuple[int, ...], dtype: np.dtype | None) -> OutgoingTensor:
    name, kind = name_of(slot), np.dtype(dtype or leaf.dtype)

    def read() -> np.ndarray:
        values = np.asarray(leaf if slot.layer is None else leaf[slot.layer])
        if values.dtype == kind:
            return values
        out = np.empty(values.shape, kind)
        cast_into(out, values, name)
        return out

    return OutgoingTensor(name, shape if slot.layer is None else shape[1:], kind, read)


def _passed_on(source: Source, slot: Slot, shape: tuple[int, ...], dtype: np.dtype | None) -> OutgoingTensor:
    shape = shape if slot.layer is None else shape[1:]
    kind = np.dtype(dtype or source.tensors[source.ledger.sources[slot]].dtype)

    def read() -> np.ndarray:
        out = np.empty(shape, kind)
        source.read_into(slot, out)
        return out

    return OutgoingTensor(name_of(slot), shape, kind, read)

"""What a training run needs, read and checked before any device works."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from d3d_jax.checkpoints.hf_config import read_model_config
from d3d_jax.checkpoints.special_tokens import check_mask_id, read_eos_ids, read_pad_ids
from d3d_jax.config import ModelConfig, TrainConfig, to_mapping
from d3d_jax.data.arrangement import PackingReport
from d3d_jax.data.builder import dataset_tokenizer
from d3d_jax.data.chat import load_tokenizer, tokenizer_hash
from d3d_jax.data.loader import Batches, BlockArguments
from d3d_jax.data.rows import Rows
from d3d_jax.data.sources import load_documents
from d3d_jax.devices.sharding import BATCH
from d3d_jax.errors import ConfigError
from d3d_jax.models.attention import ATTENTION, resolve_attention
from d3d_jax.training.loss import position_decay
from d3d_jax.training.state import check_frozen


@dataclass(frozen=True)
class Plan:
    """Everything a run needs, checked before any device work.

    held_out: the rows of `validation`, in which acceptance is measured. num_token_ids: ids that the tokenizer has;
    where none is named, all that the model has.
    """

    config: TrainConfig
    model: ModelConfig
    contract: dict[str, Any]
    train: Batches
    validation: Batches | None
    held_out: Rows | None
    report: PackingReport
    num_token_ids: int


def plan_run(config: TrainConfig) -> Plan:
    """Read the data and check that the run can be done.

    Raises:
        ConfigError, DataError: what was found, what was expected, what to do.
    """
    if (config.model is None) == (config.init is None):
        raise ConfigError("set exactly one of `model` (fresh weights) and `init` (a HF folder to start from)")
    model = config.model if config.init is None else read_model_config(config.init)
    assert model is not None
    if config.init_layers is not None:
        layers = config.init_layers
        if config.init is None or not layers or not all(0 <= i < model.num_hidden_layers for i in layers):
            raise ConfigError(f"init_layers={layers} must pick layers 0..{model.num_hidden_layers - 1} of init")
        model = replace(model, num_hidden_layers=len(layers))
    if config.objective == "d3d":
        _check_mask(config, model)
        position_decay(config.blocks.block_size, config.loss)
    check_frozen(config.frozen, model)
    resolve_attention(config.attention, ATTENTION, model, config.dtype)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    blocks = None
    if config.objective == "d3d":
        b = config.blocks
        shares = (b.visible_none, b.visible_one)
        blocks = BlockArguments(b.block_size, b.blocks_per_row, b.starts, shares, b.visible_decay, b.noise)

    made_with = tokenizer_hash(config.tokenizer) if config.tokenizer else None
    for path in filter(os.path.isdir, (*sources(config.train_data), *sources(config.validation_data))):
        found = dataset_tokenizer(path)
        if made_with is not None and found != made_with:
            raise ConfigError(
                f"{path} was made with another tokenizer than {config.tokenizer}; name the one it was made with, or "
                "build it again with `d3d dataset`"
            )
        made_with = found

    def batches(
        data: str | tuple[str, ...],
        seed: int,
        blocks: BlockArguments | None,
        prefetch: bool = False,
        top: bool = False,
    ) -> tuple[Batches, Rows]:
        documents = load_documents(sources(data), tokenizer, model.vocab_size, top=top)
        rows = Rows(documents, config.row_length, config.seed)
        process = (jax.process_index(), jax.process_count())
        return Batches(rows, config.batch_size, seed, *process, blocks=blocks, prefetch=prefetch), rows

    if config.loss.kd_weight and config.objective != "d3d":
        raise ConfigError("loss.kd_weight distils a drafter's blocks; leave it out with objective 'ar'")
    train, rows = batches(config.train_data, config.seed, blocks, prefetch=True, top=config.loss.kd_weight > 0)
    validation, held_out = None, None
    if config.validation_data:
        as_in_use = None if blocks is None else replace(blocks, noise="full")
        validation, held_out = batches(config.validation_data, config.seed + 1, as_in_use)
    num_token_ids = model.vocab_size if tokenizer is None else len(tokenizer)
    contract = {
        "objective": config.objective,
        "model": to_mapping(model),
        "block_size": config.blocks.block_size if config.objective == "d3d" else None,
        "mask_token_id": config.mask_token_id,
        "block_attention": config.block_attention,
        # Without what came later and is unused, as in older runs.
        "loss": {name: value for name, value in to_mapping(config.loss).items() if name != "kd_weight" or value},
        "optimizer": to_mapping(config.optimizer),
        "steps": config.steps,
        "batch_size": config.batch_size,
        "row_length": config.row_length,
        "seed": config.seed,
        "tokenizer": made_with,
        # None where unused, as in runs from before there were these two.
        "frozen": sorted(config.frozen) or None,
        "ema_decay": config.ema_decay,
    }
    return Plan(config, model, contract, train, validation, held_out, rows.report, num_token_ids)


def sources(data: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The files and folders that a setting of the run names."""
    named = () if data is None else (data,) if isinstance(data, str) else data
    if len(named) > len(set(named)) or data == ():
        raise ConfigError(f"data {list(named)}: expected at least one file or folder, each named once")
    return named


def _check_mask(config: TrainConfig, model: ModelConfig) -> None:
    if config.mask_token_id is None:
        raise ConfigError(
            f"objective 'd3d' needs mask_token_id: a row 0..{model.vocab_size - 1} of the embedding that no text uses, "
            "usually the first one past the tokenizer (Qwen3: 151669)"
        )
    folders = [folder for folder in (config.init, config.tokenizer) if folder is not None]
    ends = [i for folder in folders for i in read_eos_ids(folder)]
    padding = [i for folder in folders for i in read_pad_ids(folder)]
    check_mask_id(config.mask_token_id, model.vocab_size, ends, padding)


def check_batch(config: TrainConfig, mesh: Mesh) -> None:
    """Refuse a batch whose rows cannot be dealt out evenly over `data` and `fsdp`."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.batch_size % (parts * config.micro_batches):
        times = f", times micro_batches={config.micro_batches}" if config.micro_batches > 1 else ""
        where = f"the {parts} parts of the mesh {dict(mesh.shape)}{times}"
        raise ConfigError(
            f"batch_size={config.batch_size} does not divide by {where}; "
            f"use a multiple of {parts * config.micro_batches}, or another mesh"
        )
    local, mine = config.batch_size // jax.process_count(), set()
    for place in NamedSharding(mesh, BATCH).addressable_devices_indices_map((config.batch_size,)).values():
        assert place is not None  # only this process's devices are asked for
        mine |= set(range(*place[0].indices(config.batch_size)))
    if mine != set(range(jax.process_index() * local, (jax.process_index() + 1) * local)):
        raise ConfigError(
            f"mesh {dict(mesh.shape)}: the rows of a batch do not lie with the {jax.process_count()} processes one "
            f"behind the other; keep `tensor` within the {jax.local_device_count()} devices of a process"
        )

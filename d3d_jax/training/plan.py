"""What a training run needs, read and checked before any device works."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from d3d_jax.checkpoints.hf_config import read_model_config
from d3d_jax.checkpoints.special_tokens import check_mask_id, read_eos_ids, read_pad_ids
from d3d_jax.config import ModelConfig, TrainConfig, to_mapping
from d3d_jax.data.arrangement import PackingReport
from d3d_jax.data.builder import dataset_tokenizer
from d3d_jax.data.chat import load_tokenizer, tokenizer_hash
from d3d_jax.data.documents import load_documents
from d3d_jax.data.loader import Batches, BlockArguments
from d3d_jax.data.rows import Rows
from d3d_jax.devices.sharding import BATCH
from d3d_jax.errors import ConfigError
from d3d_jax.models.attention import ATTENTION, resolve_attention
from d3d_jax.training.loss import position_decay
from d3d_jax.training.state import check_frozen


@dataclass(frozen=True)
class Plan:
    """Everything a run needs, checked before any device work."""

    config: TrainConfig
    model: ModelConfig
    contract: dict[str, Any]
    train: Batches
    validation: Batches | None
    report: PackingReport


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
        blocks = BlockArguments(b.block_size, b.blocks_per_row, b.starts, shares, b.visible_decay)

    made_with = tokenizer_hash(config.tokenizer) if config.tokenizer else None
    for path in (config.train_data, config.validation_data):
        if path is None or not Path(path).is_dir():
            continue
        found = dataset_tokenizer(path)
        if made_with is not None and found != made_with:
            raise ConfigError(
                f"{path} was made with another tokenizer than {config.tokenizer}; name the one it was made with, or "
                "build it again with `d3d dataset`"
            )
        made_with = found

    def batches(path: str, seed: int, prefetch: bool) -> tuple[Batches, PackingReport]:
        rows = Rows(load_documents(path, tokenizer, model.vocab_size), config.row_length, config.seed)
        process = (jax.process_index(), jax.process_count())
        return Batches(rows, config.batch_size, seed, *process, blocks=blocks, prefetch=prefetch), rows.report

    train, report = batches(config.train_data, config.seed, True)
    validation = batches(config.validation_data, config.seed + 1, False)[0] if config.validation_data else None
    contract = {
        "objective": config.objective,
        "model": to_mapping(model),
        "block_size": config.blocks.block_size if config.objective == "d3d" else None,
        "mask_token_id": config.mask_token_id,
        "block_attention": config.block_attention,
        "loss": to_mapping(config.loss),
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
    return Plan(config, model, contract, train, validation, report)


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

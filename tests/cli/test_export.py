from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml

from d3d_jax.checkpoints.convert import load
from d3d_jax.checkpoints.export import save_params
from d3d_jax.checkpoints.hf_config import has_drafter_config, read_drafter_config
from d3d_jax.checkpoints.special_tokens import read_eos_ids
from d3d_jax.cli import export
from d3d_jax.config import DrafterConfig, ModelConfig, RopeConfig, TrainConfig, to_mapping
from d3d_jax.errors import CheckpointError, ConfigError
from d3d_jax.models.qwen3 import init_params

CONFIG = ModelConfig(64, 32, 48, 3, 4, 2, 16, rope=RopeConfig(1e6), tie_word_embeddings=True)


def d3d_export(*words: Any) -> int:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return export.run(parser.parse_args([str(word) for word in words]))


def write_run(folder: Path, config: TrainConfig, model: ModelConfig = CONFIG, steps: tuple[int, ...] = (5, 10)) -> Path:
    """A run as `d3d train` leaves it, whose parameters at a step are those of that seed."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(to_mapping(config)))
    drafts = config.objective == "d3d"
    contract = {
        "objective": config.objective,
        "model": to_mapping(model),
        "block_size": config.blocks.block_size if drafts else None,
        "mask_token_id": config.mask_token_id,
        "block_attention": config.block_attention,
    }
    with ocp.CheckpointManager(folder / "checkpoints", item_names=("state", "contract")) as manager:
        for step in steps:
            params = init_params(model, seed=step)
            state = {"params": params, "opt_state": (jnp.zeros(3), params), "step": jnp.int32(step)}
            items = {"state": ocp.args.StandardSave(state), "contract": ocp.args.JsonSave(contract)}
            manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 60, "content": "<|im_end|>"}]}')
    return folder


@pytest.fixture
def plain(tmp_path: Path, tokenizer: Path) -> TrainConfig:
    return TrainConfig("ar", "train.jsonl", str(tmp_path / "run"), 10, 2, model=CONFIG, tokenizer=str(tokenizer))


def assert_same(first: Any, second: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), first, second)


def test_the_newest_step_becomes_a_model_folder_that_ends_where_the_tokenizer_does(tmp_path: Path, plain, capsys):
    assert d3d_export(write_run(tmp_path / "run", plain), tmp_path / "out") == 0
    loaded = load(tmp_path / "out", dtype="keep")
    assert loaded.config == CONFIG
    assert_same(loaded.params, init_params(CONFIG, seed=10))
    assert not has_drafter_config(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file() and read_eos_ids(tmp_path / "out") == (60,)
    assert "step 10: 35 tensors written" in capsys.readouterr().out


def test_an_earlier_step_can_be_named_and_one_that_is_not_there_is_refused(tmp_path: Path, plain):
    run = write_run(tmp_path / "run", plain)
    d3d_export(run, tmp_path / "out", "--step", 5, "--dtype", "bfloat16")
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init_params(CONFIG, seed=5))
    assert_same(load(tmp_path / "out", dtype="keep").params, expected)
    with pytest.raises(CheckpointError, match="no complete step 7; complete steps: 5, 10"):
        d3d_export(run, tmp_path / "other", "--step", 7)


def test_a_drafter_keeps_mask_block_and_the_layers_of_the_model_it_was_pruned_from(tmp_path: Path, plain):
    """Pruned twice: layers 0, 2 of a drafter that itself kept 1, 4, 6."""
    parent = DrafterConfig(8, 63, "bidirectional", (1, 4, 6), "some/target")
    save_params(tmp_path / "parent", init_params(CONFIG), CONFIG, drafter=parent, extras={"bos_token_id": 1})
    config = replace(
        plain, objective="d3d", mask_token_id=62, model=None, init=str(tmp_path / "parent"), init_layers=(0, 2)
    )
    run = write_run(tmp_path / "run", config, replace(CONFIG, num_hidden_layers=2))
    d3d_export(run, tmp_path / "out")
    assert read_drafter_config(tmp_path / "out") == DrafterConfig(16, 62, "bidirectional", (1, 6), "some/target")
    d3d_export(run, tmp_path / "out", "--overwrite", "--target-model", "other/target")
    assert read_drafter_config(tmp_path / "out").target_model == "other/target"


def test_a_mask_that_ends_sequences_is_refused_at_the_latest_here(tmp_path: Path, plain):
    run = write_run(tmp_path / "run", replace(plain, objective="d3d", mask_token_id=60))
    with pytest.raises(ConfigError, match="mask_token_id=60 is also an end-of-sequence id"):
        d3d_export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_is_refused(tmp_path: Path, plain):
    with pytest.raises(CheckpointError, match="expected the output_dir of `d3d train`"):
        d3d_export(tmp_path, tmp_path / "out")
    run = write_run(tmp_path / "run", plain, steps=())
    with pytest.raises(CheckpointError, match="complete steps: none"):
        d3d_export(run, tmp_path / "out")
    with pytest.raises(CheckpointError, match="not empty"):
        d3d_export(run, run)


def test_a_target_is_noted_only_for_drafters(tmp_path: Path, plain):
    with pytest.raises(ConfigError, match="plain model"):
        d3d_export(write_run(tmp_path / "run", plain), tmp_path / "out", "--target-model", "x")

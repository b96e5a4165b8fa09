from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from d3d_jax.checkpoints.convert import load
from d3d_jax.checkpoints.export import save_params
from d3d_jax.checkpoints.hf_config import read_drafter_config, read_model_config
from d3d_jax.checkpoints.safetensors_io import TensorFolder
from d3d_jax.cli import convert
from d3d_jax.config import DrafterConfig, ModelConfig, RopeConfig
from d3d_jax.errors import CheckpointError, ConfigError, D3DError
from d3d_jax.models.qwen3 import init_params

CONFIG = ModelConfig(64, 32, 48, 3, 4, 2, 16, rope=RopeConfig(1e6))


def d3d_convert(*words: Any) -> int:
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    return convert.run(parser.parse_args([str(word) for word in words]))


def contents(folder: Path) -> dict[str, bytes]:
    tensors = TensorFolder(folder)
    return {name: tensors.read(name).tobytes() for name in tensors}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_params(
        tmp_path / "source",
        init_params(CONFIG, seed=1),
        CONFIG,
        drafter=DrafterConfig(8, 63, "causal", (0, 2, 4), "some/target"),
        eos_ids=(2, 3),
        extras={"bos_token_id": 1},
    )
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return tmp_path / "source"


def test_a_folder_comes_out_bit_equal_with_everything_beside_it(source: Path, tmp_path: Path, capsys):
    assert d3d_convert(source, tmp_path / "out") == 0
    assert contents(tmp_path / "out") == contents(source)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((source / name).read_text())
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    printed = capsys.readouterr().out
    assert "36 tensors read, 36 used" in printed and "drafter with blocks of 8: 3 layers" in printed


def test_there_as_orbax_and_back_is_bit_equal(source: Path, tmp_path: Path, capsys):
    assert d3d_convert(source, tmp_path / "orbax", "--orbax") == 0
    assert not list((tmp_path / "orbax").glob("*.safetensors"))
    assert d3d_convert(tmp_path / "orbax", tmp_path / "back") == 0
    assert contents(tmp_path / "back") == contents(source)
    assert read_drafter_config(tmp_path / "back") == read_drafter_config(source)
    assert capsys.readouterr().out.count("36 tensors read, 36 used") == 2
    with pytest.raises(ConfigError, match="is orbax already"):
        d3d_convert(tmp_path / "orbax", tmp_path / "again", "--orbax")


def test_an_orbax_tree_of_another_shape_is_refused_rather_than_cut(source: Path, tmp_path: Path):
    d3d_convert(source, tmp_path / "orbax", "--orbax")
    path = tmp_path / "orbax" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 72}))
    with pytest.raises(CheckpointError, match=r"embed_tokens is \[64, 32\], expected \[72, 32\]"):
        d3d_convert(tmp_path / "orbax", tmp_path / "back")


def test_type_padding_and_shards_are_as_asked(source: Path, tmp_path: Path):
    d3d_convert(source, tmp_path / "out", "--dtype", "bfloat16", "--pad-vocab-to", 72, "--max-shard-gb", 1e-5)
    assert read_model_config(tmp_path / "out").vocab_size == 72
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    rows = TensorFolder(tmp_path / "out").read("lm_head.weight").astype(np.float32)
    assert rows.shape == (72, 32) and not rows[64:].any() and rows[:64].any()


@pytest.mark.parametrize("choice", ["ignore", "untie"])
def test_a_tied_model_with_another_head_comes_out_as_chosen(source: Path, tmp_path: Path, choice: str):
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match="differs"):
        d3d_convert(source, tmp_path / "out")
    d3d_convert(source, tmp_path / "out", "--lm-head", choice)
    assert read_model_config(tmp_path / "out").tie_word_embeddings == (choice == "ignore")
    assert ("lm_head" in load(tmp_path / "out", dtype="keep").params) == (choice == "untie")


def test_a_dry_run_checks_and_writes_nothing(source: Path, tmp_path: Path, capsys):
    assert d3d_convert(source, "--dry-run") == 0
    assert d3d_convert(source, tmp_path / "out", "--dry-run") == 0
    assert "nothing written" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_cannot_be_written_is_refused_before_anything_is_read(source: Path, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    for words, text in (
        ([source], "DST is missing"),
        ([source, tmp_path / "full"], "not empty"),
        ([source, source, "--overwrite"], "SRC and DST"),
        ([tmp_path / "nowhere", tmp_path / "out"], "does not exist"),
    ):
        with pytest.raises(D3DError, match=text):
            d3d_convert(*words)
    assert not (tmp_path / "out").exists()


def test_a_renamed_tensor_stops_the_conversion_with_both_names(source: Path, tmp_path: Path):
    file = source / "model.safetensors"
    data = file.read_bytes()
    assert data.count(b"layers.1.mlp.up_proj") == 1
    file.write_bytes(data.replace(b"layers.1.mlp.up_proj", b"layers.1.mlp.up_porj"))
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight \(is it .*layers.1.mlp.up_porj.weight\?\)"):
        d3d_convert(source, tmp_path / "out")
    assert issubclass(CheckpointError, D3DError) and CheckpointError.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_interrupted_conversion_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args: Any, **kwargs: Any):
        raise KeyboardInterrupt

    monkeypatch.setattr("d3d_jax.checkpoints.safetensors_io.write_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        d3d_convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert jax.default_backend() == "cpu"

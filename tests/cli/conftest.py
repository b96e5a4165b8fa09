"""A tiny pair of model folders, and prompts for it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from flax import nnx

from d3d_jax.checkpoints.export import save_params
from d3d_jax.config import DrafterConfig, ModelConfig, RopeConfig
from d3d_jax.data.tokenizer_training import train_tokenizer
from d3d_jax.models.qwen3 import Qwen3

TOKENS, BLOCK = 280, 4
CONFIG = ModelConfig(296, 32, 48, 2, 4, 2, 16, RopeConfig(1e4), max_position_embeddings=512, tie_word_embeddings=True)


class Folders(NamedTuple):
    """Paths: target, drafter (of the target's own weights, so that some drafts are right), prompts, tokenizer."""

    target: Path
    drafter: Path
    prompts: Path
    tokenizer: Path


def save(folder: Path, config: ModelConfig, tokenizer: Path, drafter: DrafterConfig | None = None) -> Path:
    params = Qwen3(config, rngs=nnx.Rngs(0), scale=0.25).params()
    save_params(folder, params, config, tokenizer_folder=tokenizer, drafter=drafter)
    return folder


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("pair")
    tokenizer = train_tokenizer(["Anna sold 48 clips and then she sold the rest"] * 3, TOKENS, root / "tokenizer")
    prompts = root / "prompts.jsonl"
    lines = [{"id": f"q{i}", "turns": [f"How many {i}?"], "answer": "1"} for i in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Folders(
        save(root / "target", CONFIG, tokenizer),
        save(root / "drafter", CONFIG, tokenizer, DrafterConfig(BLOCK, TOKENS, target_model="tiny")),
        prompts,
        tokenizer,
    )


@pytest.fixture
def own_pair(pair: Folders, tmp_path: Path) -> Folders:
    """A copy to damage."""
    for name in ("target", "drafter"):
        shutil.copytree(getattr(pair, name), tmp_path / name)
    return pair._replace(target=tmp_path / "target", drafter=tmp_path / "drafter")


@pytest.fixture
def other_vocabulary(pair: Folders, tmp_path: Path) -> Path:
    """A drafter of another vocabulary size."""
    config = dataclasses.replace(CONFIG, vocab_size=320)
    return save(tmp_path / "other", config, pair.tokenizer, DrafterConfig(BLOCK, TOKENS))


@pytest.fixture
def other_tokenizer(tmp_path: Path) -> Path:
    """A drafter of the right size whose tokenizer gives other ids."""
    tokenizer = train_tokenizer(["quite another text, in which other words recur"] * 3, TOKENS, tmp_path / "words")
    return save(tmp_path / "stranger", CONFIG, tokenizer, DrafterConfig(BLOCK, TOKENS))

"""Fixtures of the training tests: a toy corpus, short runs on it, and one run that nothing disturbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from d3d_jax.config import LossConfig, OptimizerConfig, TrainConfig
from d3d_jax.training.loop import train
from tests.training.toy import BLOCKS, MASK, MODEL, STEPS


def copy_task(path: Path, documents: int) -> Path:
    """`1 x x x 2`, and the response is `x x x 3`; three documents fill a row of 27."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(documents):
            word = rng.integers(4, MASK, 3).tolist()
            file.write(json.dumps({"id": str(number), "ids": [1, *word, 2, *word, 3], "prompt_length": 5}) + "\n")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_task(tmp_path_factory.mktemp("corpus") / "copy.jsonl", 80)


@pytest.fixture(scope="session")
def short_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three batches of four rows: an epoch ends after the third step."""
    return copy_task(tmp_path_factory.mktemp("corpus") / "short.jsonl", 40)


@pytest.fixture(scope="session")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory):
    """A short drafter run; every call has an output folder of its own unless told otherwise."""

    def make(**changes: Any) -> TrainConfig:
        fixed: dict[str, Any] = dict(
            objective="d3d", train_data=str(corpus), steps=STEPS, batch_size=4, row_length=27, model=MODEL,
            mask_token_id=MASK, save_every=3, log_every=2, blocks=BLOCKS, loss=LossConfig(gamma=4.0, chunk=16),
            optimizer=OptimizerConfig(learning_rate=1e-2),
        )  # fmt: skip
        changes.setdefault("output_dir", str(tmp_path_factory.mktemp("run") / "output"))
        return TrainConfig(**{**fixed, **changes})

    return make


@pytest.fixture(scope="session")
def whole(config, short_corpus: Path) -> tuple[TrainConfig, dict[str, float]]:
    """A run on two devices that nothing disturbs: two epochs of three steps."""
    run = config(train_data=str(short_corpus))
    return run, train(run, jax.devices()[:2])

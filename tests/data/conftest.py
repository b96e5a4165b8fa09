"""Fixtures of the data tests: a tiny tokenizer, and the real assets where they are at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from d3d_jax.data.chat import load_tokenizer
from d3d_jax.data.packing import Document
from d3d_jax.data.tokenizer_training import train_tokenizer


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [
        "Anna sold 48 clips in April. How many clips did she sell altogether?",
        "She sold 24 clips in May. She sold 48 + 24 = 72 clips altogether.\n\nThe final answer is 72.",
        "Please reason step by step, and put your final answer within boxes.",
    ] * 3


@pytest.fixture(scope="session")
def tokenizer_folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(texts, 320, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path):
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def qwen_folder() -> Path:
    folder = Path(__file__).parents[3] / "shared" / "assets" / "qwen3_tokenizer"
    if not folder.is_dir():
        pytest.skip("the genuine Qwen3 tokenizer is not at hand")
    return folder


@pytest.fixture(scope="session")
def qwen(qwen_folder: Path):
    return load_tokenizer(qwen_folder)


@pytest.fixture
def documents() -> list[Document]:
    """Sixty documents of 2 to 40 tokens, no two alike, with responses of 1 to 25 tokens."""
    rng = np.random.default_rng(7)
    made = []
    for number in range(60):
        prompt, response = int(rng.integers(1, 16)), int(rng.integers(1, 26))
        ids = rng.integers(5, 1000, prompt + response).astype(np.int32)
        ids[0] = 1000 + number
        made.append(Document(ids, prompt))
    return made

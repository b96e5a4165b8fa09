"""A tiny random target with a lively output, drafters of several kinds, and AR's tokens to compare with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import pytest
from flax import nnx

from d3d_jax.config import DecodeConfig, DrafterConfig, ModelConfig, RopeConfig, SamplingParams
from d3d_jax.decoding.engine import Engine
from d3d_jax.decoding.placement import Model
from d3d_jax.decoding.scripted import Script
from d3d_jax.decoding.state import Completion
from d3d_jax.models.qwen3 import Qwen3

VOCAB, TOKEN_IDS, MASK = 72, 64, 64
CONFIG = ModelConfig(VOCAB, 32, 48, 2, 4, 2, 16, RopeConfig(1e4), max_position_embeddings=512)
SMALL = dataclasses.replace(CONFIG, num_hidden_layers=1, num_attention_heads=2)
MAX_LEN = 160
PROMPTS = [[5, 9, 33], list(range(1, 41)), [7] * 17]
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=11)


def random_model(config: ModelConfig, seed: int, block_size: int | None = None) -> Model:
    """Weights large enough that the next token is clear and depends on the whole prefix."""
    params = Qwen3(config, rngs=nnx.Rngs(seed), scale=0.25).params()
    return Model(config, params, None if block_size is None else DrafterConfig(block_size, MASK))


@pytest.fixture(scope="session")
def target() -> Model:
    return random_model(CONFIG, 0)


def build(
    target: Model,
    drafter: Model | None,
    decode: DecodeConfig,
    devices: int = 1,
    max_len: int = MAX_LEN,
    rows: int = 1,
    **more: Any,
) -> Engine:
    pair = jax.devices()[0], jax.devices()[devices - 1]
    return Engine(
        target, drafter, decode, devices=pair, max_len=max_len, num_token_ids=TOKEN_IDS, max_batch=rows, **more
    )


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new: int,
    stop: Sequence[int] = (),
    sampling: SamplingParams = GREEDY,
) -> list[Completion]:
    """`new` tokens at most after each prompt, or up to one of `stop`."""
    return engine.generate(prompts, dataclasses.replace(sampling, max_tokens=new, stop_token_ids=tuple(stop)))


@functools.lru_cache(maxsize=12)  # each holds about a thousand memory maps of compiled code, of 65,530 that Linux gives
def shared(seed: int, decode: DecodeConfig, devices: int = 1, rows: int = 1) -> Engine:
    """An engine that tests share, since building one compiles: the target with a drafter of seed 0 or 3.

    Seed 0 has the target's own weights, so that some drafts are right; seed 3 is another, smaller model.
    """
    target = random_model(CONFIG, 0)
    drafter = random_model(CONFIG if seed == 0 else SMALL, seed, decode.block_size)
    return build(target, drafter, decode, devices, rows=rows)


@pytest.fixture(scope="module", autouse=True)
def programs_of_the_module_alone():
    """Linux gives a process 65,530 memory maps; XLA dies when the programs of all modules together take more."""
    yield
    shared.cache_clear()
    jax.clear_caches()


@pytest.fixture(scope="session")
def ar_tokens(target):
    """AR's tokens for PROMPTS, greedy and sampled, each prompt decoded alone."""
    engine = build(target, None, DecodeConfig(mode="ar"))

    def tokens(sampling: SamplingParams, new: int = 40, stop: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
        return [run(engine, [prompt], new, stop, sampling)[0].ids for prompt in PROMPTS]

    return tokens


def scripted(prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], block_size: int, wrong=None) -> Model:
    """A drafter of the rows' true continuations that errs wherever `wrong(position)` says so."""
    texts = [[*prompt, *ids] for prompt, ids in zip(prompts, outputs, strict=True)]
    script = Script.of_texts(texts, TOKEN_IDS, wrong or (lambda position: False))
    return dataclasses.replace(random_model(SMALL, 3, block_size), script=script)

"""A target split over devices, the drafter elsewhere or beside it: the same tokens, and each device holds its part."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from d3d_jax.benchmarks.compile_counter import CompileCounter
from d3d_jax.config import DecodeConfig
from d3d_jax.decoding.engine import Engine
from d3d_jax.decoding.placement import Side, check_split
from d3d_jax.errors import CompatibilityError

from .conftest import CONFIG, GREEDY, MAX_LEN, PROMPTS, SAMPLED, TOKEN_IDS, random_model, run

WIDE = dataclasses.replace(CONFIG, num_attention_heads=8, num_key_value_heads=4)


def engine(decode: DecodeConfig, parts: int, drafter_on: slice, rows: int = 1, config=WIDE) -> Engine:
    devices = jax.devices()
    drafter = None if decode.mode == "ar" else random_model(config, 0, decode.block_size)
    pair = devices[:parts] if parts > 1 else devices[0], devices[drafter_on]
    return Engine(
        random_model(config, 0), drafter, decode, devices=pair, max_len=MAX_LEN, num_token_ids=TOKEN_IDS, max_batch=rows
    )


@pytest.fixture(scope="module")
def expected() -> dict:
    """AR's tokens on one device."""
    alone = engine(DecodeConfig(mode="ar"), 1, slice(0, 1))
    return {how: [run(alone, [p], 40, (), how)[0].ids for p in PROMPTS] for how in (GREEDY, SAMPLED)}


@pytest.mark.parametrize(
    ("decode", "drafter_on"),
    [
        ({"mode": "ar"}, slice(0, 1)),
        ({"mode": "sync"}, slice(4, 5)),
        ({"mode": "sync"}, slice(0, 4)),  # on the target's own devices, split as it is: one program
        ({"mode": "async", "miss": "redraft", "bonus": "both"}, slice(4, 5)),
        ({"mode": "async", "miss": "keep"}, slice(4, 6)),  # each of the two split over devices of its own
        ({"mode": "async", "miss": "redraft"}, slice(0, 1)),  # on one of the target's
    ],
    ids=["ar", "sync-apart", "sync-together", "async-apart", "async-both-split", "async-shared"],
)
def test_the_tokens_and_rounds_are_those_of_one_device(expected, decode, drafter_on):
    how = DecodeConfig(block_size=4, **decode)
    split, alone = engine(how, 4, drafter_on, rows=2), engine(how, 1, slice(0, 1), rows=2)
    for sampling, ids in expected.items():
        found = run(split, PROMPTS, 40, (), sampling)
        assert [c.ids for c in found] == ids
        assert [c.rounds for c in found] == [c.rounds for c in run(alone, PROMPTS, 40, (), sampling)]
    with CompileCounter() as counter:
        run(split, PROMPTS[::-1], 20, (), SAMPLED)
    assert counter.count == 0  # what a program gives lies where the next one takes it


def test_each_device_holds_its_part_of_weights_and_cache():
    side = Side.place(random_model(WIDE, 0), jax.devices()[:4], MAX_LEN, np.float32)
    layer = side.params["layers"][0]
    whole = {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"}
    for name, weight in layer.items():
        assert weight.addressable_shards[0].data.size == weight.size // (1 if name in whole else 4)
    assert side.params["embed_tokens"].addressable_shards[0].data.shape == (WIDE.vocab_size // 4, WIDE.hidden_size)
    cache = side.cache(2)
    assert {shard.data.shape[1] for shard in cache.k[0].addressable_shards} == {1}
    assert cache.length.sharding.is_fully_replicated


def test_what_cannot_be_split_is_refused_by_name():
    said = "the target cannot be split over 3 devices: num_key_value_heads=4, num_attention_heads=8 must be a multiple"
    with pytest.raises(CompatibilityError, match=said):
        check_split(WIDE, 3, "the target")
    with pytest.raises(CompatibilityError, match="num_key_value_heads=2 must be a multiple of 4; use fewer"):
        engine(DecodeConfig(mode="ar"), 4, slice(0, 1), config=CONFIG)

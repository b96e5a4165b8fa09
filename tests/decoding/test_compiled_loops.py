"""The compiled loops update their caches in place: no turn copies one."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from d3d_jax.config import DecodeConfig, DrafterConfig
from d3d_jax.decoding.autoregressive import decode_autoregressively
from d3d_jax.decoding.programs import Drafting
from d3d_jax.decoding.rounds import Until
from d3d_jax.decoding.state import Outcome, Stop
from d3d_jax.decoding.synchronous import decode_synchronously
from d3d_jax.models.cache import empty_cache
from d3d_jax.models.qwen3 import for_decoding

from .conftest import CONFIG, MASK, SMALL, TOKEN_IDS, random_model


def copies_of_a_cache(compiled: str) -> int:
    return len(re.findall(r"= f32\[(?:1,)?2,384,16\]\S* copy\(", compiled))


@pytest.mark.parametrize("mode", ["ar", "sync"])
def test_no_turn_of_a_loop_copies_a_cache(mode):
    target, drafter = for_decoding(random_model(CONFIG, 0).params), for_decoding(random_model(SMALL, 3).params)
    caches = [empty_cache(config, 1, 384) for config in (CONFIG, SMALL)]
    outcome = Outcome(jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), jnp.zeros(1, bool))
    stop = Stop(jnp.full((1, 8), -1, jnp.int32), jnp.array([100], jnp.int32))
    until = Until(jnp.int32(100), jnp.int32(100))
    if mode == "ar":
        loop = jax.jit(partial(decode_autoregressively, config=CONFIG), donate_argnums=1)
        lowered = loop.lower(target, caches[0], outcome, None, stop, until)
    else:
        how = Drafting(SMALL, DrafterConfig(8, MASK), DecodeConfig(mode="sync", block_size=8), TOKEN_IDS)
        loop = jax.jit(partial(decode_synchronously, config=CONFIG, how=how), donate_argnums=(2, 3))
        lowered = loop.lower(target, drafter, *caches, jnp.zeros((1, 8), jnp.int32), outcome, None, stop, until)
    assert copies_of_a_cache(lowered.compile().as_text()) == 0

"""The kernels inside the models: asked for by name, seen in every program, and exact under an interpreter."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from d3d_jax import demo
from d3d_jax.config import AttentionConfig, DecodeConfig, SamplingParams
from d3d_jax.decoding.engine import Engine
from d3d_jax.decoding.loading import OpenedPair
from d3d_jax.errors import CompatibilityError, ConfigError
from d3d_jax.models import attention
from d3d_kernels import interval_decode

from .conftest import CONFIG, PROMPTS, SAMPLED, SMALL, build, random_model, run

GREEDY = SamplingParams()
# Kernels of Mosaic TPU have no heads of 16.
WIDE = {"triton": CONFIG, "mosaic_tpu": dataclasses.replace(CONFIG, head_dim=64)}
MODES = [{"mode": "ar"}, {"mode": "sync"}, {"mode": "async", "outcomes": 2}]
SHORT, NEW, LENGTH = [[5, 9, 33], [7] * 6, [1, 2, 3, 4, 5]], 14, 48
INTERPRETED = [
    *(("triton", policy, rows) for policy in MODES for rows in (1, 3)),
    ("mosaic_tpu", MODES[0], 1),
    ("mosaic_tpu", MODES[2], 3),
]


def engine_on(backend: str, policy: dict, rows: int = 1, devices: int = 1) -> Engine:
    wide = WIDE.get(backend, CONFIG)
    target = random_model(wide, 0)
    drafter = random_model(dataclasses.replace(SMALL, head_dim=wide.head_dim), 3, 4)
    attention = AttentionConfig(backend, interpret=backend in WIDE)
    return build(target, drafter, DecodeConfig(block_size=4, attention=attention, **policy), devices, LENGTH, rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "policy", "rows"), INTERPRETED, ids=str)
def test_interpreted_kernels_give_the_same_tokens(backend, policy, rows):
    """Those of autoregressive decoding with the reference attention, each prompt alone, greedy and sampled."""
    reference = build(random_model(WIDE[backend], 0), None, DecodeConfig(mode="ar"), max_len=LENGTH)
    engine = engine_on(backend, policy, rows, devices=2)
    for sampling in (GREEDY, SAMPLED):
        expected = [run(reference, [prompt], NEW, (), sampling)[0].ids for prompt in SHORT[:rows]]
        assert [done.ids for done in run(engine, SHORT[:rows], NEW, (), sampling)] == expected


@pytest.fixture
def asked(monkeypatch):
    """(backend, interpret) of every attention of every program, as it is traced."""
    found = []
    jax.clear_caches()  # layers alike are traced once

    def record(*operands, **how):
        found.append((how["backend"], how["interpret"]))
        return interval_decode(*operands, **{**how, "backend": "xla", "interpret": False})

    monkeypatch.setattr(attention, "interval_decode", record)
    yield found
    jax.clear_caches()


@pytest.mark.parametrize("policy", MODES, ids=lambda policy: policy["mode"])
def test_every_program_of_a_mode_computes_attention_by_the_backend_that_was_named(asked, policy):
    engine = engine_on("triton", policy)
    run(engine, PROMPTS[:1], 6)
    # The target's prefill and its steps; then the drafter's prefill, and its drafts or its choice and packed pass.
    assert len(asked) >= {"ar": 2, "sync": 4, "async": 5}[policy["mode"]]
    assert set(asked) == {("triton", True)}


def test_the_default_on_cpu_is_the_reference(asked):
    run(build(random_model(CONFIG, 0), None, DecodeConfig(mode="ar")), PROMPTS[:1], 3)
    assert set(asked) == {("xla", False)}


def test_a_backend_that_cannot_serve_a_model_is_refused_before_a_tensor_is_read(monkeypatch):
    monkeypatch.setattr(OpenedPair, "load", lambda *_: pytest.fail("read tensors"))
    pair = demo.target_folder(), demo.drafter_folder()
    with pytest.raises(CompatibilityError, match=r"attention.backend: .*'mosaic_gpu'.*not float32.*can: xla, triton"):
        Engine.from_pretrained(*pair, attention_backend="mosaic_gpu")
    with pytest.raises(ConfigError, match=r"attention.backend='tritn': expected 'auto' or 'xla'"):
        Engine.from_pretrained(*pair, attention_backend="tritn")


def test_an_engine_refuses_a_backend_that_cannot_serve_its_drafter():
    """The target's heads are of 64, the drafter's of 16."""
    target, drafter = random_model(WIDE["mosaic_tpu"], 0), random_model(SMALL, 3, 4)
    decode = DecodeConfig(block_size=4, attention=AttentionConfig("mosaic_tpu"))
    with pytest.raises(CompatibilityError, match="it takes a head dim H of 64, 128, 256, not 16"):
        build(target, drafter, decode)


def test_interpreting_needs_the_name_of_a_kernel_backend():
    with pytest.raises(ConfigError, match=r"attention.backend is 'auto'; name one of the two"):
        AttentionConfig(interpret=True)

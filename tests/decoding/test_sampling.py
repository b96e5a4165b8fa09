"""The filters are transformers', and the noise belongs to a position."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_jax.config import SamplingParams
from d3d_jax.decoding.loading import sampling_defaults
from d3d_jax.decoding.sampling import as_columns, choose, filtered, position_noise

SETTINGS = [
    SamplingParams(0.7),
    SamplingParams(1.3, top_k=5),
    SamplingParams(1.0, top_p=0.7),
    SamplingParams(0.6, min_p=0.1),
    SamplingParams(0.8, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(1.0, top_p=1e-4),
    SamplingParams(2.0, top_k=1000),
]


@pytest.mark.torch
def test_filters_keep_what_transformers_keeps():
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    logits = np.random.default_rng(0).normal(size=(len(SETTINGS), 9, 200)).astype(np.float32) * 3
    ours = np.asarray(filtered(jnp.asarray(logits), as_columns(SETTINGS)))
    for row, setting in enumerate(SETTINGS):
        scores = hf.TemperatureLogitsWarper(setting.temperature)(None, torch.tensor(logits[row]))
        if setting.top_k:
            scores = hf.TopKLogitsWarper(setting.top_k)(None, scores)
        if setting.top_p < 1:
            scores = hf.TopPLogitsWarper(setting.top_p)(None, scores)
        if setting.min_p:
            scores = hf.MinPLogitsWarper(setting.min_p)(None, scores)
        theirs = scores.numpy()
        np.testing.assert_array_equal(np.isfinite(ours[row]), np.isfinite(theirs))
        np.testing.assert_allclose(ours[row][np.isfinite(theirs)], theirs[np.isfinite(theirs)], rtol=1e-6)


def test_noise_depends_on_seed_and_position_alone():
    seeds, positions = jnp.array([3, 4], jnp.uint32), jnp.array([[5, 6, 7], [6, 7, 8]])
    together = position_noise(seeds, positions, 50)
    for row in range(2):
        for column in range(3):
            alone = position_noise(seeds[row : row + 1], positions[row : row + 1, column : column + 1], 50)
            np.testing.assert_array_equal(together[row, column], alone[0, 0])
    assert not np.array_equal(together[0, 1], together[1, 0])  # one position, two seeds


def test_draws_follow_the_filtered_law():
    """200,000 positions of one law over 8 tokens, 5 of them kept: total variation under 0.01."""
    logits = jnp.asarray(np.random.default_rng(1).normal(size=8), jnp.float32)
    setting = as_columns([SamplingParams(0.9, top_k=5, seed=2)])
    positions = jnp.arange(200_000)[None]
    drawn = jax.jit(choose)(jnp.broadcast_to(logits, (1, 200_000, 8)), positions, setting)
    law = jax.nn.softmax(filtered(logits[None, None], setting)[0, 0])
    seen = np.bincount(np.asarray(drawn[0]), minlength=8) / 200_000
    assert 0.5 * np.abs(seen - np.asarray(law)).sum() < 0.01


def test_greedy_rows_of_a_sampled_batch_stay_greedy():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(2, 4, 30)), jnp.float32)
    setting = as_columns([SamplingParams(), SamplingParams(1.0, seed=1)])
    tokens = choose(logits, jnp.zeros((2, 4), jnp.int32) + jnp.arange(4), setting)
    np.testing.assert_array_equal(tokens[0], logits[0].argmax(-1))
    assert as_columns([SamplingParams(), SamplingParams()]) is None


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (None, SamplingParams()),
        ({"temperature": 0.6, "top_k": 20}, SamplingParams()),  # do_sample is off where it is not said
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, SamplingParams(0.6, 20, 0.95)),
        ({"do_sample": True, "top_k": None}, SamplingParams(1.0)),
    ],
)
def test_the_defaults_are_those_of_generation_config(tmp_path, stored, expected):
    if stored is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    assert sampling_defaults(tmp_path) == expected

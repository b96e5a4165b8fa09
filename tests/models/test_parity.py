"""Tiny random checkpoints, written by transformers, give transformers' logits in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from d3d_jax.checkpoints.convert import load_params
from d3d_jax.checkpoints.hf_config import read_model_config
from d3d_jax.config import ModelConfig, RopeConfig
from d3d_jax.models.cache import empty_cache
from d3d_jax.models.layers import rope_frequencies
from d3d_jax.models.qwen3 import append, for_decoding, forward, logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

VOCAB, TOKENS, PREFILL = 96, 40, 33


def rope(theta: float, **yarn: Any) -> dict[str, Any]:
    kind = {"rope_type": "yarn", "original_max_position_embeddings": 16} if yarn else {"rope_type": "default"}
    return {**kind, "rope_theta": theta, **yarn}


# hidden_size, heads, kv heads, head_dim, tied, rope. Only in the first is hidden_size = heads * head_dim.
CASES = {
    "mha_theta_1e6_tied": (32, 4, 4, 8, True, rope(1e6)),
    "gqa2_theta_5e6_untied_wide_heads": (64, 4, 2, 32, False, rope(5e6)),
    "gqa4_yarn_tied_narrow_heads": (48, 4, 1, 8, True, rope(1e6, factor=4.0)),
    "gqa2_yarn_theta_5e6_untied": (32, 4, 2, 16, False, rope(5e6, factor=4.0)),
}


@dataclasses.dataclass
class Pair:
    """One checkpoint in both libraries."""

    torch_model: Any
    params: dict[str, Any]
    config: ModelConfig
    folder: Path

    def torch_logits(self, tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.torch_model(torch.tensor(tokens)).logits.numpy()


def write_checkpoint(folder: Path, case: str) -> Any:
    """A transformers model in float32 with no two parameters alike, saved; norm weights far from 1."""
    hidden, heads, kv_heads, head_dim, tied, rope_parameters = CASES[case]
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=hidden + 16,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope_parameters=rope_parameters,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        dtype="float32",
    )
    torch.manual_seed(sorted(CASES).index(case))
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(folder, request.param)
    return Pair(model, load_params(folder, dtype="float32"), read_model_config(folder), folder)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, VOCAB, (2, TOKENS))


def stacked_logits(params: dict[str, Any], tokens: np.ndarray, config: ModelConfig) -> np.ndarray:
    return np.asarray(jax.jit(lambda p, t: logits(p, forward(p, t, config)))(params, tokens))


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(theirs).max() > 1  # logits of a size at which a fault would show
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, equal_nan=False)


def test_the_stacked_form_gives_transformers_logits(pair: Pair, tokens: np.ndarray):
    assert_close(stacked_logits(pair.params, tokens, pair.config), pair.torch_logits(tokens))


def test_the_decoding_form_over_a_cache_gives_transformers_logits(pair: Pair, tokens: np.ndarray):
    config, decoding = pair.config, for_decoding(pair.params)

    @jax.jit
    def run(params, tokens):
        cache = empty_cache(config, 2, TOKENS)
        first, cache = append(params, tokens[:, :PREFILL], cache, config)
        cache = cache._replace(length=cache.length + PREFILL)
        second, _ = append(params, tokens[:, PREFILL:], cache, config)
        return logits(params, first), logits(params, second)

    ours = np.concatenate(run(decoding, tokens), axis=1)
    assert_close(ours, pair.torch_logits(tokens))


def test_the_comparison_would_see_exchanged_norms_and_another_theta(pair: Pair, tokens: np.ndarray):
    """A guard of the tests above: both faults run without an error and must stand out."""
    theirs = pair.torch_logits(tokens)
    layers = pair.params["layers"]
    exchanged = {**pair.params, "layers": {**layers, "q_norm": layers["k_norm"], "k_norm": layers["q_norm"]}}
    assert np.abs(stacked_logits(exchanged, tokens, pair.config) - theirs).max() > 1e-2
    other = dataclasses.replace(pair.config, rope=dataclasses.replace(pair.config.rope, theta=1e4))
    assert np.abs(stacked_logits(pair.params, tokens, other) - theirs).max() > 1e-2


YARN = {
    "plain": {},
    "no stretch": {"factor": 1.0},
    "betas": {"beta_fast": 16.0, "beta_slow": 2.0},
    "ends not rounded": {"truncate": False},
    "attention factor given": {"attention_factor": 1.25},
    "mscale": {"mscale": 0.707, "mscale_all_dim": 1.0},
    "mscale alone": {"mscale": 0.707},
    "theta 5e6": {"theta": 5e6},
    "short context": {"original_max_position_embeddings": 64},  # the ramp reaches below the first channel
    "factor 16 of 8192": {"factor": 16.0, "original_max_position_embeddings": 8192},
}


@pytest.mark.parametrize("head_dim", [8, 128])
@pytest.mark.parametrize("setting", YARN)
def test_yarn_frequencies_and_attention_factor_are_transformers(setting: str, head_dim: int):
    ours = RopeConfig(
        **{"theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **YARN[setting]}
    )
    given = {k: v for k, v in dataclasses.asdict(ours).items() if v is not None}
    theta, maximum = given.pop("theta"), int(ours.factor * given["original_max_position_embeddings"])
    config = transformers.Qwen3Config(
        head_dim=head_dim, max_position_embeddings=maximum, rope_parameters={"rope_theta": theta, **given}
    )
    theirs, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    inverse, scale = rope_frequencies(ours, head_dim, maximum)
    assert scale == pytest.approx(factor, abs=1e-6)
    np.testing.assert_allclose(inverse, theirs.numpy(), rtol=1e-6, atol=0, equal_nan=False)


@pytest.mark.parametrize("theta", [1e4, 1e6, 5e6])
def test_default_frequencies_are_transformers(theta: float):
    config = transformers.Qwen3Config(head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": theta})
    rotary = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(config)
    inverse, scale = rope_frequencies(RopeConfig(theta), 128, config.max_position_embeddings)
    assert scale == rotary.attention_scaling == 1.0
    np.testing.assert_allclose(inverse, rotary.inv_freq.numpy(), rtol=1e-6, atol=0, equal_nan=False)

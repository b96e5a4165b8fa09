"""Tiny random Hugging Face folders, written without our own writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 64,
}


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under the names of the Hugging Face library, written out by hand."""
    rng = np.random.default_rng(seed)
    width, forward, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for i in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (width,),
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (forward, width),
            "mlp.up_proj": (forward, width),
            "mlp.down_proj": (width, forward),
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return {
        name: (rng.normal(size=shape) / shape[-1] ** 0.5 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def tensors_of() -> Callable[..., dict[str, np.ndarray]]:
    return tiny_tensors


@pytest.fixture
def config_folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder with nothing but the tiny config.json, changed as told; a value of `...` removes the key."""

    def make(_name: str = "config", **changes: Any) -> Path:
        config = {key: value for key, value in {**TINY, **changes}.items() if value is not ...}
        return write_folder(tmp_path / _name, config)

    return make


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder with the tiny model; `edit` may change the tensors before they are written."""

    def make(
        _name: str = "model", edit: Callable[[dict[str, np.ndarray]], Any] = lambda tensors: None, **changes: Any
    ) -> Path:
        config = {**TINY, **changes}
        tensors = tiny_tensors(config)
        return write_folder(tmp_path / _name, config, edit(tensors) or tensors)

    return make

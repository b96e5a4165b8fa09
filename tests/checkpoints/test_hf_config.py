from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from d3d_jax.checkpoints.hf_config import carried_keys, read_drafter_config, read_model_config, write_config
from d3d_jax.checkpoints.special_tokens import read_eos_ids, read_pad_ids
from d3d_jax.config import DrafterConfig, RopeConfig
from d3d_jax.errors import CheckpointError, ConfigError
from d3d_jax.models.qwen3 import parameter_count

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
D3D = {
    "version": 1,
    "block_size": 8,
    "mask_token_id": 63,
    "block_attention": "bidirectional",
    "kept_layers": None,
    "target_model": None,
}
# hidden_size, intermediate_size, layers, heads, tied, parameters; kv heads 8, head_dim 128, 151936 rows for all.
PUBLISHED = {
    "0.6B": (1024, 3072, 28, 16, True, 596_049_920),
    "1.7B": (2048, 6144, 28, 16, True, 1_720_574_976),
    "4B": (2560, 9728, 36, 32, True, 4_022_468_096),
    "8B": (4096, 12288, 36, 32, False, 8_190_735_360),
    "14B": (5120, 17408, 40, 40, False, 14_768_307_200),
    "32B": (5120, 25600, 64, 64, False, 32_762_123_264),
}
GENUINE = Path(__file__).parents[3] / "shared" / "assets" / "qwen3_configs"


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_published_sizes_have_the_published_number_of_parameters(config_folder, size: str):
    width, forward, layers, heads, tied, count = PUBLISHED[size]
    folder = config_folder(
        hidden_size=width,
        intermediate_size=forward,
        num_hidden_layers=layers,
        max_window_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=tied,
        max_position_embeddings=40960,
    )
    config = read_model_config(folder)
    assert parameter_count(config) == count
    if (genuine := GENUINE / f"Qwen3-{size}").is_dir():
        assert read_model_config(genuine) == config
        assert read_eos_ids(genuine) == (151645, 151643)


# ---- rope (C3, C4)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 500000, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ],
)
def test_every_spelling_of_theta_is_read(config_folder, spelling: dict):
    assert read_model_config(config_folder(**spelling)).rope == RopeConfig(theta=5e5)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": {**YARN, "type": "yarn"}},
        {"rope_scaling": {k: v for k, v in YARN.items() if k != "rope_type"} | {"type": "yarn"}},
        {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {**YARN, "rope_theta": 1e6}},
        {"rope_scaling": YARN, "rope_parameters": {**YARN, "rope_theta": 1000000, "beta_fast": None}},
    ],
)
def test_every_spelling_of_yarn_is_read(config_folder, spelling: dict):
    expected = RopeConfig(theta=1e6, rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
    assert read_model_config(config_folder(**spelling)).rope == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": ...}, "no rope_theta"),
        ({"rope_theta": None}, "no rope_theta"),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}, "no rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "contradicts"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "contradicts"),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}}, "contradicts"),
        ({"rope_scaling": {**YARN, "rope_type": "llama3"}}, "'llama3' is not supported"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "contradicts"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "needs original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 128}}, "needs factor"),
        ({"rope_scaling": {**YARN, "beta_fats": 1}}, "did you mean 'beta_fast'"),
        ({"rope_scaling": {"factor": 4.0}}, "takes no factor"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "expected a number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "takes no full_attention"),
        ({"rope_theta": True}, "expected a number"),
        ({"rope_scaling": "yarn"}, "expected a mapping"),
    ],
)
def test_a_rope_that_is_not_plain_is_refused(config_folder, changes: dict, words: str):
    with pytest.raises(ConfigError, match="config.json.*" + words):
        read_model_config(config_folder(**changes))


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=1e6),
        RopeConfig(theta=12345.5),
        RopeConfig(1e6, "yarn", 4.0, 128),
        RopeConfig(1e6, "yarn", 4.0, 128, 1.25, 16.0, 2.0, 0.7, 0.9, False),
    ],
)
def test_a_written_config_reads_back_the_same(config_folder, tmp_path: Path, rope: RopeConfig):
    config = dataclasses.replace(read_model_config(config_folder()), rope=rope, tie_word_embeddings=True)
    write_config(tmp_path, config, "bfloat16", eos_ids=(2, 3), extras={"bos_token_id": 1})
    assert read_model_config(tmp_path) == config
    assert read_eos_ids(tmp_path) == (2, 3)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == rope.theta
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert (written["rope_scaling"] is None) == (rope.rope_type == "default")


# ---- what is not computed is refused (C5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": ...}, "head_dim is absent.*128"),
        ({"head_dim": None}, "head_dim is None"),
        ({"vocab_size": "64"}, "vocab_size is '64'"),
        ({"rms_norm_eps": ...}, "rms_norm_eps is absent"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ({"model_type": ...}, "model_type is absent"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "applies from layer 2 of 3"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types holds sliding_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for num_hidden_layers=3"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_a_model_that_is_not_computed_here_is_refused_by_name(config_folder, changes: dict, words: str):
    with pytest.raises(ConfigError, match="config.json.*" + words):
        read_model_config(config_folder(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        {"use_sliding_window": ..., "sliding_window": 4096},
        {"layer_types": ["full_attention"] * 3},
        {"attention_bias": ...},
    ],
)
def test_a_sliding_window_that_is_off_passes(config_folder, changes: dict):
    assert read_model_config(config_folder(**changes)) == read_model_config(config_folder("plain"))


def test_head_dim_is_read_and_never_derived(config_folder):
    assert read_model_config(config_folder(hidden_size=64, num_attention_heads=4, head_dim=32)).head_dim == 32


def test_a_folder_that_is_not_there_and_a_broken_file_are_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"nowhere.config.json does not exist"):
        read_model_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        read_model_config(tmp_path)


# ---- the drafter (C7, C9)


@pytest.mark.parametrize("field", D3D)
def test_every_missing_drafter_field_is_named(config_folder, field: str):
    group = {key: value for key, value in D3D.items() if key != field}
    with pytest.raises(ConfigError, match=rf"d3d_config.{field} is missing"):
        read_drafter_config(config_folder(d3d_config=group))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d3d_config": {**D3D, "version": 2}}, "version is 2; this release reads version 1"),
        ({"d3d_config": {**D3D, "block_sise": 3}}, "did you mean 'block_size'"),
        ({"d3d_config": {**D3D, "block_size": 1}}, "block_size=1"),
        ({"d3d_config": {**D3D, "mask_token_id": None}}, "mask_token_id"),
        ({"d3d_config": {**D3D, "mask_token_id": 64}}, "no row in an embedding of 64 rows"),
        ({"d3d_config": {**D3D, "mask_token_id": -1}}, "no row"),
        ({"d3d_config": {**D3D, "mask_token_id": 2}}, "also an end-of-sequence id"),
        ({"d3d_config": {**D3D, "mask_token_id": 5}, "eos_token_id": [2, 5]}, "also an end-of-sequence id"),
        ({"d3d_config": {**D3D, "mask_token_id": 5}, "pad_token_id": 5}, "also a padding id"),
        ({"d3d_config": {**D3D, "kept_layers": [0, 1]}}, "names 2 layers.*num_hidden_layers=3"),
        ({"d3d_config": {**D3D, "kept_layers": [0, 2, 1]}}, "rising"),
        ({"dflash_config": {}}, "no d3d_config.*DFlash"),
    ],
)
def test_a_drafter_that_cannot_be_right_is_refused(config_folder, changes: dict, words: str):
    with pytest.raises(ConfigError, match="config.json.*" + words):
        read_drafter_config(config_folder(**changes))


def test_the_mask_is_not_the_padding_of_the_generation_config_or_the_tokenizer(config_folder):
    folder = config_folder(d3d_config={**D3D, "mask_token_id": 7})
    read_drafter_config(folder)
    (folder / "generation_config.json").write_text('{"pad_token_id": 7}')
    with pytest.raises(ConfigError, match="also a padding id"):
        read_drafter_config(folder)
    (folder / "generation_config.json").unlink()
    settings = {"pad_token": "<pad>", "added_tokens_decoder": {"7": {"content": "<pad>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_pad_ids(folder) == (7,)
    with pytest.raises(ConfigError, match="also a padding id"):
        read_drafter_config(folder)


def test_a_drafter_reads_back_with_its_mask_and_its_kept_layers(config_folder, tmp_path: Path):
    model = read_model_config(config_folder(num_hidden_layers=31))
    kept = tuple(i for i in range(36) if i not in (3, 8, 13, 18, 23))
    drafter = DrafterConfig(16, 63, "causal", kept, "Qwen/Qwen3-8B")
    write_config(tmp_path, model, "bfloat16", drafter, eos_ids=(2,))
    assert read_drafter_config(tmp_path) == drafter
    assert read_model_config(tmp_path) == model


def test_a_drafter_that_does_not_fit_is_not_written(config_folder, tmp_path: Path):
    model = read_model_config(config_folder())
    for drafter, words in ((DrafterConfig(8, 64), "no row"), (DrafterConfig(8, 2), "end-of-sequence")):
        with pytest.raises(ConfigError, match=words):
            write_config(tmp_path, model, "float32", drafter, eos_ids=(2,))
    with pytest.raises(ConfigError, match="padding"):
        write_config(tmp_path, model, "float32", DrafterConfig(8, 9), extras={"pad_token_id": 9})


def test_extras_are_carried_and_never_override(config_folder, tmp_path: Path):
    extras = carried_keys(config_folder())
    assert extras["bos_token_id"] == 1 and "rope_theta" not in extras
    model = read_model_config(config_folder())
    with pytest.raises(ConfigError, match="vocab_size"):
        write_config(tmp_path, model, "float32", extras={"vocab_size": 3})

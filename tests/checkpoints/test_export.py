from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from d3d_jax.checkpoints.convert import load
from d3d_jax.checkpoints.export import save_params
from d3d_jax.checkpoints.hf_config import read_drafter_config, read_model_config
from d3d_jax.checkpoints.safetensors_io import INDEX_FILE, TensorFolder
from d3d_jax.checkpoints.special_tokens import read_eos_ids
from d3d_jax.config import DrafterConfig
from d3d_jax.errors import CheckpointError, ConfigError


def contents(folder: Path) -> dict[str, tuple]:
    tensors = TensorFolder(folder)
    return {name: (tensors[name].dtype, tensors[name].shape, tensors.read(name).tobytes()) for name in tensors}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back_is_bit_equal_with_the_same_names(model_folder, tmp_path: Path, dtype, tied: bool):
    def edit(tensors):
        return {name: value.astype(dtype) for name, value in tensors.items()}

    folder = model_folder(tie_word_embeddings=tied, edit=edit)
    loaded = load(folder, dtype="keep")
    count = save_params(tmp_path / "back", loaded.params, loaded.config)
    assert contents(tmp_path / "back") == contents(folder)
    assert count == len(contents(folder))
    assert read_model_config(tmp_path / "back") == read_model_config(folder)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == np.dtype(dtype).name


def test_shards_hold_the_same_as_one_file(model_folder, tmp_path: Path):
    loaded = load(model_folder(), dtype="keep")
    seen: list[str] = []
    save_params(tmp_path / "many", loaded.params, loaded.config, max_shard_bytes=20_000, on_tensor=seen.append)
    assert (tmp_path / "many" / INDEX_FILE).is_file() and len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert contents(tmp_path / "many") == contents(model_folder())
    assert sorted(seen) == sorted(contents(tmp_path / "many"))


def test_the_type_can_be_changed_on_the_way_out(model_folder, tmp_path: Path):
    loaded = load(model_folder(), dtype="keep")
    save_params(tmp_path / "half", loaded.params, loaded.config, dtype=jnp.bfloat16)
    norm = TensorFolder(tmp_path / "half").read("model.norm.weight")
    assert np.array_equal(norm, np.asarray(loaded.params["norm"]).astype(ml_dtypes.bfloat16))


def test_a_tree_of_another_model_is_refused_with_every_fault_and_nothing_is_written(model_folder, tmp_path: Path):
    params, config, _ = load(model_folder(), dtype="keep")
    wrong = {**params, "extra": params["norm"], "norm": params["norm"][:5]}
    del wrong["lm_head"]
    with pytest.raises(CheckpointError) as error:
        save_params(tmp_path / "out", wrong, config)
    for words in ("lm_head is missing", "extra is left over", "norm is [5], expected [32]"):
        assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_drafter_that_cannot_be_right_leaves_no_folder_behind(model_folder, tmp_path: Path):
    params, config, _ = load(model_folder(), dtype="keep")
    with pytest.raises(ConfigError, match="no row"):
        save_params(tmp_path / "out", params, config, drafter=DrafterConfig(8, 64))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_mask_that_the_tokenizer_pads_with_is_not_written(model_folder, tmp_path: Path):
    source = model_folder()
    settings = {"pad_token": "<pad>", "added_tokens_decoder": {"60": {"content": "<pad>"}}}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    params, config, _ = load(source, dtype="keep")
    with pytest.raises(ConfigError, match="mask_token_id=60 is also a padding id"):
        save_params(tmp_path / "out", params, config, drafter=DrafterConfig(8, 60), tokenizer_folder=source)
    assert not (tmp_path / "out").exists()


def test_a_pruned_drafter_keeps_its_fields_its_tokenizer_and_its_ends(model_folder, tmp_path: Path):
    source = model_folder()
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 3], "top_k": 20}')
    for name, text in (("tokenizer.json", "{}"), ("chat_template.jinja", "hello"), ("secret.txt", "no")):
        (source / name).write_text(text)
    params, config, _ = load(source, dtype="keep")
    drafter = DrafterConfig(8, 63, "bidirectional", (0, 2, 5), "some/target")
    save_params(tmp_path / "out", params, config, drafter=drafter, tokenizer_folder=source)
    out = tmp_path / "out"
    assert read_drafter_config(out) == drafter
    assert read_eos_ids(out) == (2, 3)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [2, 3]
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [2, 3], "top_k": 20}
    assert (out / "chat_template.jinja").read_text() == "hello" and not (out / "secret.txt").exists()
    with pytest.raises(CheckpointError, match="not empty"):
        save_params(out, params, config)
    save_params(out, params, config, eos_ids=(4,), overwrite=True)
    assert read_eos_ids(out) == (4,) and not (out / "tokenizer.json").exists()


# ---- against transformers (C3, C4, C11)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.fixture
def hf():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


def hf_rotary(hf, folder: Path):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    return Qwen3RotaryEmbedding(hf.AutoConfig.from_pretrained(folder))


@pytest.mark.torch
@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 12345.5, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_scaling": YARN, "max_position_embeddings": 40960},
        {"rope_theta": ..., "rope_parameters": {**YARN, "rope_theta": 1e6, "beta_fast": 16.0, "truncate": False}},
        {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
        {"rope_scaling": {**YARN, "attention_factor": 1.25}},
    ],
)
def test_rope_is_transformers_before_and_after_we_write_it(hf, config_folder, tmp_path: Path, changes, drafter: bool):
    from d3d_jax.checkpoints.hf_config import write_config
    from d3d_jax.models.layers import rope_frequencies

    group = {"version": 1, "block_size": 8, "mask_token_id": 63, "block_attention": "causal"}
    group |= {"kept_layers": None, "target_model": None}
    folder = config_folder(head_dim=128, **changes, **({"d3d_config": group} if drafter else {}))
    config = read_model_config(folder)
    ours, scale = rope_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    write_config(tmp_path, config, "float32", read_drafter_config(folder) if drafter else None)
    for where in (folder, tmp_path):
        theirs = hf_rotary(hf, where)
        np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=1e-6)
        assert scale == pytest.approx(theirs.attention_scaling, rel=1e-6)
    assert read_model_config(tmp_path) == config


@pytest.mark.torch
def test_what_transformers_itself_saves_is_read(hf, config_folder, tmp_path: Path):
    for changes in ({}, {"rope_scaling": YARN}, {"tie_word_embeddings": True}):
        folder = config_folder(**changes)
        hf.AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "saved")
        assert read_model_config(tmp_path / "saved") == read_model_config(folder)


def random_hf_model(hf, folder: Path, tied: bool, dtype: str) -> Path:
    import torch

    torch.manual_seed(0)
    config = hf.AutoConfig.from_pretrained(folder, tie_word_embeddings=tied, initializer_range=0.3)
    model = hf.Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder.parent / "hf", max_shard_size="40KB")
    return folder.parent / "hf"


def kl(reference: np.ndarray, other: np.ndarray) -> float:
    """Largest KL divergence in nats over positions."""
    p, q = (np.asarray(jax.nn.log_softmax(x.astype(np.float64))) for x in (reference, other))
    return float((np.exp(p) * (p - q)).sum(-1).max())


@pytest.mark.torch
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 1e-3)])
def test_transformers_loads_what_we_export_and_both_give_the_same_distribution(
    hf, config_folder, tmp_path: Path, tied: bool, dtype: str, bound: float
):
    import torch

    from d3d_jax.models.qwen3 import forward, logits

    source = random_hf_model(hf, config_folder(), tied, dtype)
    loaded = load(source, dtype="keep")
    save_params(tmp_path / "back", loaded.params, loaded.config)
    assert contents(tmp_path / "back") == contents(source)

    model, info = hf.Qwen3ForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert str(model.dtype) == f"torch.{dtype}"
    model = model.to(torch.float32)  # the weights are what is compared, not the arithmetic of bfloat16
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), loaded.params)
    for seed in range(5):
        prompt = np.random.default_rng(seed).integers(0, 64, (1, 24))
        with torch.no_grad():
            theirs = model(torch.tensor(prompt)).logits.numpy()
        with jax.default_matmul_precision("highest"):
            ours = logits(params, forward(params, jnp.asarray(prompt), loaded.config))
        assert kl(theirs, np.asarray(ours)) < bound


@pytest.mark.torch
def test_one_renamed_weight_would_be_seen_by_the_distribution(hf, config_folder, tmp_path: Path):
    """The gate above can fail: exchanging two projections of one layer moves the distribution."""
    from d3d_jax.models.qwen3 import forward, logits

    params, config, _ = load(random_hf_model(hf, config_folder(), False, "float32"), dtype="keep")
    layers = dict(params["layers"], gate_proj=params["layers"]["up_proj"], up_proj=params["layers"]["gate_proj"])
    tokens = jnp.arange(24)[None]
    right, wrong = (logits(p, forward(p, tokens, config)) for p in (params, {**params, "layers": layers}))
    assert kl(np.asarray(right), np.asarray(wrong)) > 1e-3

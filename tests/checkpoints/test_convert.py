from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from d3d_jax.checkpoints.convert import Source, load, load_params
from d3d_jax.checkpoints.hf_config import read_model_config
from d3d_jax.checkpoints.ledger import leaves
from d3d_jax.errors import CheckpointError, ConfigError
from d3d_jax.models.qwen3 import forward, logits

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
Q0 = "model.layers.0.self_attn.q_proj.weight"


def flat(params: dict) -> dict[str, np.ndarray]:
    return {
        ".".join(entry.key for entry in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }


def assert_same(first: dict, second: dict) -> None:
    a, b = flat(first), flat(second)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]), name


def test_tensors_are_stacked_as_they_are(model_folder, tensors_of):
    folder = model_folder()
    loaded = load(folder, dtype="keep")
    tensors = tensors_of(dict(vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=16,
                              num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
                              tie_word_embeddings=False))  # fmt: skip
    assert {path: leaf.shape for path, leaf in flat(loaded.params).items()} == {
        ".".join(path): param.shape for path, param in leaves(loaded.config).items()
    }
    for i in range(3):
        stored = tensors[f"model.layers.{i}.mlp.down_proj.weight"]
        assert np.array_equal(loaded.params["layers"]["down_proj"][i], stored)
    assert np.array_equal(loaded.params["lm_head"], tensors[HEAD])
    assert str(loaded.ledger) == "36 tensors read, 36 used"


def test_the_type_is_what_was_asked_for(model_folder, tensors_of):
    folder = model_folder()
    for dtype in (jnp.bfloat16, "bfloat16", np.float16):
        assert {leaf.dtype for leaf in jax.tree.leaves(load_params(folder, dtype=dtype))} == {jnp.dtype(dtype)}
    exact = flat(load_params(folder, dtype="keep"))
    for name, leaf in flat(load_params(folder, dtype="bfloat16")).items():
        assert np.array_equal(leaf, exact[name].astype(ml_dtypes.bfloat16))
    with pytest.raises(ConfigError, match=r"dtype='int8'.*bfloat16"):
        load_params(folder, dtype="int8")


def test_layers_of_different_types_need_a_choice(model_folder):
    def edit(tensors):
        tensors[Q0] = tensors[Q0].astype(np.float16)

    folder = model_folder(edit=edit)
    with pytest.raises(CheckpointError, match=r"layers.q_proj is stored as float16, float32"):
        load_params(folder, dtype="keep")
    assert load_params(folder, dtype="float32")["layers"]["q_proj"].dtype == jnp.float32


# ---- tied or not, stored or not (C1)


def with_head(kind: str):
    def edit(tensors):
        if kind == "absent":
            tensors.pop(HEAD, None)
        else:
            tensors[HEAD] = tensors[EMBED] + (kind == "different")

    return edit


@pytest.mark.parametrize("kind", ["absent", "equal"])
def test_a_tied_model_shares_its_embedding_whether_the_head_is_stored_or_not(model_folder, kind: str):
    loaded = load(model_folder(tie_word_embeddings=True, edit=with_head(kind)), dtype="keep")
    assert "lm_head" not in loaded.params and loaded.config.tie_word_embeddings
    note = "" if kind == "absent" else f"; {HEAD} equals the embedding it is tied to"
    assert str(loaded.ledger) == f"{35 + (kind == 'equal')} tensors read, 35 used{note}"


def test_a_tied_model_with_another_head_needs_a_choice(model_folder):
    folder = model_folder(tie_word_embeddings=True, edit=with_head("different"))
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight.*'untie'"):
        load(folder, dtype="keep")
    ignored = load(folder, dtype="keep", lm_head="ignore")
    assert "lm_head" not in ignored.params and "ignored as told" in str(ignored.ledger)
    untied = load(folder, dtype="keep", lm_head="untie")
    assert not untied.config.tie_word_embeddings and str(untied.ledger) == "36 tensors read, 36 used"
    assert np.array_equal(untied.params["lm_head"], untied.params["embed_tokens"] + 1)


def test_untying_without_a_stored_head_is_refused(model_folder):
    with pytest.raises(CheckpointError, match=r"there is no lm_head.weight"):
        load(model_folder(tie_word_embeddings=True), dtype="keep", lm_head="untie")


@pytest.mark.parametrize("kind", ["equal", "different"])
def test_an_untied_model_uses_its_head(model_folder, kind: str):
    params = load_params(model_folder(edit=with_head(kind)), dtype="keep")
    assert np.array_equal(params["lm_head"], params["embed_tokens"] + (kind == "different"))


def test_an_untied_model_without_a_head_is_refused_with_key_and_file(model_folder):
    with pytest.raises(CheckpointError, match=r"model.safetensors has no lm_head.weight.*tie_word_embeddings=false"):
        load(model_folder(edit=with_head("absent")), dtype="keep")


# ---- names (C2, C8)


@pytest.mark.parametrize("prefix", ["", "model.language_model."])
def test_the_three_prefixes_give_the_same_tree(model_folder, prefix: str):
    def edit(tensors):
        return {name.replace("model.", prefix, 1): value for name, value in tensors.items()}

    assert_same(load_params(model_folder("other", edit=edit), dtype="keep"), load_params(model_folder(), dtype="keep"))


def test_an_unknown_prefix_is_refused_with_names_and_pattern(model_folder):
    def edit(tensors):
        return {"decoder." + name: value for name, value in tensors.items()}

    with pytest.raises(CheckpointError, match=r"found decoder.lm_head.weight.*expected names like model.layers.N"):
        load(model_folder(edit=edit), dtype="keep")


def test_a_renamed_tensor_is_refused_with_both_names(model_folder):
    def edit(tensors):
        tensors[Q0.replace("q_proj", "qq_proj")] = tensors.pop(Q0)

    with pytest.raises(CheckpointError) as error:
        load(model_folder(edit=edit), dtype="keep")
    assert f"1 missing: {Q0} (is it {Q0.replace('q_proj', 'qq_proj')}?)" in str(error.value)
    assert "1 left over" in str(error.value)


def test_every_fault_is_told_at_once_and_nothing_is_read(model_folder, monkeypatch: pytest.MonkeyPatch):
    def edit(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.1.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
        tensors["layers.2.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((48, 32), np.float32)

    monkeypatch.setattr("d3d_jax.checkpoints.safetensors_io.TensorFolder.read_into", None)
    with pytest.raises(CheckpointError) as error:
        load(model_folder(edit=edit), dtype="keep")
    for words in (
        "1 missing: model.norm.weight",
        "1 left over: model.layers.1.self_attn.q_proj.bias",
        "1 for one parameter: layers.2.mlp.up_proj.weight and model.layers.2.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight is [48, 32], expected [32, 48]",
    ):
        assert words in str(error.value)


def test_more_layers_than_the_config_says_are_left_over(model_folder):
    folder = model_folder()
    config = dataclasses.replace(read_model_config(folder), num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"11 left over.*num_hidden_layers=2, the tensors go up to layer 2"):
        load(folder, config, dtype="keep")


# ---- rows of the vocabulary (C6)


def test_rows_other_than_the_config_says_are_refused(model_folder):
    folder = model_folder()
    config = dataclasses.replace(read_model_config(folder), vocab_size=72)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is \[64, 32\], expected \[72, 32\]"):
        load(folder, config, dtype="keep")


@pytest.mark.parametrize("tied", [False, True])
def test_padding_is_explicit_and_leaves_the_logits_of_real_ids_exact(model_folder, tied: bool):
    folder = model_folder(tie_word_embeddings=tied)
    plain, padded = load(folder, dtype="keep"), load(folder, dtype="keep", pad_vocab_to=72)
    assert (plain.config.vocab_size, padded.config.vocab_size) == (64, 72)
    for name in ("embed_tokens", "lm_head")[: 1 if tied else 2]:
        assert padded.params[name].shape == (72, 32) and not np.any(padded.params[name][64:])
        assert np.array_equal(padded.params[name][:64], plain.params[name])
    tokens = jnp.arange(10)[None]
    before = logits(plain.params, forward(plain.params, tokens, plain.config))
    after = logits(padded.params, forward(padded.params, tokens, padded.config))
    assert after.shape == (1, 10, 72)
    np.testing.assert_allclose(after[..., :64], before, rtol=1e-6, atol=1e-6)


def test_padding_to_fewer_rows_is_refused(model_folder):
    with pytest.raises(ConfigError, match="pad_vocab_to=63 is below the 64 rows"):
        load(model_folder(), dtype="keep", pad_vocab_to=63)


# ---- onto devices


def one_device_sharding(path, shape, axes):
    return NamedSharding(
        Mesh(np.array(jax.devices()[:1]), "x"), PartitionSpec(*("x" if a == "mlp" else None for a in axes))
    )


def test_a_sharded_load_is_the_plain_load(model_folder):
    folder = model_folder()
    seen = []
    sharded = load_params(folder, dtype="keep", sharding_for=one_device_sharding, on_tensor=seen.append)
    assert_same(sharded, load_params(folder, dtype="keep"))
    assert all(isinstance(leaf.sharding, NamedSharding) for leaf in jax.tree.leaves(sharded))
    assert len(seen) == len(set(seen)) == 36


@pytest.mark.parametrize("rows", [slice(48, 66), slice(66, 72)])
def test_a_part_that_reaches_into_or_lies_in_the_padding_is_zero_there(model_folder, rows: slice):
    folder = model_folder()
    source = Source(folder, pad_vocab_to=72)
    path = ("embed_tokens",)
    part = source.leaf(path, leaves(source.config)[path], np.dtype(np.float32), (rows, slice(8, 16)))
    whole = np.asarray(load_params(folder, dtype="keep", pad_vocab_to=72)["embed_tokens"])
    assert np.array_equal(part, whole[rows, 8:16])

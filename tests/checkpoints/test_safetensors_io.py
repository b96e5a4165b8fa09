from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from d3d_jax.checkpoints.atomic_folder import atomic_folder
from d3d_jax.checkpoints.safetensors_io import INDEX_FILE, OutgoingTensor, TensorFolder, write_tensors
from d3d_jax.errors import CheckpointError

RNG = np.random.default_rng(0)
VALUES = {
    "a": RNG.normal(size=(7, 5)).astype(np.float32),
    "b": RNG.normal(size=(3, 4, 5)).astype(ml_dtypes.bfloat16),
    "c": RNG.normal(size=(11,)).astype(np.float16),
    "d": RNG.normal(size=(2, 5)).astype(ml_dtypes.bfloat16),
}


def outgoing(values: dict[str, np.ndarray]) -> list[OutgoingTensor]:
    return [OutgoingTensor(name, v.shape, v.dtype, lambda v=v: v) for name, v in values.items()]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_tensors(tmp_path, outgoing(VALUES), max_shard_bytes=150)
    return tmp_path


def bits(array: np.ndarray) -> bytes:
    return array.tobytes()


def test_shards_read_back_bit_for_bit(shards: Path):
    assert len(list(shards.glob("model-*-of-*.safetensors"))) == 3
    folder = TensorFolder(shards)
    assert set(folder) == set(VALUES)
    for name, value in VALUES.items():
        assert folder.read(name).dtype == value.dtype and bits(folder.read(name)) == bits(value)


def test_one_small_checkpoint_is_one_file_without_an_index(tmp_path: Path):
    assert write_tensors(tmp_path, outgoing(VALUES)) == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert set(TensorFolder(tmp_path)) == set(VALUES)


def test_the_index_tells_the_total_and_no_shard_is_above_the_limit(shards: Path):
    index = json.loads((shards / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in VALUES.values())
    assert set(index["weight_map"]) == set(VALUES)
    assert len(TensorFolder(shards)) == 4


def test_the_safetensors_library_reads_what_we_write_and_finds_the_format(tmp_path: Path):
    write_tensors(tmp_path, outgoing(VALUES))
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(VALUES)
        for name in ("a", "c"):
            assert bits(file.get_tensor(name)) == bits(VALUES[name])


@pytest.mark.torch
def test_torch_reads_the_same_bfloat16(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    write_tensors(tmp_path, outgoing(VALUES))
    tensor = load_file(tmp_path / "model.safetensors")["b"]
    assert tensor.dtype == torch.bfloat16
    assert bits(tensor.view(torch.int16).numpy()) == bits(VALUES["b"])


@pytest.mark.parametrize("index", [(), (slice(1, 3),), (slice(None), slice(1, 3), slice(2, 5))])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("piece", [1, 50, 10**6])
def test_a_slice_is_read_alone_and_cast(
    shards: Path, index: tuple[slice, ...], dtype, piece: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("d3d_jax.checkpoints.safetensors_io._PIECE_BYTES", piece)
    expected = VALUES["b"][index].astype(dtype)
    out = np.empty(expected.shape, dtype)
    TensorFolder(shards).read_into("b", out, index)
    assert bits(out) == bits(expected)


def test_an_overflow_of_float16_is_refused_and_infinity_itself_is_not(tmp_path: Path):
    save_file({"big": np.float32([1e6, 0]), "inf": np.float32([np.inf, 1])}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    with pytest.raises(CheckpointError, match="big holds values above float16"):
        folder.read("big", np.dtype(np.float16))
    assert np.isinf(folder.read("inf", np.dtype(np.float16))[0])


def test_tensors_are_compared_by_value_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("d3d_jax.checkpoints.safetensors_io._PIECE_BYTES", 64)
    a = RNG.normal(size=(9, 4)).astype(np.float32)
    b = a.copy()
    b[8, 3] += 1
    save_file({"a": a, "same": a.copy(), "other": b, "short": a[:8].copy()}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    assert folder.equal("a", "same")
    assert not folder.equal("a", "other") and not folder.equal("a", "short")


# ---- half a checkpoint


def shard_of(shards: Path, name: str) -> Path:
    return shards / json.loads((shards / INDEX_FILE).read_text())["weight_map"][name]


def test_a_missing_shard_is_named_before_anything_is_loaded(shards: Path):
    gone = shard_of(shards, "b")
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"nothing was loaded: {gone.name} is missing"):
        TensorFolder(shards)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_truncated_shard_is_named(shards: Path, keep: int):
    path = shard_of(shards, "b")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=path.name):
        TensorFolder(shards)


def test_a_shard_with_bytes_too_many_is_named(shards: Path):
    path = shard_of(shards, "b")
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match=f"{path.name} has .* bytes; its header promises"):
        TensorFolder(shards)


def test_a_malformed_header_is_named(tmp_path: Path):
    text = b'{"a":{"dtype":"F32","shape":[2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="malformed header"):
        TensorFolder(tmp_path)


def test_index_and_shards_must_agree(shards: Path):
    index = json.loads((shards / INDEX_FILE).read_text())
    index["weight_map"]["ghost"] = index["weight_map"].pop("a")
    (shards / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"holds a, which the index has in no file.*lacks 1 tensors.*ghost"):
        TensorFolder(shards)


def test_all_faults_are_told_at_once(shards: Path):
    shard_of(shards, "a").unlink()
    path = shard_of(shards, "b")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match=r"is missing.*header promises"):
        TensorFolder(shards)


def test_quantised_tensors_are_refused_by_type(tmp_path: Path):
    save_file({"a": np.ones(3, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a is I8; only F32, F16, BF16"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[", '{"weight_map": []}'])
def test_an_unreadable_index_is_named(tmp_path: Path, content: str):
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match="no readable weight_map"):
        TensorFolder(tmp_path)


def test_a_folder_without_safetensors_tells_what_it_holds(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"expected model.safetensors.*found pytorch_model.bin"):
        TensorFolder(tmp_path)


# ---- writing


def test_a_value_that_is_not_as_announced_is_refused(tmp_path: Path):
    wrong = OutgoingTensor("a", (2, 2), np.dtype(np.float32), lambda: np.ones((2, 3), np.float32))
    with pytest.raises(CheckpointError, match="announced"):
        write_tensors(tmp_path, [wrong])
    with pytest.raises(CheckpointError, match="a is int32"):
        write_tensors(tmp_path, outgoing({"a": np.ones(3, np.int32)}))


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path):
    final = tmp_path / "deep" / "model"
    with atomic_folder(final) as partial:
        (partial / "x").write_text("new")
        assert not final.exists()
    assert (final / "x").read_text() == "new"
    assert [path.name for path in final.parent.iterdir()] == ["model"]


def test_a_failure_leaves_nothing_and_keeps_what_was_there(tmp_path: Path):
    final = tmp_path / "model"
    with pytest.raises(ZeroDivisionError), atomic_folder(final) as partial:
        (partial / "x").write_text("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    final.mkdir()
    (final / "config.json").write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_folder(final, overwrite=True):
        raise ZeroDivisionError
    assert (final / "config.json").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_folder_with_content_is_replaced_only_on_request_and_only_when_it_is_a_model(tmp_path: Path):
    final = tmp_path / "model"
    final.mkdir()
    with atomic_folder(final) as partial:  # an empty folder is no obstacle
        (partial / "photo.jpg").write_text("dear to somebody")
    with pytest.raises(CheckpointError, match="not empty"), atomic_folder(final):
        pass
    with pytest.raises(CheckpointError, match="no model to overwrite"), atomic_folder(final, overwrite=True):
        pass
    (final / "config.json").write_text("{}")
    with atomic_folder(final, overwrite=True) as partial:
        (partial / "config.json").write_text("new")
    assert [path.name for path in final.iterdir()] == ["config.json"]
    with pytest.raises(CheckpointError, match="is a file"), atomic_folder(final / "config.json"):
        pass

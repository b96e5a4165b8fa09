"""Dataset folders: every row reads back as it was, what was left out is counted, and nothing else passes for one."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from d3d_jax.cli.main import main
from d3d_jax.config import BlockConfig, LossConfig, ModelConfig, RopeConfig, TrainConfig
from d3d_jax.data.builder import DESCRIPTION, LONG, DatasetReport, build_dataset, dataset_tokenizer, read_dataset
from d3d_jax.data.chat import tokenizer_hash
from d3d_jax.data.documents import EMPTY, NO_RESPONSE, read_rows
from d3d_jax.data.sources import load_documents
from d3d_jax.data.tokenizer_training import train_tokenizer
from d3d_jax.errors import CheckpointError, ConfigError, DataError
from d3d_jax.training.plan import plan_run

tfds = pytest.importorskip("tensorflow_datasets", reason="the extra `train` is not installed")


@pytest.fixture(scope="module")
def responses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty rows of 3 to 42 tokens, every fifth cut by its budget, and an empty one."""
    path, rng = tmp_path_factory.mktemp("responses") / "responses.jsonl", np.random.default_rng(3)
    with path.open("w") as file:
        for number in range(40):
            row = {"id": f"r{number}", "ids": rng.integers(5, 300, number + 3).tolist(), "prompt_length": 1}
            file.write(json.dumps({**row, "finished": number % 5 > 0}) + "\n")
        file.write(json.dumps({"id": "empty", "ids": [5, 6], "prompt_length": 1, "finished": True}) + "\n")
    return path


@pytest.fixture(scope="module")
def built(responses, tokenizer_folder, tmp_path_factory) -> tuple[Path, DatasetReport]:
    folder = tmp_path_factory.mktemp("dataset") / "train"
    with pytest.MonkeyPatch.context() as patch:  # no bucket is asked, no file fetched
        patch.setattr(socket.socket, "connect", None)
        patch.setattr(socket, "getaddrinfo", None)
        return folder, build_dataset([responses], folder, tokenizer_folder, max_tokens=32)


def test_every_row_reads_back_as_it_was_in_the_order_of_the_files(built, responses):
    folder, _ = built
    wanted = [row for row in read_rows(responses, None, lambda *_: None) if len(row.ids) <= 32]
    documents, highest = read_dataset(folder)
    found = list(documents)
    assert len(found) == len(wanted) == 30
    for document, row in zip(found, wanted, strict=True):
        assert document.ids.dtype == np.int32
        assert np.array_equal(document.ids, row.ids) and document.prompt_length == row.prompt_length
    assert documents.sizes.tolist() == [[len(row.ids), 1] for row in wanted]
    assert highest == max(row.ids.max() for row in wanted)
    source = tfds.builder_from_directory(str(folder)).as_data_source("train")
    assert [(row["id"].decode(), bool(row["finished"])) for row in source] == [(row.id, row.finished) for row in wanted]
    assert list(folder.glob("*.array_record*")) and "tensorflow" not in sys.modules


def test_the_report_adds_up(built):
    _, report = built
    assert (report.read, report.rows, report.dropped) == (41, 30, {LONG: 10, EMPTY: 1})
    assert report.read == report.rows + sum(report.dropped.values())
    assert report.tokens == sum(range(3, 33)) and report.response_tokens == report.tokens - 30
    assert report.truncated == 6 and report.lengths == {4: 2, 8: 4, 16: 8, 32: 16}
    said = "\n".join(report.lines())
    assert "41 turns read, 30 rows kept (6 cut" in said and "dropped 10: longer than max_tokens (first: " in said


def test_turns_of_conversations_become_rows_and_the_command_tells_what_was_dropped(
    tmp_path, tokenizer, tokenizer_folder, capsys
):
    ask, say = {"role": "user", "content": "How many clips?"}, {"role": "assistant", "content": "72"}
    talks = [{"id": "a", "conversations": [ask, say, ask, say]}, {"id": "b", "conversations": [ask]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    paths = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    assert main(["dataset", *paths, "--tokenizer", str(tokenizer_folder)]) == 0
    said = capsys.readouterr().out
    assert "3 turns read, 2 rows kept" in said and f"dropped 1: {NO_RESPONSE} (first: " in said
    rows = list(read_rows(tmp_path / "in.jsonl", tokenizer, lambda *_: None))
    assert [row.ids.tolist() for row in rows] == [
        document.ids.tolist() for document in read_dataset(tmp_path / "out")[0]
    ]
    assert dataset_tokenizer(tmp_path / "out") == tokenizer_hash(tokenizer_folder)


def test_a_run_reads_the_folder_as_it_reads_the_file(built, responses, tokenizer_folder, tmp_path):
    model = ModelConfig(400, 32, 48, 1, 2, 2, 16, RopeConfig(1e4))

    def plan(data: Path, tokenizer: Path | None = None):
        blocks, loss = BlockConfig(4, 8), LossConfig(gamma=4.0)
        where = {"train_data": str(data), "output_dir": str(tmp_path), "tokenizer": tokenizer and str(tokenizer)}
        return plan_run(TrainConfig("d3d", **where, steps=2, batch_size=2, row_length=32, model=model,
                                    mask_token_id=399, blocks=blocks, loss=loss))  # fmt: skip

    with plan(built[0]).train as folder, plan(responses).train as file:
        for _ in range(folder.steps_per_epoch + 1):
            one, other = next(folder), next(file)
            assert all(np.array_equal(one[name], other[name]) for name in one)
    known = tokenizer_hash(tokenizer_folder)
    assert plan(built[0], tokenizer_folder).contract["tokenizer"] == plan(built[0]).contract["tokenizer"] == known
    other = train_tokenizer(["another tokenizer"] * 9, 280, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"was made with another tokenizer than .*other"):
        plan(built[0], other)


def test_what_is_no_dataset_folder_or_has_lost_rows_is_refused(built, tmp_path):
    with pytest.raises(DataError, match=f"no readable {DESCRIPTION}; expected a folder made by `d3d dataset`"):
        load_documents([tmp_path], None, 400)
    for path in built[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = (tmp_path / DESCRIPTION).read_text()
    (tmp_path / DESCRIPTION).write_text(text.replace('"rows": 30', '"rows": 31'))
    with pytest.raises(DataError, match="holds 30 rows, but 31 were written"):
        load_documents([tmp_path], None, 400)
    with pytest.raises(DataError, match=r"token id .* but the model has 100 rows"):
        load_documents([built[0]], None, 100)


def test_a_dataset_that_cannot_be_made_is_refused_and_leaves_nothing(built, responses, tokenizer_folder, tmp_path):
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text(json.dumps({"id": "x", "ids": [1, 2, 9999], "prompt_length": 1}))
    with pytest.raises(DataError, match=r"'x' holds token id 9999, but the tokenizer in .* responses are those of ano"):
        build_dataset([foreign], tmp_path / "out", tokenizer_folder)
    with pytest.raises(DataError, match=r"no row is left: 41 turns read, 0 rows kept .* dropped 40: longer than"):
        build_dataset([responses], tmp_path / "out", tokenizer_folder, max_tokens=2)
    assert [path.name for path in tmp_path.iterdir()] == ["foreign.jsonl"]
    with pytest.raises(CheckpointError, match="is not empty"):
        build_dataset([responses], built[0], tokenizer_folder)


def test_a_missing_extra_is_named(responses, tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(DataError, match=r"missing, which dataset folders need: pip install 'd3d-jax\[train\]'"):
        build_dataset([responses], tmp_path / "out", tokenizer_folder)

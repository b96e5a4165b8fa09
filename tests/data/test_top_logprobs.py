"""The target's likeliest tokens: right ones, at the right places, stored with its responses."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from d3d_jax.checkpoints.convert import load_params
from d3d_jax.checkpoints.export import save_params
from d3d_jax.checkpoints.hf_config import read_model_config
from d3d_jax.cli.main import main
from d3d_jax.config import ModelConfig, RopeConfig
from d3d_jax.data.builder import build_dataset, read_dataset
from d3d_jax.data.documents import load_documents
from d3d_jax.data.packing import Top
from d3d_jax.data.responses import Question, with_top_logprobs
from d3d_jax.data.top_logprobs import Teacher
from d3d_jax.errors import DataError
from d3d_jax.models.qwen3 import Qwen3, forward, head

MODEL = ModelConfig(296, 32, 48, 2, 4, 2, 16, RopeConfig(1e4), max_position_embeddings=512)


@pytest.fixture(scope="module")
def params():
    return Qwen3(MODEL, rngs=nnx.Rngs(0), scale=0.25).params()


def expected(params, config, ids: list[int], prompt: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    scores = jax.nn.log_softmax(forward(params, jnp.asarray([ids]), config)[0] @ head(params).T)[prompt - 1 : -1]
    logprobs, top = jax.lax.top_k(scores, k)
    return np.asarray(top), np.asarray(logprobs)


def test_they_are_those_of_the_whole_distribution_for_texts_of_any_length(params):
    teacher = Teacher(params, MODEL, 3, 4, jax.devices()[0], jnp.float32)
    rng = np.random.default_rng(0)
    texts = [(rng.integers(0, 280, length).tolist(), prompt) for length, prompt in ((9, 1), (140, 100), (64, 63))]
    for (ids, prompt), top in zip(texts, teacher(texts), strict=True):
        wanted, logprobs = expected(params, MODEL, ids, prompt, 3)
        assert np.array_equal(top.ids, wanted) and len(top.ids) == len(ids) - prompt
        np.testing.assert_allclose(top.logprobs, logprobs, atol=1e-5)


def test_answers_are_collected_and_all_handed_on():
    questions = [Question(str(n), n, [1, n]) for n in range(5)]
    sizes, seen = [], []

    def teacher(texts):
        sizes.append(len(texts))
        assert all(ids == [1, ids[1], 7, 2] and prompt == 2 for ids, prompt in texts)
        return [Top(np.full((2, 1), ids[1], np.int32), np.zeros((2, 1), np.float32)) for ids, _ in texts]

    def answer(questions, on_answer):
        for question in reversed(questions):
            on_answer(question, (7, 2), question.row != 3)

    def note(question, ids, finished, top=None):
        seen.append((question.row, list(ids), finished, top.ids[0, 0]))

    with_top_logprobs(answer, teacher, 2)(questions, note)  # pyright: ignore[reportArgumentType]
    assert sizes == [2, 2, 1]
    assert seen == [(n, [7, 2], n != 3, n) for n in (4, 3, 2, 1, 0)]


def test_the_command_stores_them_and_a_dataset_keeps_them(tokenizer_folder, tokenizer, tmp_path, capsys):
    folder, vocab = tmp_path / "target", -(-(len(tokenizer) + 1) // 8) * 8
    config = ModelConfig(vocab, 32, 48, 1, 2, 2, 16, RopeConfig(1e4), max_position_embeddings=512)
    save_params(folder, Qwen3(config, rngs=nnx.Rngs(0), scale=0.25).params(), config, tokenizer_folder=tokenizer_folder)
    say = {"role": "assistant", "content": "1"}
    asks = [{"role": "user", "content": f"How many {n}?"} for n in range(3)]
    talks = [{"id": str(n), "conversations": [ask, say]} for n, ask in enumerate(asks)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    asked = ["respond", "--model-path", str(folder), "--input", str(tmp_path / "in.jsonl"), "--max-new-tokens", "6"]
    asked += ["--max-len", "128", "--batch-size", "2", "--output", str(tmp_path / "out.jsonl")]
    assert main([*asked, "--top-logprobs", "9999"]) == 2
    assert "--top-logprobs 9999, but the tokenizer has" in capsys.readouterr().err
    assert main([*asked, "--top-logprobs", "4"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    params, model = load_params(folder, dtype="float32"), read_model_config(folder)
    for row in rows:
        wanted, logprobs = expected(params, model, row["ids"], row["prompt_length"], 4)
        assert np.array_equal(row["top_ids"], wanted)
        np.testing.assert_allclose(row["top_logprobs"], logprobs, atol=1e-4)
        assert wanted[:, 0].tolist() == row["ids"][row["prompt_length"] :], "greedy responses are the likeliest tokens"

    report = build_dataset([tmp_path / "out.jsonl"], tmp_path / "set", tokenizer_folder)
    stored = read_dataset(tmp_path / "set", top=True)[0]
    assert report.rows == len(stored) == 3
    file = load_documents(tmp_path / "out.jsonl", None, vocab, top=True)
    for one, other in zip(stored, file, strict=True):
        assert one.top is not None and other.top is not None
        assert np.array_equal(one.top.ids, other.top.ids) and np.array_equal(one.top.logprobs, other.top.logprobs)
    assert read_dataset(tmp_path / "set")[0][0].top is None
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write(json.dumps({"id": "plain", "ids": [1, 2, 3], "prompt_length": 1}) + "\n")
    with pytest.raises(DataError, match="'plain' has 0 likeliest tokens a place, the first row 4"):
        build_dataset([tmp_path / "out.jsonl"], tmp_path / "mixed", tokenizer_folder)

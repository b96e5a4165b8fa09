"""The target's likeliest tokens: right ones, at the right places, stored with its responses."""

from __future__ import annotations

import json
from functools import partial

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
from d3d_jax.data.documents import Row
from d3d_jax.data.packing import Top
from d3d_jax.data.responses import Question, label, with_top_logprobs
from d3d_jax.data.sources import load_documents
from d3d_jax.data.top_logprobs import Teacher
from d3d_jax.errors import DataError
from d3d_jax.models.qwen3 import Qwen3, forward, head

MODEL = ModelConfig(296, 32, 48, 2, 4, 2, 16, RopeConfig(1e4), max_position_embeddings=512)


@pytest.fixture(scope="module")
def params():
    return Qwen3(MODEL, rngs=nnx.Rngs(0), scale=0.25).params()


@partial(jax.jit, static_argnums=1)
def scores(params, config: ModelConfig, ids_S: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(forward(params, ids_S[None], config)[0] @ head(params).T)


def expected(params, config, ids: list[int], prompt: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """One row at a time, dense; what is behind a causal text changes nothing in it."""
    whole = scores(params, config, jnp.asarray([*ids, *[0] * (160 - len(ids))]))
    logprobs, top = jax.lax.top_k(whole[prompt - 1 : len(ids) - 1], k)
    return np.asarray(top), np.asarray(logprobs)


def following(params, ids: list[int]) -> int:
    return int(expected(params, MODEL, [*ids, 0], len(ids), 1)[0][0, 0])


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


def test_given_responses_are_labelled_and_their_agreement_is_told(params, tmp_path):
    """The first row is the target's own, half of the second's tokens are not."""
    teacher = Teacher(params, MODEL, 2, 2, jax.devices()[0], jnp.float32)
    own = [5, 9, 33]
    for _ in range(6):
        own.append(following(params, own))
    other, prompt = list(own), 3
    for place in (3, 5, 7):
        other[place] = following(params, other[:place]) + 1
        other[place + 1] = following(params, other[: place + 1])
    texts = {"own": own, "other": other, "third": own, "long": list(range(40))}
    rows = [Row(name, np.asarray(ids, np.int32), prompt) for name, ids in texts.items()]
    path = tmp_path / "out.jsonl"
    found = label(rows[:1], teacher, path, batch_size=2, longest=32)
    assert (found.rows, found.tokens, found.agreeing, found.share) == (1, 6, 6, 1.0)
    found = label(rows, teacher, path, batch_size=2, longest=32)
    assert (found.rows, found.skipped, found.tokens, found.agreeing) == (3, 1, 18, 15)
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["id"] for row in stored] == ["own", "other", "third"]
    for row in stored:
        assert row["ids"] == texts[row["id"]]
        assert np.array_equal(row["top_ids"], expected(params, MODEL, row["ids"], prompt, 2)[0])


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
    rows.sort(key=lambda row: row["id"])
    params, model = load_params(folder, dtype="float32"), read_model_config(folder)
    for row in rows:
        wanted, logprobs = expected(params, model, row["ids"], row["prompt_length"], 4)
        assert np.array_equal(row["top_ids"], wanted)
        np.testing.assert_allclose(row["top_logprobs"], logprobs, atol=1e-4)
        assert wanted[:, 0].tolist() == row["ids"][row["prompt_length"] :], "greedy responses are the likeliest tokens"

    assert main([*asked, "--keep-responses"]) == 2
    assert "--keep-responses stores nothing new without --top-logprobs" in capsys.readouterr().err
    for given, file in (("out", "own.jsonl"), ("in", "foreign.jsonl")):
        again = ["respond", "--model-path", str(folder), "--input", str(tmp_path / f"{given}.jsonl")]
        again += ["--output", str(tmp_path / file), "--batch-size", "2", "--top-logprobs", "4", "--keep-responses"]
        assert main(again) == 0
        said = capsys.readouterr()
        if given == "out":
            assert "100.0% of" in said.out and not said.err
            assert (
                sorted(map(json.loads, (tmp_path / file).read_text().splitlines()), key=lambda row: row["id"]) == rows
            )
        else:
            assert "warning: under 90%: these are hardly the target's own responses" in said.err

    report = build_dataset([tmp_path / "out.jsonl"], tmp_path / "set", tokenizer_folder)
    stored = read_dataset(tmp_path / "set", top=True)[0]
    assert report.rows == len(stored) == 3
    file = load_documents([tmp_path / "out.jsonl"], None, vocab, top=True)
    for one, other in zip(stored, file, strict=True):
        assert one.top is not None and other.top is not None
        assert np.array_equal(one.top.ids, other.top.ids) and np.array_equal(one.top.logprobs, other.top.logprobs)
    assert read_dataset(tmp_path / "set")[0][0].top is None
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write(json.dumps({"id": "plain", "ids": [1, 2, 3], "prompt_length": 1}) + "\n")
    with pytest.raises(DataError, match="'plain' has 0 likeliest tokens a place, the first row 4"):
        build_dataset([tmp_path / "out.jsonl"], tmp_path / "mixed", tokenizer_folder)

"""Distillation from stored likeliest tokens: as a dense computation has it, in little memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.scipy.special import logsumexp

from d3d_jax.config import LossConfig
from d3d_jax.data.packing import Document, Top, block_starts, pack
from d3d_jax.data.sources import load_documents
from d3d_jax.data.top_logprobs import top_logprobs
from d3d_jax.errors import ConfigError, DataError
from d3d_jax.models.qwen3 import Qwen3, forward, head
from d3d_jax.training import loss as losses
from d3d_jax.training.loop import train
from d3d_jax.training.loss import cross_entropy, d3d_loss, divergence
from d3d_jax.training.plan import plan_run
from tests.training.toy import BLOCKS, MASK, MODEL, VOCAB, records

GAMMA, SIZE = 4.0, BLOCKS.block_size


def random_logits(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return 3 * jax.random.normal(jax.random.key(seed), shape)


def dense(teacher: jax.Array, model: jax.Array, k: int) -> jax.Array:
    """KL over the teacher's k likeliest tokens and the rest as one, from whole distributions in float64."""
    with jax.enable_x64(True):
        p, q = (jax.nn.log_softmax(x.astype(jnp.float64)) for x in (teacher, model))
        order = jnp.argsort(-p, axis=-1)
        p, q = (jnp.take_along_axis(x, order, axis=-1) for x in (p, q))
        lumped = [
            jnp.concatenate([x[..., :k], logsumexp(x[..., k:], axis=-1, keepdims=True)], axis=-1) if k < VOCAB else x
            for x in (p, q)
        ]
        return (jnp.exp(lumped[0]) * (lumped[0] - lumped[1])).sum(axis=-1).astype(jnp.float32)


def stored(teacher: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    logprobs, ids = jax.lax.top_k(jax.nn.log_softmax(teacher), k)
    return ids, logprobs


@pytest.mark.parametrize("k", [1, 4, VOCAB])
def test_the_divergence_is_that_of_whole_distributions_and_so_is_its_gradient(k):
    teacher, model = random_logits(0, (2, 5, VOCAB)), random_logits(1, (2, 5, VOCAB))

    def ours(model):
        return divergence(model, logsumexp(model, axis=-1), *stored(teacher, k))

    np.testing.assert_allclose(ours(model), dense(teacher, model, k), rtol=1e-4, atol=1e-5)
    if k == VOCAB:
        p, q = jax.nn.softmax(teacher), jax.nn.softmax(model)
        np.testing.assert_allclose(jax.grad(lambda x: ours(x).sum())(model), q - p, atol=1e-4)
    np.testing.assert_allclose(
        divergence(teacher, logsumexp(teacher, axis=-1), *stored(teacher, k)), 0, atol=2e-6
    )  # nothing between a teacher and itself


def test_places_without_a_teacher_have_finite_gradients():
    model = random_logits(1, (1, 3, VOCAB))
    nothing = jnp.zeros((1, 3, 4), jnp.int32), jnp.full((1, 3, 4), -jnp.inf)
    value, gradient = jax.value_and_grad(lambda x: divergence(x, logsumexp(x, axis=-1), *nothing).sum())(model)
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.fixture(scope="module")
def distilled() -> tuple[dict, dict, jax.Array]:
    """Parameters of a drafter, a batch with stored tops, and the teacher's whole logits for each slot [B, S, V]."""
    params, target = (Qwen3(MODEL, rngs=nnx.Rngs(seed), scale=0.25).params() for seed in (0, 1))
    rng = np.random.default_rng(0)
    ids = [rng.integers(4, MASK, length).astype(np.int32) for length in (13, 9, 17)]
    found = [top_logprobs(target, one[None], MODEL, 5) for one in ids]
    tops = [Top(np.asarray(top[0, 3:-1]), np.asarray(logprobs[0, 3:-1])) for top, logprobs in found]
    rows, _ = pack([Document(one, 4, top) for one, top in zip(ids, tops, strict=True)], 24, 0)
    plan = block_starts(rows, SIZE, 8, rng)
    batch = {**rows.arrays(), "block_start": plan.start, "block_visible": plan.visible, "block_length": plan.length}
    whole = np.zeros((*rows.tokens.shape, VOCAB), np.float32)
    for one in ids:
        logits = forward(target, one[None], MODEL)[0] @ head(target).T
        for row in range(len(rows)):
            for number in range(rows.document[row].max() + 1):
                slots = np.flatnonzero(rows.document[row] == number)
                if np.array_equal(rows.tokens[row, slots], one):
                    whole[row, slots[1:]] = logits[:-1]  # what predicts the token of a slot
    return params, {name: jnp.asarray(array) for name, array in batch.items()}, jnp.asarray(whole)


def loss_of(params, batch, **changes):
    config = LossConfig(gamma=GAMMA, chunk=7, **changes)
    fixed = {"block_size": SIZE, "mask_token_id": MASK, "block_attention": "bidirectional"}
    return d3d_loss(params, batch, MODEL, config, **fixed, dtype=jnp.float32, remat=False)


def test_the_loss_adds_the_blocks_divergence_and_its_gradient_is_that_of_the_dense_one(distilled, monkeypatch):
    params, batch, whole = distilled

    def ours(params):
        value, metrics = loss_of(params, batch, kd_weight=0.5)
        return value, metrics

    def plain(params):
        """The same with whole distributions: what `cross_entropy` hands on is dense."""
        seen = []
        real = losses.cross_entropy

        def looking(hidden, labels, head_matrix, chunk, teacher=None):
            seen.append(hidden @ head_matrix.T)
            return real(hidden, labels, head_matrix, chunk)

        monkeypatch.setattr(losses, "cross_entropy", looking)
        value, metrics = loss_of(params, batch)
        monkeypatch.undo()
        blocks = losses.d3d_inputs(batch, SIZE, MASK)
        weights = losses._block_weights(blocks, GAMMA)
        slot = jnp.maximum(batch["block_start"], 0)[..., None] + jnp.arange(SIZE)
        slot = jnp.minimum(slot, whole.shape[1] - 1)
        teacher = whole[jnp.arange(len(whole))[:, None, None], slot]
        logits = seen[0][:, whole.shape[1] :].reshape(*teacher.shape)
        p, order = jax.lax.top_k(jax.nn.log_softmax(teacher), 5)
        q = jnp.take_along_axis(jax.nn.log_softmax(logits), order, axis=-1)
        rest_p, rest_q = (jnp.log1p(-jnp.exp(x).sum(axis=-1)) for x in (p, q))
        each = (jnp.exp(p) * (p - q)).sum(axis=-1) + jnp.exp(rest_p) * (rest_p - rest_q)
        kd = (weights * each).sum() / weights.sum()
        return value + 0.5 * kd, {"kd": kd, **metrics}

    (value, metrics), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    (expected, other), wanted = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert float(metrics["kd_loss_sum"] / metrics["kd_loss_count"]) == pytest.approx(float(other["kd"]), rel=1e-4)
    assert float(other["kd"]) > 0.1
    for one, two in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)


def test_no_array_of_tokens_by_vocabulary_is_made():
    tokens, width, vocab, k = 2048, 16, 16384, 8

    def total(hidden, matrix, labels, ids, logprobs):
        _, _, apart = cross_entropy(hidden, labels, matrix, 32, (ids, logprobs))
        return apart.sum()

    shapes = [((1, tokens, width), "float32"), ((vocab, width), "float32"), ((1, tokens), "int32"),
              ((1, tokens, k), "int32"), ((1, tokens, k), "float32")]  # fmt: skip
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    memory = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * tokens * vocab / 8


# ---- from the data


@pytest.fixture(scope="module")
def with_top(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The copy task; its teacher is almost sure of the right token."""
    path = tmp_path_factory.mktemp("top") / "top.jsonl"
    with path.open("w") as file:
        for line in corpus.read_text().splitlines():
            row = json.loads(line)
            response = row["ids"][row["prompt_length"] :]
            row["top_ids"] = [[token, (token + 1) % MASK] for token in response]
            row["top_logprobs"] = [[-0.1, -3.0]] * len(response)
            file.write(json.dumps(row) + "\n")
    return path


def test_a_run_distils_and_tells_the_part(config, with_top):
    run = config(
        train_data=str(with_top), validation_data=str(with_top), loss=LossConfig(gamma=4.0, chunk=16, kd_weight=2.0),
        micro_batches=2, acceptance_every=None,
    )  # fmt: skip
    last = train(run, jax.devices()[:1])
    told = [record for record in records(run) if "kd_loss" in record]
    assert [record["step"] for record in told] == [2, 4, 6]
    for record in told:
        assert record["loss"] == pytest.approx(record["block_loss"] + record["ar_loss"] + 2 * record["kd_loss"])
    assert told[-1]["kd_loss"] < told[0]["kd_loss"] and "kd_loss" not in last  # held out, it is the plain loss


def test_likeliest_tokens_are_read_where_they_are_used_and_only_there(config, with_top, corpus):
    documents = load_documents([with_top], None, VOCAB, top=True)
    assert documents[3].top is not None and documents[3].top.ids.shape == (4, 2)
    plain = plan_run(config(train_data=str(with_top)))
    assert "top_ids" not in plain.train.at(0) and "kd_weight" not in plain.contract["loss"]
    run = config(train_data=str(with_top), loss=LossConfig(gamma=4.0, kd_weight=1.0))
    batch = plan_run(run).train.at(0)
    response = batch["response"]
    assert np.array_equal(batch["top_ids"][response][:, 0], batch["tokens"][response])
    assert (batch["top_logprobs"][~response] == -np.inf).all()
    with pytest.raises(DataError, match="needs the target's likeliest tokens; make the responses with `d3d respond"):
        plan_run(dataclasses.replace(run, train_data=str(corpus)))
    with pytest.raises(ConfigError, match="leave it out with objective 'ar'"):
        plan_run(dataclasses.replace(run, objective="ar"))


@pytest.mark.parametrize(
    ("ids", "logprobs", "said"),
    [
        ([[1, 2]], [[-1.0, -2.0]], "expected K of both for each"),
        ([[1, 2], [3]], [[-1.0, -2.0], [-1.0]], "lists of equally long lists"),
        ([[1, 2], [3, 4]], [[-1.0], [-2.0]], "expected K of both for each"),
    ],
)
def test_malformed_likeliest_tokens_are_refused(tmp_path, ids, logprobs, said):
    row = {"id": "a", "ids": [1, 5, 6], "prompt_length": 1, "top_ids": ids, "top_logprobs": logprobs}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=said):
        load_documents([tmp_path / "rows.jsonl"], None, VOCAB, top=True)


def test_sources_and_rows_with_unlike_numbers_of_likeliest_tokens_are_refused_at_the_start(tmp_path):
    def row(k: int) -> str:
        top = {"top_ids": [list(range(k))] * 2, "top_logprobs": [[-1.0] * k] * 2}
        return json.dumps({"id": str(k), "ids": [1, 5, 6], "prompt_length": 1, **top}) + "\n"

    for name, text in {"two": row(2), "three": row(3), "mixed": row(2) + row(3)}.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"mixed.jsonl, row 0 has 2 likeliest .*, row 1 has 3; make all with one"):
        load_documents([tmp_path / "mixed.jsonl"], None, VOCAB, top=True)
    with pytest.raises(DataError, match=r"two.jsonl has 2 likeliest tokens a place, .*three.jsonl has 3; make all"):
        load_documents([tmp_path / "two.jsonl", tmp_path / "three.jsonl"], None, VOCAB, top=True)


def test_documents_with_unlike_numbers_of_likeliest_tokens_are_refused():
    ids = np.arange(1, 5, dtype=np.int32)
    top = Top(np.ones((2, 3), np.int32), np.zeros((2, 3), np.float32))
    with pytest.raises(DataError, match=r"\[0, 3\] likeliest tokens"):
        pack([Document(ids, 2, top), Document(ids, 2)], 8, 0)

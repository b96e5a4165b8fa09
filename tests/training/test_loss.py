"""The losses: what a block may see, what is supervised, and that every mean is one global mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from d3d_jax.config import BlockConfig, LossConfig, MeshConfig, ModelConfig, RopeConfig, TrainConfig
from d3d_jax.data.packing import Document, PackedRows, block_starts, pack
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.devices.sharding import BATCH, replicated
from d3d_jax.errors import ConfigError
from d3d_jax.models.qwen3 import Params, Qwen3, head
from d3d_jax.training import loss as losses
from d3d_jax.training.loss import ar_loss, cross_entropy, d3d_loss, position_decay
from d3d_jax.training.step import make_gradient, make_loss

CONFIG = ModelConfig(32, 32, 48, 2, 4, 2, 16, RopeConfig(1e4))
MASK, BLOCK, GAMMA = 31, 4, 3.0
ROWS, LENGTH, PLACES = 4, 256, 25  # one shape for nearly all batches: every other one is another compilation
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def params() -> Params:
    return Qwen3(CONFIG, rngs=nnx.Rngs(0), scale=0.25).params()


def drafter_loss(params: Params, batch: Arrays, ar_weight: float = 1.0, kind: str = "bidirectional", chunk: int = 64):
    config = LossConfig(ar_weight=ar_weight, gamma=GAMMA, chunk=chunk)
    fixed = {"block_size": BLOCK, "mask_token_id": MASK, "block_attention": kind}
    return d3d_loss(params, batch, CONFIG, config, **fixed, dtype=jnp.float32, remat=False)


def target_loss(params: Params, batch: Arrays, prompt_weight: float = 0.0):
    return ar_loss(params, batch, CONFIG, LossConfig(prompt_weight=prompt_weight, chunk=64), jnp.float32, False)


def seen_by_the_loss(params: Params, batch: Arrays, kind: str = "bidirectional") -> tuple:
    """Hidden state and label of every row, clean ones first, and the weight of its cross-entropy in `d3d_loss`."""
    handed: list[tuple] = []

    def value(each):
        def record(hidden, labels, head_matrix, chunk, teacher=None):
            handed.append((hidden, labels))
            return each, jnp.zeros_like(each, bool)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(losses, "cross_entropy", record)
            return drafter_loss(params, batch, kind=kind)[0]

    rows, clean = batch["tokens"].shape
    weights = jax.grad(value)(jnp.zeros((rows, clean + BLOCK * batch["block_start"].shape[1])))
    return (*handed[0], weights)


def gradient_of_hidden(loss, params: Params, batch: Arrays) -> np.ndarray:
    """d loss / d hidden [B, T, D]: a row is zero exactly where its logits carry no gradient."""
    forward = losses.forward
    width = LENGTH if loss is target_loss else LENGTH + BLOCK * PLACES

    def value(probe, params, batch):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(losses, "forward", lambda *args, **kwargs: forward(*args, **kwargs) + probe)
            return loss(params, batch)[0]

    return np.asarray(jax.jit(jax.grad(value))(np.zeros((ROWS, width, CONFIG.hidden_size), np.float32), params, batch))


look = jax.jit(seen_by_the_loss, static_argnames="kind")


def document(seed: int, length: int, prompt_length: int) -> Document:
    ids = np.random.default_rng(seed).integers(0, MASK, length).astype(np.int32)
    return Document(ids, prompt_length)


def one_row(length: int, prompt_length: int, row_length: int = LENGTH, seed: int = 0) -> PackedRows:
    return pack([document(seed, length, prompt_length)], row_length, 0)[0]


def blank() -> PackedRows:
    """A row of padding."""
    slots = np.arange(LENGTH, dtype=np.int32)[None]
    zero, minus = 0 * slots, 0 * slots - 1
    return PackedRows(tokens=zero, document=minus, start=slots, position=zero, response=slots < 0, response_start=minus)


def stacked(rows: list[PackedRows], plans: Any) -> Arrays:
    """A batch of whole rows; `plans` holds start, visible tokens and length of every block, [3, B, C]."""
    names = ("block_start", "block_visible", "block_length")
    parts = {name: np.concatenate([row.arrays()[name] for row in rows]) for name in rows[0].arrays()}
    return {**parts, **dict(zip(names, np.asarray(plans, np.int32), strict=True))}


def batch_of(*rows: tuple[PackedRows, Any]) -> Arrays:
    """A batch of the common shape: rows, each with its (start, visible, length) of blocks, then rows of padding."""
    plans = np.stack([np.full((ROWS, PLACES), fill) for fill in (-1, 0, 0)])
    for index, (_, blocks) in enumerate(rows):
        plan = np.asarray(blocks, int).reshape(-1, 3).T
        plans[:, index, : plan.shape[1]] = plan
    return stacked([row for row, _ in rows] + [blank()] * (ROWS - len(rows)), plans)


# ---- no block sees an answer


@pytest.mark.parametrize("kind", ["bidirectional", "causal"])
def test_a_block_sees_no_token_from_its_first_masked_position_on_whatever_the_spacing(params, kind):
    """Blocks that overlap, touch and lie apart, with 0, 1 and 2 visible tokens; row i of the batch differs in token i.

    Both ways: later tokens change no bit of a block's hidden states, earlier ones change it.
    """
    length, first = 22, 2
    rows, clean = [one_row(length, 1, length)] * length, np.arange(length)
    for spacing in range(1, 2 * BLOCK + 1):
        start = np.broadcast_to(first + spacing * np.arange(3), (length, 3))
        visible = np.broadcast_to([0, 1, 2], (length, 3))
        blocks = np.minimum(BLOCK, length - start)
        batch = stacked(rows, [start, visible, blocks])
        changed = {**batch, "tokens": (batch["tokens"] + np.eye(length, dtype=np.int32)) % MASK}
        differs = np.asarray(look(params, batch, kind=kind)[0] != look(params, changed, kind=kind)[0]).any(axis=-1)
        assert np.array_equal(differs[:, :length], clean[None] >= clean[:, None]), "clean rows are causal"
        for k in range(3):
            changed = differs[:, length + k * BLOCK :][:, :BLOCK]
            reach = start[0, k] + visible[0, k]  # tokens before it are seen
            if kind == "bidirectional":
                assert np.array_equal(changed.any(axis=1), clean < reach), (spacing, k)
                assert np.array_equal(changed.all(axis=1), clean < reach), (spacing, k)
            else:
                sees = clean[:, None] <= np.minimum(start[0, k] + np.arange(BLOCK), reach - 1)
                assert np.array_equal(changed, sees), (spacing, k)


# ---- labels, weights and the slots they stand in


def blocks_alone(params: Params, batch: Arrays):
    return drafter_loss(params, batch, ar_weight=0.0)


def test_one_supervised_masked_token_has_the_only_gradient_and_the_right_label(params):
    rows, visible, start = one_row(14, 3), 1, 6
    batch = batch_of((rows, [(start, visible, visible + 1)]))
    gradient = gradient_of_hidden(blocks_alone, params, batch)
    slot = LENGTH + visible
    assert np.argwhere(np.abs(gradient).sum(axis=-1)).tolist() == [[0, slot]]
    assert_is_gradient_of_label(params, batch, gradient[0, slot], slot, rows.tokens[0, start + visible])


@pytest.mark.parametrize("loss", [drafter_loss, target_loss])
def test_one_response_token_has_the_only_gradient_and_it_is_in_the_slot_before(params, loss):
    rows = one_row(8, 7)
    batch = batch_of((rows, []))
    gradient = gradient_of_hidden(loss, params, batch)
    assert np.argwhere(np.abs(gradient).sum(axis=-1)).tolist() == [[0, 6]]
    assert_is_gradient_of_label(params, batch, gradient[0, 6], 6, rows.tokens[0, 7])


def assert_is_gradient_of_label(params: Params, batch: Arrays, gradient, slot: int, label: int) -> None:
    """A mean over one token: (softmax - one-hot of the label) @ head."""
    hidden = np.asarray(look(params, batch)[0])[0, slot].astype(np.float64)
    matrix = np.asarray(head(params), np.float64)
    scores = np.exp(matrix @ hidden - (matrix @ hidden).max())
    expected = (scores / scores.sum() - np.eye(CONFIG.vocab_size)[label]) @ matrix
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5)


def test_weights_decay_from_the_first_masked_position_and_both_means_are_whole(params):
    """Blocks with 0, 1 and 3 visible tokens, one cut by the end of its document after 2."""
    rows = one_row(15, 2)
    batch = batch_of((rows, [(2, 0, 4), (5, 1, 4), (9, 3, 4), (13, 0, 2)]))
    _, labels, weights = (np.asarray(x) for x in look(params, batch))
    decay = np.exp(-np.arange(4) / GAMMA)
    golden = np.zeros((ROWS, PLACES, BLOCK))
    golden[0, 0], golden[0, 1, 1:], golden[0, 2, 3:], golden[0, 3, :2] = decay, decay[:3], decay[:1], decay[:2]
    np.testing.assert_allclose(weights[:, LENGTH:].reshape(golden.shape), golden / golden.sum(), rtol=1e-6)
    clean = np.zeros((ROWS, LENGTH))
    clean[0, 1:14] = 1 / 13  # rows 1..13 predict the response, slots 2..14
    np.testing.assert_allclose(weights[:, :LENGTH], clean, rtol=1e-6)
    assert np.array_equal(labels[0, 1:14], rows.tokens[0, 2:15])
    assert np.array_equal(labels[0, LENGTH:][: 2 * BLOCK], rows.tokens[0, [2, 3, 4, 5, 5, 6, 7, 8]])


def test_the_decay_is_that_of_the_block_size_unless_set():
    assert [position_decay(size, LossConfig()) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]
    assert position_decay(16, LossConfig(gamma=2.5)) == 2.5
    with pytest.raises(ConfigError, match=r"loss.gamma has no default for block_size=12 \(known: \[8, 10, 16\]\)"):
        position_decay(12, LossConfig())


# ---- packing, short and empty responses


def run_config(objective: str) -> TrainConfig:
    loss, blocks = LossConfig(gamma=GAMMA, chunk=64), BlockConfig(BLOCK)
    run = {"train_data": "", "output_dir": "", "steps": 1, "batch_size": 2, "mask_token_id": MASK}
    return TrainConfig(objective, **run, loss=loss, blocks=blocks)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module", params=["ar", "d3d"])
def objective(request: pytest.FixtureRequest):
    """The objective's name, and its `(params, batch) -> (loss, metrics), gradient`, plain and compiled."""
    gradient = jax.value_and_grad(make_loss(run_config(request.param), CONFIG), has_aux=True)
    return request.param, gradient, jax.jit(gradient)


def test_three_documents_in_one_row_are_the_three_alone(params, objective):
    lengths = (200, 40, 5)
    documents = [document(seed, n, 2) for seed, n in enumerate(lengths)]
    packed = pack(documents, LENGTH, 0)[0]
    first = [int(np.nonzero(packed.document[0] == index)[0][0]) for index in range(3)]
    assert first == [0, 200, 240] and len(packed) == 1
    # document, start within it, visible tokens
    blocks = [(0, 2, 0), (0, 3, 1), (0, 150, 0), (0, 198, 1), (1, 2, 0), (1, 36, 2), (2, 2, 0), (2, 4, 0)]
    alone = [[(s, v, min(BLOCK, n - s)) for d, s, v in blocks if d == index] for index, n in enumerate(lengths)]
    together = [(first[i] + s, v, size) for i, plan in enumerate(alone) for s, v, size in plan]
    one = batch_of((packed, together))
    three = batch_of(*((pack([text], LENGTH, 0)[0], plan) for text, plan in zip(documents, alone, strict=True)))
    hidden, hidden_alone = (np.asarray(look(params, batch)[0]) for batch in (one, three))
    place = 0
    for index, size in enumerate(lengths):
        rows, rows_alone = hidden[0, first[index] :][:size], hidden_alone[index, :size]
        np.testing.assert_allclose(rows, rows_alone, rtol=0, atol=1e-5, equal_nan=False)
        count = BLOCK * len(alone[index])
        rows, rows_alone = hidden[0, LENGTH + BLOCK * place :][:count], hidden_alone[index, LENGTH:][:count]
        np.testing.assert_allclose(rows, rows_alone, rtol=0, atol=1e-5, equal_nan=False)
        place += len(alone[index])
    ((value, metrics), gradient), ((value_alone, metrics_alone), gradient_alone) = (
        objective[2](params, batch) for batch in (one, three)
    )
    assert float(value) == pytest.approx(float(value_alone), abs=1e-5)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], metrics_alone[name], rtol=1e-5)
    assert difference(gradient, gradient_alone) < 1e-5


@pytest.mark.parametrize(("length", "prompt"), [(BLOCK - 1, 0), (BLOCK - 1, 1), (15, 15 - (BLOCK - 1)), (LENGTH, 253)])
def test_a_response_shorter_than_a_block_is_supervised_to_its_end(params, objective, length, prompt):
    name, _, compiled = objective
    rows = one_row(length, prompt)
    plan = block_starts(rows, BLOCK, 3, np.random.default_rng(0), visible_probabilities=(1.0, 0.0))
    batch = batch_of((rows, np.concatenate([plan.start, plan.visible, plan.length]).T))
    (value, metrics), gradient = compiled(params, batch)
    assert np.isfinite(value) and value > 0 and metrics["ar_count"] == length - max(prompt, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    if name == "d3d":
        weights = np.asarray(look(params, batch)[2])[0, LENGTH:].reshape(PLACES, BLOCK)
        first = int(np.nonzero(plan.start[0] == prompt)[0][0])
        assert (weights[first] > 0).tolist() == [o < length - prompt for o in range(BLOCK)]


@pytest.mark.parametrize("rows", ["padding", "prompts"])
def test_a_batch_without_a_response_has_no_loss_and_a_gradient_of_exact_zeros(params, objective, rows):
    row = one_row(9, 8)
    row = blank() if rows == "padding" else dataclasses.replace(row, response=row.response & False)
    (value, _), gradient = objective[2](params, batch_of((row, [])))
    assert value == 0
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradient))


# ---- one global mean


def row_with_supervision(count: int) -> tuple[PackedRows, list]:
    """A row whose response and blocks have `count` tokens, with its blocks."""
    first = LENGTH - count
    starts = range(first, LENGTH, BLOCK)
    return one_row(LENGTH, first, seed=count), [(start, 0, min(BLOCK, LENGTH - start)) for start in starts]


def test_two_devices_with_3_and_97_tokens_have_the_gradient_of_one_device(params, objective):
    _, gradient, compiled = objective
    few, many, nothing = row_with_supervision(3), row_with_supervision(97), (blank(), [])
    batch = batch_of(few, nothing, many, nothing)  # two rows a device
    supervised = batch["block_length"].sum(axis=1), batch["response"].sum(axis=1)
    assert [count.tolist() for count in supervised] == [[3, 0, 97, 0]] * 2
    (_, metrics), expected = compiled(params, batch)
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    place = (replicated(mesh), NamedSharding(mesh, BATCH))
    (_, found_metrics), found = jax.jit(gradient, in_shardings=place, out_shardings=replicated(mesh))(params, batch)
    assert difference(found, expected) < 1e-6
    for name in metrics:
        np.testing.assert_allclose(found_metrics[name], metrics[name], rtol=1e-6, equal_nan=False)
    # The test can tell: the mean of the two rows' own means is something else.
    ((_, few_metrics), one), ((_, many_metrics), other) = (compiled(params, batch_of(row)) for row in (few, many))
    assert difference(jax.tree.map(lambda a, b: (a + b) / 2, one, other), expected) > 1e-3
    for name in metrics:  # sums and counts: a validation over many batches adds them up and divides once
        np.testing.assert_allclose(few_metrics[name] + many_metrics[name], metrics[name], rtol=1e-5)


def test_a_batch_computed_in_parts_has_the_gradient_of_the_whole(params, objective):
    name, _, compiled = objective
    nothing = (blank(), [])
    batch = batch_of(row_with_supervision(3), row_with_supervision(97), nothing, nothing)
    (_, metrics), expected = compiled(params, batch)
    gradient = make_gradient(dataclasses.replace(run_config(name), micro_batches=2), CONFIG)
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    place = (replicated(mesh), NamedSharding(mesh, BATCH))
    found, found_metrics = jax.jit(gradient, in_shardings=place, out_shardings=replicated(mesh))(params, batch)
    assert difference(found, expected) < 1e-6
    for key in metrics:
        np.testing.assert_allclose(found_metrics[key], metrics[key], rtol=1e-6, equal_nan=False)


def difference(one: Params, other: Params) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


# ---- the cross-entropy in chunks


@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 64])
def test_the_cross_entropy_in_chunks_is_the_plain_one(chunk):
    rng = np.random.default_rng(0)
    hidden, matrix = rng.normal(size=(2, 10, 8)).astype(np.float32), rng.normal(size=(24, 8)).astype(np.float32)
    labels, weights = rng.integers(0, 24, (2, 10)), rng.uniform(0, 2, (2, 10)).astype(np.float32)

    def plain(hidden, matrix):
        logits = hidden @ matrix.T
        each = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
        return (weights * each).sum(), (each, logits.argmax(axis=-1) == labels)

    def chunked(hidden, matrix):
        each, correct = cross_entropy(hidden, labels, matrix, chunk)
        return (weights * each).sum(), (each, correct)

    values = [jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(hidden, matrix) for f in (plain, chunked)]
    ((_, (each, correct)), gradients), ((_, (each_chunked, correct_chunked)), gradients_chunked) = values
    np.testing.assert_allclose(each_chunked, each, rtol=1e-5, equal_nan=False)
    assert np.array_equal(correct, correct_chunked) and correct.any()
    for one, two in zip(gradients, gradients_chunked, strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-5, equal_nan=False)

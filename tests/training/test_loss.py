"""The losses: what a block may see, what is supervised, and that every mean is one global mean (CASES T1-T11)."""

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
from d3d_jax.training.loss import ar_loss, d3d_loss, position_decay, weighted_cross_entropy
from d3d_jax.training.step import make_loss

CONFIG = ModelConfig(32, 32, 48, 2, 4, 2, 16, RopeConfig(1e4))
MASK, BLOCK, GAMMA = 31, 4, 3.0
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
    """Hidden states, labels and weights of every row, as `d3d_loss` hands them to the cross-entropy."""
    handed: list[tuple] = []

    def record(hidden, labels, weights, head_matrix, chunk):
        handed.append((hidden, labels, weights))
        return weighted_cross_entropy(hidden, labels, weights, head_matrix, chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "weighted_cross_entropy", record)
        drafter_loss(params, batch, kind=kind)
    return handed[0]


def gradient_of_hidden(loss, params: Params, batch: Arrays, width: int) -> np.ndarray:
    """d loss / d hidden [B, T, D]: a row is zero exactly where its logits carry no gradient."""
    forward = losses.forward

    def value(probe, params, batch):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(losses, "forward", lambda *args, **kwargs: forward(*args, **kwargs) + probe)
            return loss(params, batch)[0]

    probe = np.zeros((len(batch["tokens"]), width, CONFIG.hidden_size), np.float32)
    return np.asarray(jax.jit(jax.grad(value))(probe, params, batch))


look = jax.jit(seen_by_the_loss, static_argnames="kind")


def batch_of(rows: PackedRows, start: Any, visible: Any, length: Any) -> Arrays:
    blocks = {"block_start": start, "block_visible": visible, "block_length": length}
    return {**rows.arrays(), **{name: np.asarray(value, np.int32) for name, value in blocks.items()}}


def document(seed: int, length: int, prompt_length: int) -> Document:
    ids = np.random.default_rng(seed).integers(0, MASK, length).astype(np.int32)
    return Document(ids, prompt_length)


def one_row(length: int, prompt_length: int, row_length: int, seed: int = 0) -> PackedRows:
    return pack([document(seed, length, prompt_length)], row_length, 0)[0]


def stack(rows: list[PackedRows]) -> PackedRows:
    return PackedRows(*(np.concatenate(parts) for parts in zip(*(r.arrays().values() for r in rows), strict=True)))


# ---- T1: no block sees an answer


@pytest.mark.parametrize("kind", ["bidirectional", "causal"])
def test_a_block_sees_no_token_from_its_first_masked_position_on_whatever_the_spacing(params, kind):
    """Blocks that overlap, touch and lie apart, with 0, 1 and 2 visible tokens; row i of the batch differs in token i.

    Both ways: later tokens change no bit of a block's hidden states, earlier ones change it.
    """
    length, first = 22, 2
    same = stack([one_row(length, 1, length)] * length)
    other = stack([one_row(length, 1, length)] * length)
    np.fill_diagonal(other.tokens, (np.diagonal(other.tokens) + 1) % MASK)
    clean = np.arange(length)
    for spacing in range(1, 2 * BLOCK + 1):
        start = np.broadcast_to(first + spacing * np.arange(3), (length, 3))
        visible = np.broadcast_to([0, 1, 2], (length, 3))
        blocks = np.minimum(BLOCK, length - start)
        before, after = (look(params, batch_of(rows, start, visible, blocks), kind=kind)[0] for rows in (same, other))
        differs = np.asarray(before != after).any(axis=-1)
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


# ---- T2: labels, weights and the slots they stand in


def test_one_supervised_masked_token_has_the_only_gradient_and_the_right_label(params):
    rows = one_row(14, 3, 16)
    visible, start = 1, 6
    batch = batch_of(rows, [[start, -1]], [[visible, 0]], [[visible + 1, 0]])

    def blocks_alone(params, batch):
        return drafter_loss(params, batch, ar_weight=0.0)

    width = 16 + 2 * BLOCK
    gradient = gradient_of_hidden(blocks_alone, params, batch, width)
    slot = 16 + visible
    assert np.nonzero(np.abs(gradient[0]).sum(axis=-1))[0].tolist() == [slot]
    assert_is_gradient_of_label(params, batch, gradient[0, slot], slot, rows.tokens[0, start + visible])


def test_one_response_token_has_the_only_gradient_and_it_is_in_the_slot_before(params):
    rows = one_row(8, 7, 16)
    batch = batch_of(rows, [[-1, -1]], [[0, 0]], [[0, 0]])
    for loss, width in ((drafter_loss, 16 + 2 * BLOCK), (target_loss, 16)):
        gradient = gradient_of_hidden(loss, params, batch, width)
        assert np.nonzero(np.abs(gradient[0]).sum(axis=-1))[0].tolist() == [6]
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
    rows = one_row(15, 2, 16)
    batch = batch_of(rows, [[2, 5, 9, 13]], [[0, 1, 3, 0]], [[4, 4, 4, 2]])
    _, labels, weights = look(params, batch)
    decay = np.exp(-np.arange(4) / GAMMA)
    golden = np.zeros((4, 4))
    golden[0], golden[1, 1:], golden[2, 3:], golden[3, :2] = decay, decay[:3], decay[:1], decay[:2]
    blocks = np.asarray(weights)[0, 16:].reshape(4, 4)
    np.testing.assert_allclose(blocks, golden / golden.sum(), rtol=1e-6)
    clean = np.zeros(16)
    clean[1:14] = 1 / 13  # rows 1..13 predict the response, slots 2..14
    np.testing.assert_allclose(np.asarray(weights)[0, :16], clean, rtol=1e-6)
    assert np.array_equal(np.asarray(labels)[0, 1:14], rows.tokens[0, 2:15])


def test_the_decay_is_that_of_the_block_size_unless_set():
    assert [position_decay(size, LossConfig()) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]
    assert position_decay(16, LossConfig(gamma=2.5)) == 2.5
    with pytest.raises(ConfigError, match=r"loss.gamma has no default for block_size=12 \(known: \[8, 10, 16\]\)"):
        position_decay(12, LossConfig())


# ---- T7, T8: packing, short and empty responses


def blank(row_length: int) -> PackedRows:
    """A row of padding."""
    row = one_row(2, 1, row_length)
    slots = np.arange(row_length, dtype=np.int32)[None]
    return PackedRows(row.tokens * 0, row.document * 0 - 1, slots, row.position * 0, row.response & False,
                      row.response_start * 0 - 1)  # fmt: skip


def test_three_documents_in_one_row_are_the_three_alone(params):
    lengths, length, places = (200, 40, 5), 256, 8
    documents = [document(seed, n, 2) for seed, n in enumerate(lengths)]
    packed = pack(documents, length, 0)[0]
    first = [int(np.nonzero(packed.document[0] == index)[0][0]) for index in range(3)]
    assert first == [0, 200, 240] and len(packed) == 1
    # document, start within it, visible tokens
    blocks = [(0, 2, 0), (0, 3, 1), (0, 150, 0), (0, 198, 1), (1, 2, 0), (1, 36, 2), (2, 2, 0), (2, 4, 0)]
    alone, together = (np.zeros((3, 3, places), np.int32) for _ in range(2))
    alone[0] = together[0] = -1
    for place, (index, start, visible) in enumerate(blocks):
        size = min(BLOCK, lengths[index] - start)
        alone[:, index, place] = start, visible, size
        together[:, 0, place] = first[index] + start, visible, size
    one = batch_of(stack([packed, blank(length), blank(length)]), *together)
    three = batch_of(stack([pack([document], length, 0)[0] for document in documents]), *alone)
    hidden, hidden_alone = (np.asarray(look(params, batch)[0]) for batch in (one, three))
    for index, size in enumerate(lengths):
        here = slice(first[index], first[index] + size)
        np.testing.assert_allclose(hidden[0, here], hidden_alone[index, :size], rtol=0, atol=1e-5)
    for place, (index, _, _) in enumerate(blocks):
        here = slice(length + place * BLOCK, length + (place + 1) * BLOCK)
        np.testing.assert_allclose(hidden[0, here], hidden_alone[index, here], rtol=0, atol=1e-5)
    loss = jax.jit(lambda p, b: (drafter_loss(p, b), target_loss(p, b, 0.5)))
    for (value, metrics), (value_alone, metrics_alone) in zip(loss(params, one), loss(params, three), strict=True):
        assert float(value) == pytest.approx(float(value_alone), abs=1e-5)
        for name in metrics:
            np.testing.assert_allclose(metrics[name], metrics_alone[name], rtol=1e-5)


LENGTH, PLACES = 104, 25  # one shape for the tests that need a gradient: two rows, a second one mostly blank


def run_config(objective: str) -> TrainConfig:
    loss, blocks = LossConfig(gamma=GAMMA, chunk=64), BlockConfig(BLOCK)
    run = {"train_data": "", "output_dir": "", "steps": 1, "batch_size": 2, "mask_token_id": MASK}
    return TrainConfig(objective, **run, loss=loss, blocks=blocks)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module", params=["ar", "d3d"])
def objective(request: pytest.FixtureRequest):
    """The objective's name, and its `(params, batch) -> (loss, metrics), gradient`, plain and compiled."""
    gradient = jax.value_and_grad(make_loss(run_config(request.param), CONFIG), has_aux=True)
    return request.param, gradient, jax.jit(gradient)


def with_blank(row: PackedRows, start: Any, visible: Any, length: Any) -> Arrays:
    """A batch of `row`, whose blocks are given, and of a row of padding."""
    plan = np.stack([np.full((2, PLACES), fill) for fill in (-1, 0, 0)])
    plan[:, 0, : np.size(start)] = np.ravel(start), np.ravel(visible), np.ravel(length)
    return batch_of(stack([row, blank(LENGTH)]), *plan)


@pytest.mark.parametrize(("length", "prompt"), [(BLOCK - 1, 0), (BLOCK - 1, 1), (15, 15 - (BLOCK - 1)), (LENGTH, 101)])
def test_a_response_shorter_than_a_block_is_supervised_to_its_end(params, objective, length, prompt):
    name, _, compiled = objective
    rows = one_row(length, prompt, LENGTH)
    plan = block_starts(rows, BLOCK, 3, np.random.default_rng(0), visible_probabilities=(1.0, 0.0))
    batch = with_blank(rows, plan.start, plan.visible, plan.length)
    (value, metrics), gradient = compiled(params, batch)
    assert np.isfinite(value) and value > 0 and metrics["ar_count"] == length - max(prompt, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    if name == "d3d":
        weights = np.asarray(look(params, batch)[2])[0, LENGTH:].reshape(-1, BLOCK)
        first = int(np.nonzero(plan.start[0] == prompt)[0][0])
        assert (weights[first] > 0).tolist() == [o < length - prompt for o in range(BLOCK)]


@pytest.mark.parametrize("rows", ["padding", "prompts"])
def test_a_batch_without_a_response_has_no_loss_and_a_gradient_of_exact_zeros(params, objective, rows):
    row = blank(LENGTH)
    if rows == "prompts":
        row = one_row(9, 8, LENGTH)
        row = dataclasses.replace(row, response=row.response & False)
    (value, _), gradient = objective[2](params, with_blank(row, -1, 0, 0))
    assert value == 0
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradient))


# ---- T11: one global mean


def row_with_supervision(count: int) -> tuple[PackedRows, np.ndarray]:
    """A row whose response and blocks have `count` tokens; start, visible and length of the blocks."""
    first = LENGTH - count
    start = np.arange(first, LENGTH, BLOCK)
    return one_row(LENGTH, first, LENGTH, seed=count), np.stack([start, 0 * start, np.minimum(BLOCK, LENGTH - start)])


def test_two_devices_with_3_and_97_tokens_have_the_gradient_of_one_device(params, objective):
    _, gradient, compiled = objective
    halves = [with_blank(row, *plan) for row, plan in map(row_with_supervision, (3, 97))]
    batch = {name: np.concatenate([half[name][:1] for half in halves]) for name in halves[0]}
    assert batch["block_length"].sum(axis=1).tolist() == batch["response"].sum(axis=1).tolist() == [3, 97]
    (_, metrics), expected = compiled(params, batch)
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    place = (replicated(mesh), NamedSharding(mesh, BATCH))
    (_, found_metrics), found = jax.jit(gradient, in_shardings=place, out_shardings=replicated(mesh))(params, batch)
    assert difference(found, expected) < 1e-6
    for name in metrics:
        np.testing.assert_allclose(found_metrics[name], metrics[name], rtol=1e-6, equal_nan=False)
    # The test can tell: the mean of the two rows' own means is something else.
    one, other = (compiled(params, half)[1] for half in halves)
    assert difference(jax.tree.map(lambda a, b: (a + b) / 2, one, other), expected) > 1e-3


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
        loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
        return (weights * loss).sum(), logits.argmax(axis=-1) == labels

    def chunked(hidden, matrix):
        return weighted_cross_entropy(hidden, labels, weights, matrix, chunk)

    values = [jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(hidden, matrix) for f in (plain, chunked)]
    ((total, correct), gradients), ((total_chunked, correct_chunked), gradients_chunked) = values
    assert float(total_chunked) == pytest.approx(float(total), rel=1e-6)
    assert np.array_equal(correct, correct_chunked)
    for one, two in zip(gradients, gradients_chunked, strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-5, equal_nan=False)


@pytest.mark.parametrize("name", ["ar", "d3d"])
def test_no_array_of_all_tokens_and_the_vocabulary_is_ever_made(name):
    """1,024 tokens and Qwen3's vocabulary, compiled but not run, forward and backward."""
    vocabulary, tokens, places = 151_936, 1024, 128
    config = ModelConfig(vocabulary, 8, 8, 1, 1, 1, 8, RopeConfig(1e6), tie_word_embeddings=True)
    clean = tokens - places * BLOCK if name == "d3d" else tokens
    integers = jax.ShapeDtypeStruct((1, clean), jnp.int32)
    batch = dict.fromkeys(("tokens", "document", "start", "position"), integers)
    batch["response"] = jax.ShapeDtypeStruct((1, clean), jnp.bool_)
    blocks = ("block_start", "block_visible", "block_length")
    batch |= dict.fromkeys(blocks, jax.ShapeDtypeStruct((1, places), jnp.int32))
    whole = 4 * tokens * vocabulary

    def temporaries(chunk: int) -> int:
        loss = make_loss(dataclasses.replace(run_config(name), loss=LossConfig(gamma=GAMMA, chunk=chunk)), config)
        params = jax.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0)).params())
        memory = jax.jit(jax.grad(loss, has_aux=True)).lower(params, batch).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporaries(chunk=64) < whole / 2
    assert temporaries(chunk=tokens) > whole, "the measurement sees the array when it is there"

"""The masks against a brute force that is written from the words of docs/algorithm.md, one query and key at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_kernels import (
    Intervals,
    causal_intervals,
    dense_mask,
    packed_intervals,
    training_intervals,
    verify_intervals,
)

KINDS = ("bidirectional", "causal")
SLOTS, BLOCK, COUNT = 24, 4, 5

causal = jax.jit(lambda start: dense_mask(causal_intervals(start), SLOTS))
training = jax.jit(
    lambda start, slots, kind: dense_mask(training_intervals(start, slots, BLOCK, kind), SLOTS + COUNT * BLOCK),
    static_argnums=2,
)


def packed_row(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Document number of every slot (-1 on padding), and the slot where that document starts."""
    lengths = rng.integers(1, 9, 4)
    document = np.repeat(np.arange(4), lengths)[:SLOTS]
    start = np.searchsorted(document, document)
    pad = SLOTS - len(document)
    return np.pad(document, (0, pad), constant_values=-1), np.pad(start, (0, pad), constant_values=-1)


def rows_of(seed: int, count: int = 3) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    rng = np.random.default_rng(seed)
    document, start = zip(*(packed_row(rng) for _ in range(count)), strict=True)
    return np.stack(document), np.stack(start), rng


@pytest.mark.parametrize("seed", range(5))
def test_a_clean_token_sees_its_document_up_to_itself_and_padding_sees_nothing(seed):
    document, start, _ = rows_of(seed)
    mask = np.asarray(causal(start))
    for b, i, j in np.ndindex(mask.shape):
        assert mask[b, i, j] == (document[b, i] >= 0 and document[b, i] == document[b, j] and j <= i)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_masked_row_sees_the_clean_tokens_before_its_block_and_its_own_block(seed, kind):
    document, start, rng = rows_of(seed)
    slots = np.stack([rng.choice(np.nonzero(row >= 0)[0], COUNT) for row in document])
    slots[:, 2] = -1  # an unused place
    mask = np.asarray(training(start, slots, kind))
    assert mask.shape == (3, SLOTS + COUNT * BLOCK, SLOTS + COUNT * BLOCK)
    for b, row, key in np.ndindex(mask.shape):
        if row < SLOTS:
            sees = key <= row and document[b, row] >= 0 and document[b, row] == document[b, key]
        else:
            k, o = divmod(row - SLOTS, BLOCK)
            s = slots[b, k]
            if s < 0:
                sees = False
            elif key < SLOTS:
                sees = key < s and document[b, key] == document[b, s]
            else:
                own, offset = divmod(key - SLOTS, BLOCK)
                sees = own == k and (kind == "bidirectional" or offset <= o)
        assert mask[b, row, key] == sees, (b, row, key)


@pytest.mark.parametrize("kind", KINDS)
def test_the_packed_pass_has_the_mask_of_the_algorithm(kind):
    """docs/algorithm.md 3: row i sees cache + clean j<=i; row (a, o) sees cache + clean j<=a + its own block a."""
    length, capacity = np.array([0, 3, 16]), 24
    context = length[:, None] + np.arange(BLOCK) + 1
    clean = verify_intervals(jnp.asarray(length), BLOCK)
    blocks = packed_intervals(jnp.asarray(context), BLOCK, capacity, kind)
    both = Intervals(*(jnp.concatenate(pair, axis=1) for pair in zip(clean, blocks, strict=True)))
    mask = np.asarray(dense_mask(both, capacity + BLOCK * BLOCK))
    assert mask.shape == (3, BLOCK + BLOCK * BLOCK, capacity + BLOCK * BLOCK)
    for b, row, key in np.ndindex(mask.shape):
        p = length[b]
        if key < capacity:
            newest = row if row < BLOCK else (row - BLOCK) // BLOCK  # clean j <= i, or clean j <= a
            sees = key < p or (p <= key <= p + newest)
        elif row < BLOCK:
            sees = False
        else:
            a, o = divmod(row - BLOCK, BLOCK)
            own, offset = divmod(key - capacity, BLOCK)
            sees = own == a and (kind == "bidirectional" or offset <= o)
        assert mask[b, row, key] == sees, (b, row, key)


def test_two_intervals_are_a_union_and_an_interval_that_ends_before_it_starts_is_empty():
    bounds = [[0, 2, 1, 4], [3, 3, 5, 2], [4, 9, 0, 1], [2, 2, 0, 0]]  # overlapping; both empty; past the end; empty
    mask = dense_mask(Intervals(*(jnp.asarray([column]) for column in zip(*bounds, strict=True))), 6)
    seen = [set(np.nonzero(row)[0].tolist()) for row in np.asarray(mask[0])]
    assert seen == [{0, 1, 2, 3}, set(), {0, 4, 5}, set()]


def test_a_new_length_or_block_start_compiles_nothing_again():
    traced = []

    @jax.jit
    def mask(length, context, start, document):
        traced.append(1)
        verify, packed = verify_intervals(length, 3), packed_intervals(context, BLOCK, 8)
        return dense_mask(verify, 8), dense_mask(packed, 16), dense_mask(training_intervals(document, start, BLOCK), 24)

    for shift in range(3):
        one = jnp.full((1, 2), shift)
        mask(jnp.array([shift]), one, one, jnp.zeros((1, 8), jnp.int32))
    assert len(traced) == 1


def test_the_bounds_are_int32():
    documents, blocks = jnp.zeros((2, 8), jnp.int32), jnp.ones((2, 3), jnp.int32)
    for intervals in (
        causal_intervals(documents),
        training_intervals(documents, blocks, BLOCK),
        verify_intervals(jnp.array([1, 2]), 3),
        packed_intervals(blocks, BLOCK, 8),
    ):
        assert len({bound.shape for bound in intervals}) == 1
        assert {bound.dtype for bound in intervals} == {jnp.dtype("int32")}

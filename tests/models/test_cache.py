"""A call of T tokens is T calls of one, a rollback a fresh cache; the end of the cache holds."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from d3d_jax.config import ModelConfig, RopeConfig
from d3d_jax.models import cache as caches
from d3d_jax.models.cache import KVCache, empty_cache
from d3d_jax.models.qwen3 import Params, Qwen3, append, for_decoding, forward

CONFIG = ModelConfig(64, 32, 48, 2, 4, 2, 16, RopeConfig(1e4))
LENGTHS = np.array([0, 1, 15, 16, 17], np.int32)  # on both sides of a page of 16, each row its own
ROWS, BLOCK, BUCKET, CAPACITY = len(LENGTHS), 6, 24, 32

extend = jax.jit(lambda params, tokens, cache: append(params, tokens, cache, CONFIG))


@pytest.fixture(scope="module")
def stacked() -> Params:
    return Qwen3(CONFIG, rngs=nnx.Rngs(1), scale=0.25).params()


@pytest.fixture(scope="module")
def params(stacked: Params) -> Params:
    return for_decoding(stacked)


def tokens(seed: int, count: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (rows, count)).astype(np.int32)


def at(cache: KVCache, length: np.ndarray | int) -> KVCache:
    return cache._replace(length=np.broadcast_to(np.asarray(length, np.int32), (cache.length.shape[0],)))


def empty(capacity: int = CAPACITY) -> KVCache:
    return empty_cache(CONFIG, ROWS, capacity)


@pytest.fixture(scope="module")
def prefilled(params: Params) -> KVCache:
    """The same bucket of tokens in every row, of which each row keeps its own length."""
    _, cache = extend(params, tokens(0, BUCKET), empty())
    return at(cache, LENGTHS)


def valid(cache: KVCache, length: np.ndarray) -> list[np.ndarray]:
    """Keys and values of the valid slots, row by row and layer by layer."""
    arrays = [np.asarray(x) for x in (*cache.k, *cache.v)]
    return [x[row, :, :end] for x in arrays for row, end in enumerate(length)]


def assert_close(first, second) -> None:
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-5, equal_nan=False)


def assert_caches_close(first: KVCache, second: KVCache, length: np.ndarray) -> None:
    for one, other in zip(valid(first, length), valid(second, length), strict=True):
        assert_close(one, other)


def one_by_one(params: Params, new: np.ndarray, cache: KVCache) -> tuple[np.ndarray, KVCache]:
    hidden = []
    for i in range(new.shape[1]):
        out, cache = extend(params, new[:, i : i + 1], cache)
        cache = at(cache, np.asarray(cache.length) + 1)
        hidden.append(out)
    return np.concatenate(hidden, axis=1), cache


def test_one_call_of_a_block_is_one_call_per_token_whatever_the_length_of_a_row(params: Params, prefilled: KVCache):
    new = tokens(1, BLOCK)
    block, after = extend(params, new, prefilled)
    singly, after_singly = one_by_one(params, new, prefilled)
    assert_close(block, singly)
    assert_caches_close(after, after_singly, LENGTHS + BLOCK)


def test_a_row_is_what_the_stacked_form_makes_of_its_text_alone(params: Params, stacked: Params, prefilled: KVCache):
    """The neighbours of a row have other lengths and must not show in it."""
    new, first = tokens(1, BLOCK), tokens(0, BUCKET)
    block, _ = extend(params, new, prefilled)
    texts = np.zeros((ROWS, LENGTHS.max() + BLOCK), np.int32)
    for row, length in enumerate(LENGTHS):
        texts[row, : length + BLOCK] = np.concatenate([first[row, :length], new[row]])
    hidden = np.asarray(jax.jit(lambda p, t: forward(p, t, CONFIG))(stacked, texts))
    for row, length in enumerate(LENGTHS):
        assert_close(block[row], hidden[row, length : length + BLOCK])


def test_a_length_that_was_set_back_is_a_fresh_cache_bit_by_bit(params: Params, prefilled: KVCache):
    _, used = extend(params, tokens(2, BLOCK), prefilled)  # rejected tokens, left where they are
    fresh = [x.copy() for x in map(np.asarray, (*prefilled.k, *prefilled.v))]
    for array in fresh:
        for row, length in enumerate(LENGTHS):
            array[row, :, length:] = 0
    half = len(fresh) // 2
    fresh = KVCache(tuple(fresh[:half]), tuple(fresh[half:]), prefilled.length)
    new = tokens(3, BLOCK)
    rolled, after_rolled = extend(params, new, at(used, LENGTHS))
    clean, after_clean = extend(params, new, fresh)
    assert np.array_equal(rolled, clean)
    for one, other in zip(valid(after_rolled, LENGTHS + BLOCK), valid(after_clean, LENGTHS + BLOCK), strict=True):
        assert np.array_equal(one, other)


def test_appending_leaves_the_length_to_the_caller(params: Params, prefilled: KVCache):
    _, after = extend(params, tokens(1, BLOCK), prefilled)
    assert np.array_equal(after.length, LENGTHS) and after.capacity == CAPACITY


def test_what_pads_a_prompt_changes_no_bit_of_its_keys_and_values(params: Params):
    lengths = np.array([1, 5, BLOCK, 16, BUCKET])
    first, second = tokens(4, BUCKET), tokens(5, BUCKET)
    for row, length in enumerate(lengths):
        second[row, :length] = first[row, :length]
    one_hidden, one = extend(params, first, empty())
    other_hidden, other = extend(params, second, empty())
    for a, b in zip(valid(one, lengths), valid(other, lengths), strict=True):
        assert np.array_equal(a, b)
    for row, length in enumerate(lengths):
        assert np.array_equal(one_hidden[row, :length], other_hidden[row, :length])


def test_a_padded_prefill_is_an_unpadded_one(params: Params):
    prompt = tokens(6, BLOCK)
    padded = np.concatenate([prompt, tokens(7, BUCKET - BLOCK)], axis=1)
    hidden, cache = extend(params, padded, empty())
    plain, plain_cache = extend(params, prompt, empty())
    assert_close(hidden[:, :BLOCK], plain)
    assert_caches_close(cache, plain_cache, np.full(ROWS, BLOCK))


def test_a_prefill_in_chunks_is_a_prefill_at_once(params: Params):
    text, cache = tokens(8, BUCKET), empty()
    whole, at_once = extend(params, text, empty())
    hidden = []
    for start in range(0, BUCKET, BLOCK):
        out, cache = extend(params, text[:, start : start + BLOCK], at(cache, start))
        hidden.append(out)
    assert_close(np.concatenate(hidden, axis=1), whole)
    assert_caches_close(cache, at_once, np.full(ROWS, BUCKET))


def test_a_block_that_ends_at_the_last_slot_leaves_the_committed_rows_as_they_are(params: Params):
    """Also operation by operation, since the compiler has merged slices wrongly before."""
    text, new, length = tokens(9, BUCKET), tokens(10, BLOCK), BUCKET
    _, exact = extend(params, text, empty(BUCKET + BLOCK))
    _, roomy = extend(params, text, empty())
    before = valid(exact, np.full(ROWS, length))
    hidden, after = extend(params, new, at(exact, length))
    roomy_hidden, _ = extend(params, new, at(roomy, length))
    assert_close(hidden, roomy_hidden)
    for old, now in zip(before, valid(after, np.full(ROWS, length)), strict=True):
        assert np.array_equal(old, now)
    eager_hidden, eager = append(params, new, at(exact, length), CONFIG)
    assert_close(eager_hidden, hidden)
    assert_caches_close(eager, after, np.full(ROWS, length + BLOCK))


@pytest.mark.parametrize("rows", [1, 2])  # one row alone is written by another operation
def test_one_slot_too_few_would_overwrite_committed_rows_which_is_why_room_is_proven_first(rows: int):
    """If writing past the end ever starts to fail by itself, the checks on the host can go."""
    slots = np.zeros((rows, 1, 8, 1), np.float32)
    new = np.broadcast_to(np.arange(1, 5, dtype=np.float32)[:, None], (rows, 1, 4, 1))
    fits, slid = (np.asarray(caches.write(slots, new, np.full(rows, start))) for start in (4, 5))
    assert fits[0].ravel().tolist() == [0, 0, 0, 0, 1, 2, 3, 4] and np.array_equal(fits, slid)


def test_each_row_is_written_at_its_own_start_alone_and_in_company():
    slots = np.zeros((2, 1, 5, 1), np.float32)
    new = np.array([1, 2, 3, 4], np.float32).reshape(2, 1, 2, 1)
    start = np.array([0, 3])
    written = np.asarray(caches.write(slots, new, start))
    assert written[..., 0].tolist() == [[[1, 2, 0, 0, 0]], [[0, 0, 0, 3, 4]]]
    for row in range(2):
        here = slice(row, row + 1)
        assert np.array_equal(caches.write(slots[here], new[here], start[here]), written[here])

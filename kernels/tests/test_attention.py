"""The reference backend against a plain float64 softmax, and what it promises about empty rows and hidden keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_kernels import Intervals, dense_mask, interval_attention, interval_decode, xla

BATCH, QUERY_HEADS, KV_HEADS, WIDTH = 2, 4, 2, 8
QUERIES, KEYS, NEW = 5, 11, 3
EMPTY = (1, 3)  # the query (batch row, query) that sees nothing


def array(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_intervals(num_keys: int, seed: int = 0) -> Intervals:
    rng = np.random.default_rng(seed)
    bounds = np.sort(rng.integers(0, num_keys + 1, (4, BATCH, QUERIES)), axis=0)
    bounds[1] = np.maximum(bounds[1], bounds[0] + 1)
    for bound in bounds:
        bound[EMPTY] = 4  # lo == hi, twice
    return Intervals(*bounds.astype(np.int32))


@pytest.fixture(scope="module")
def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray, Intervals]:
    q = array(0, BATCH, QUERY_HEADS, QUERIES, WIDTH)
    k, v = (array(seed, BATCH, KV_HEADS, KEYS + NEW, WIDTH) for seed in (1, 2))
    return q, k, v, random_intervals(KEYS + NEW)


@pytest.fixture(scope="module", params=["xla"])
def attend(request):
    """`interval_attention` of one backend, compiled once for the tests of this file."""
    return jax.jit(lambda q, k, v, intervals: interval_attention(q, k, v, intervals, backend=request.param))


@pytest.fixture(scope="module", params=["xla"])
def decode(request):
    """`interval_decode` of one backend, with keys that are not in the cache."""
    return jax.jit(
        lambda q, k, v, intervals, new_k, new_v: interval_decode(
            q, k, v, intervals, k_new_BKTH=new_k, v_new_BKTH=new_v, backend=request.param
        )
    )


def reference(q, k, v, intervals, scale=WIDTH**-0.5) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    visible = np.asarray(dense_mask(intervals, k.shape[2]))
    out = np.zeros(q.shape)
    for b, n, t in np.ndindex(q.shape[:3]):
        head = n // (q.shape[1] // k.shape[1])
        keys = np.nonzero(visible[b, t])[0]
        if len(keys):
            weight = np.exp(k[b, head, keys] @ q[b, n, t] * scale)
            out[b, n, t] = weight @ v[b, head, keys] / weight.sum()
    return out


def test_every_query_head_attends_to_what_its_row_may_see(attend, operands):
    np.testing.assert_allclose(attend(*operands), reference(*operands), rtol=0, atol=1e-6, equal_nan=False)


def test_the_scores_are_scaled_by_what_was_asked_for(operands):
    q, k, v, intervals = operands
    output = jax.jit(lambda *args: interval_attention(*args, scale=0.3))(q, k, v, intervals)
    np.testing.assert_allclose(output, reference(q, k, v, intervals, 0.3), rtol=0, atol=1e-6, equal_nan=False)


def test_large_scores_do_not_overflow(attend, operands):
    q, k, v, intervals = operands
    output = attend(100 * q, 100 * k, v, intervals)
    assert np.isfinite(output).all() and np.abs(output).max() <= np.abs(v).max() + 1e-5


def test_a_row_that_sees_no_key_gives_exactly_zero(attend, operands):
    output = np.asarray(attend(*operands))
    row, query = EMPTY
    assert (output[row, :, query] == 0).all()
    assert (np.delete(output[row], query, axis=1) != 0).all() and (output[1 - row] != 0).all()


def test_gradients_of_empty_rows_are_exactly_zero_and_all_gradients_finite(operands):
    q, k, v, intervals = operands
    row, query = EMPTY

    def loss(q, k, v, intervals):
        return (interval_attention(q, k, v, intervals) * array(5, *q.shape)).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    for_q, for_k, for_v = (np.asarray(g) for g in gradient(q, k, v, intervals))
    assert np.isfinite(for_q).all() and np.isfinite(for_k).all() and np.isfinite(for_v).all()
    assert (for_q[row, :, query] == 0).all() and np.abs(for_q[1 - row]).max() > 0
    nothing = Intervals(*(np.full_like(bound, 7) for bound in intervals))
    for g in gradient(q, k, v, nothing):
        assert (np.asarray(g) == 0).all()


def test_a_key_that_no_row_sees_changes_no_bit(attend, operands):
    q, k, v, _ = operands
    intervals = Intervals(*(np.full((BATCH, QUERIES), bound, np.int32) for bound in (1, 4, 6, 9)))
    other_k, other_v = k.copy(), v.copy()
    for changed in (other_k, other_v):
        changed[:, :, [0, 4, 5, 9, 10, 11, 12, 13]] *= -50
    assert np.array_equal(attend(q, k, v, intervals), attend(q, other_k, other_v, intervals))


def test_decoding_over_cache_and_new_keys_is_attention_over_all_of_them(decode, attend, operands):
    q, k, v, intervals = operands
    output = decode(q, k[:, :, :KEYS], v[:, :, :KEYS], intervals, k[:, :, KEYS:], v[:, :, KEYS:])
    np.testing.assert_allclose(output, attend(q, k, v, intervals), rtol=0, atol=1e-6, equal_nan=False)
    row, query = EMPTY
    assert (np.asarray(output)[row, :, query] == 0).all()


def test_decoding_without_new_keys_is_attention_over_the_cache(attend, operands):
    q, k, v, intervals = operands
    assert np.array_equal(jax.jit(interval_decode)(q, k, v, intervals), attend(q, k, v, intervals))


@pytest.mark.parametrize("num_queries", [64, 100, 128])
def test_many_queries_taken_in_chunks_attend_as_if_taken_at_once(monkeypatch, num_queries):
    q, gradient = (array(seed, BATCH, QUERY_HEADS, num_queries, WIDTH) for seed in (0, 5))
    k, v = (array(seed, BATCH, KV_HEADS, KEYS, WIDTH) for seed in (1, 2))
    lo = np.broadcast_to(np.arange(num_queries, dtype=np.int32) % KEYS, (BATCH, num_queries))
    intervals = Intervals(lo, np.minimum(lo + 3, KEYS - 1), lo * 0, lo % 2)  # the last key's row sees only the first

    def both(q, k, v):
        output, back = jax.vjp(lambda *args: interval_attention(*args, intervals), q, k, v)
        return output, back(gradient)

    whole = both(q, k, v)
    monkeypatch.setattr(xla, "SCORES_BYTES", 0)
    monkeypatch.setattr(xla, "MIN_CHUNK", 32)
    for expected, chunked in zip(jax.tree.leaves(whole), jax.tree.leaves(both(q, k, v)), strict=True):
        np.testing.assert_allclose(chunked, expected, rtol=1e-6, atol=1e-5, equal_nan=False)
    np.testing.assert_allclose(whole[0], reference(q, k, v, intervals), rtol=0, atol=1e-6)


def test_long_rows_never_have_all_their_scores_in_memory():
    q = jax.ShapeDtypeStruct((2, 4, 2048, 64), jnp.float32)
    k = jax.ShapeDtypeStruct((2, 2, 2048, 64), jnp.float32)
    bound = jax.ShapeDtypeStruct((2, 2048), jnp.int32)

    def step(q, k, v, *bounds):
        return jax.grad(lambda q, k, v: interval_attention(q, k, v, Intervals(*bounds)).sum(), (0, 1, 2))(q, k, v)

    memory = jax.jit(step).lower(q, k, k, *[bound] * 4).compile().memory_analysis()
    all_scores = 2 * 4 * 2048 * 2048 * 4
    assert memory.temp_size_in_bytes < all_scores / 2


def test_the_output_has_the_type_of_the_queries(operands):
    q, k, v, intervals = operands
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    output = jax.jit(interval_attention)(*low, intervals)
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(output, np.float32), reference(*low, intervals), rtol=0, atol=2e-2)


def test_a_backend_that_is_not_there_is_refused_with_those_that_are(operands):
    with pytest.raises(ValueError, match=r"'abacus' is not there; available: auto, xla"):
        interval_attention(*operands, backend="abacus")


@pytest.mark.parametrize("fault", ["batch", "width", "heads", "values"])
def test_shapes_that_do_not_fit_are_refused_with_all_of_them(operands, fault):
    q, k, v, intervals = operands
    if fault == "batch":
        k, v = k[:1], v[:1]
    elif fault == "width":
        k, v = k[..., :4], v[..., :4]
    elif fault == "heads":
        q = q[:, :3]
    else:
        v = v[:, :, 1:]
    with pytest.raises(ValueError, match=r"do not fit: q \(.*N a multiple of K"):
        interval_attention(q, k, v, intervals)
    with pytest.raises(ValueError, match="do not fit"):
        interval_decode(q, k, v, intervals)


def test_intervals_of_another_number_of_queries_are_refused(operands):
    q, k, v, intervals = operands
    with pytest.raises(ValueError, match=r"shape \(2, 4\); expected \[B, T\] = \(2, 5\)"):
        interval_attention(q, k, v, Intervals(*(bound[:, :4] for bound in intervals)))


def test_new_keys_without_new_values_are_refused(operands):
    q, k, v, intervals = operands
    with pytest.raises(ValueError, match="k_new and v_new come together"):
        interval_decode(q, k, v, intervals, k_new_BKTH=k)

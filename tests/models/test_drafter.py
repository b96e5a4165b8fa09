"""The packed pass against one plain forward per branch, and the table slot -> position -> label."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from d3d_jax.config import DrafterConfig, ModelConfig, RopeConfig
from d3d_jax.decoding.branches import select
from d3d_jax.decoding.state import Outcome, Successors
from d3d_jax.models import drafter as drafters
from d3d_jax.models.cache import KVCache, empty_cache
from d3d_jax.models.drafter import anchored_block, draft_pass, masked_blocks, with_mean_mask_row
from d3d_jax.models.qwen3 import Params, Qwen3, append, for_decoding, forward
from d3d_jax.training.loss import d3d_inputs
from d3d_kernels import Intervals

CONFIG = ModelConfig(64, 32, 48, 2, 4, 2, 16, RopeConfig(1e4))
MASK, BLOCK = 60, 4
LENGTHS = np.array([0, 3, 9], np.int32)  # committed tokens of each row
ROWS, PREFIX, CAPACITY = len(LENGTHS), 9, 20
DRAFTERS = {kind: DrafterConfig(BLOCK, MASK, kind) for kind in ("bidirectional", "causal")}
OUTCOMES = np.broadcast_to(np.arange(BLOCK), (ROWS, BLOCK))

extend = jax.jit(lambda params, tokens, cache: append(params, tokens, cache, CONFIG))
passes = {
    kind: jax.jit(
        lambda params, clean, blocks, context, cache, drafter=drafter: draft_pass(
            params, clean, blocks, context, cache, CONFIG, drafter
        )
    )
    for kind, drafter in DRAFTERS.items()
}


@pytest.fixture(scope="module")
def stacked() -> Params:
    return Qwen3(CONFIG, rngs=nnx.Rngs(2), scale=0.25).params()


@pytest.fixture(scope="module")
def params(stacked: Params) -> Params:
    return for_decoding(stacked)


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    """Prefix and in-flight block of every row: the block of row b is text[b, LENGTHS[b]:][:BLOCK]."""
    return np.random.default_rng(0).integers(0, MASK, (ROWS, PREFIX + BLOCK)).astype(np.int32)


@pytest.fixture(scope="module")
def in_flight(text: np.ndarray) -> np.ndarray:
    return np.stack([row[length : length + BLOCK] for row, length in zip(text, LENGTHS, strict=True)])


@pytest.fixture(scope="module")
def cache(params: Params, text: np.ndarray) -> KVCache:
    _, filled = extend(params, text[:, :PREFIX], empty_cache(CONFIG, ROWS, CAPACITY))
    return filled._replace(length=jnp.asarray(LENGTHS))


@pytest.fixture(scope="module", params=DRAFTERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def packed(params: Params, in_flight: np.ndarray, cache: KVCache, kind: str, blocks: np.ndarray | None = None):
    """The packed pass with every outcome: hidden states of the clean rows and the branches, and the cache."""
    if blocks is None:
        blocks = masked_blocks(ROWS, BLOCK, DRAFTERS[kind])
    return passes[kind](params, in_flight, blocks, LENGTHS[:, None] + OUTCOMES + 1, cache)


def branch_alone(stacked: Params, text: np.ndarray, start: np.ndarray, block: np.ndarray, kind: str) -> np.ndarray:
    """One block after `start` clean tokens, with nothing else in the row: hidden states [B, G, D].

    The intervals are written out here, not made by the builders that are under test.
    """
    clean = text.shape[1]
    first = np.zeros((ROWS, clean + BLOCK))
    clean_end = np.broadcast_to(np.arange(1, clean + 1), (ROWS, clean))
    block_end = np.repeat(start[:, None], BLOCK, axis=1)
    own_end = clean + (np.arange(1, BLOCK + 1) if kind == "causal" else np.full(BLOCK, BLOCK))
    bounds = (
        first,
        np.concatenate([clean_end, block_end], axis=1),
        np.broadcast_to(np.r_[np.zeros(clean), np.full(BLOCK, clean)], first.shape),
        np.broadcast_to(np.r_[np.zeros(clean), own_end], first.shape),
    )
    positions = np.concatenate([clean_end - 1, start[:, None] + np.arange(BLOCK)], axis=1)
    tokens = np.concatenate([text, block], axis=1)
    hidden = alone(stacked, tokens, positions, Intervals(*(bound.astype(np.int32) for bound in bounds)))
    return np.asarray(hidden)[:, clean:]


alone = jax.jit(
    lambda params, tokens, positions, intervals: forward(
        params, tokens, CONFIG, positions_BT=positions, intervals=intervals
    )
)


def assert_close(first, second) -> None:
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-5, equal_nan=False)


def slots(cache: KVCache) -> list[np.ndarray]:
    return [np.asarray(x) for x in (*cache.k, *cache.v)]


def test_every_branch_is_a_forward_of_that_branch_alone(params, stacked, text, in_flight, cache, kind):
    _, branches, _ = packed(params, in_flight, cache, kind)
    masks = np.full((ROWS, BLOCK), MASK, np.int32)
    for a in range(BLOCK):
        assert_close(branches[:, a], branch_alone(stacked, text, LENGTHS + a + 1, masks, kind))


def test_every_branch_is_a_packed_pass_with_that_outcome_alone(params, in_flight, cache, kind):
    _, branches, _ = packed(params, in_flight, cache, kind)
    for a in range(BLOCK):
        one = masked_blocks(ROWS, 1, DRAFTERS[kind])
        _, branch, _ = passes[kind](params, in_flight, one, LENGTHS[:, None] + a + 1, cache)
        assert_close(branches[:, a], branch[:, 0])


def test_an_anchored_block_is_a_forward_of_its_anchor_and_masks(params, stacked, text, cache, kind):
    """The redraft: no clean row in the pass, the anchor is the block's first token."""
    anchor = np.array([7, 8, 9], np.int32)
    block = anchored_block(jnp.asarray(anchor), DRAFTERS[kind])
    assert block.tolist() == [[[token, MASK, MASK, MASK]] for token in anchor]
    nothing = np.zeros((ROWS, 0), np.int32)
    _, hidden, after = passes[kind](params, nothing, block, LENGTHS[:, None], cache)
    assert_close(hidden[:, 0], branch_alone(stacked, text, LENGTHS, np.asarray(block)[:, 0], kind))
    assert all(np.array_equal(a, b) for a, b in zip(slots(cache), slots(after), strict=True))


def test_the_clean_rows_are_a_causal_prefill(params, in_flight, cache, kind):
    clean, _, after = packed(params, in_flight, cache, kind)
    hidden, prefilled = extend(params, in_flight, cache)
    assert_close(clean, hidden)
    for ours, plain in zip(slots(after), slots(prefilled), strict=True):
        for row, length in enumerate(LENGTHS):
            assert_close(ours[row, :, : length + BLOCK], plain[row, :, : length + BLOCK])
    assert np.array_equal(after.length, LENGTHS)


def test_an_in_flight_token_changes_exactly_the_branches_that_accept_it(params, in_flight, cache, kind):
    _, before, _ = packed(params, in_flight, cache, kind)
    for j in range(BLOCK):
        other = in_flight.copy()
        other[:, j] = (other[:, j] + 1) % MASK
        _, after, _ = packed(params, other, cache, kind)
        same = [np.array_equal(before[:, a], after[:, a]) for a in range(BLOCK)]
        assert same == [a < j for a in range(BLOCK)]


def test_blocks_leave_no_trace_in_the_cache(params, in_flight, cache, kind):
    other = np.random.default_rng(1).integers(0, MASK, (ROWS, BLOCK, BLOCK)).astype(np.int32)
    _, masked_hidden, masked = packed(params, in_flight, cache, kind)
    _, other_hidden, shown = packed(params, in_flight, cache, kind, other)
    assert not np.array_equal(masked_hidden, other_hidden)
    for before, one, two in zip(slots(cache), slots(masked), slots(shown), strict=True):
        assert np.array_equal(one, two)
        for row, length in enumerate(LENGTHS):
            assert np.array_equal(one[row, :, :length], before[row, :, :length])
            assert np.array_equal(one[row, :, length + BLOCK :], before[row, :, length + BLOCK :])


def test_a_branch_sees_its_whole_block_or_only_its_past(params, in_flight, cache, kind):
    blocks = np.full((ROWS, BLOCK, BLOCK), MASK, np.int32)
    _, before, _ = packed(params, in_flight, cache, kind, blocks)
    shown = blocks.copy()  # a device may still be reading the old one
    shown[:, :, 2] = 5
    _, after, _ = packed(params, in_flight, cache, kind, shown)
    changed = [not np.array_equal(before[:, :, o], after[:, :, o]) for o in range(BLOCK)]
    assert changed == ([False, False, True, True] if kind == "causal" else [True] * BLOCK)


def test_rolling_back_after_a_packed_pass_is_a_cache_that_never_saw_the_rejected_tokens(params, in_flight, cache, kind):
    """Outcome 1 in every row: two in-flight tokens stay, the others and all blocks are gone."""
    _, _, after = packed(params, in_flight, cache, kind)
    rejected = in_flight.copy()
    rejected[:, 2:] = 1
    _, _, other = packed(params, rejected, cache, kind)
    following = np.random.default_rng(2).integers(0, MASK, (ROWS, BLOCK)).astype(np.int32)
    one, _ = extend(params, following, after._replace(length=after.length + 2))
    two, _ = extend(params, following, other._replace(length=other.length + 2))
    assert np.array_equal(one, two)


# ---- the golden table: text x[i] = 10 + i, block size 4, block start 5 = two prompt tokens and three accepted.
#      slot o -> absolute position -> label; slot 0 predicts the token AT its own position, there is no shift.
GOLDEN = [(0, 5, 15), (1, 6, 16), (2, 7, 17), (3, 8, 18)]


@pytest.mark.parametrize("visible", [0, 1])
def test_the_trainer_follows_the_golden_table(visible):
    row = 3  # the document lies in slots 3..13 of a packed row: positions are its own
    tokens = np.r_[[1] * row, 10 + np.arange(11), [0] * 2][None].astype(np.int32)
    position = np.r_[np.arange(row), np.arange(11), [0] * 2][None]
    batch = {
        "tokens": jnp.asarray(tokens),
        "position": jnp.asarray(position),
        "block_start": jnp.array([[row + 5]]),
        "block_visible": jnp.array([[visible]]),
        "block_length": jnp.array([[BLOCK]]),
    }
    blocks = {name: np.asarray(array)[0, 0].tolist() for name, array in d3d_inputs(batch, BLOCK, MASK).items()}
    assert list(zip(range(BLOCK), blocks["positions"], blocks["labels"], strict=True)) == GOLDEN
    shown = [label for _, _, label in GOLDEN[:visible]]
    assert blocks["tokens"] == shown + [MASK] * (BLOCK - visible)
    assert blocks["supervised"] == [False] * visible + [True] * (BLOCK - visible)


@pytest.fixture
def positions_of(monkeypatch: pytest.MonkeyPatch):
    """The positions that a draft pass gives its clean rows and its blocks, without computing the pass."""

    def positions(length: int, clean: list[int], blocks: jax.Array, context: list[int]) -> tuple[list, list]:
        seen = []

        def record(params, tokens, positions, intervals, cache, num_clean, config, attention, slot):
            seen.append(np.asarray(positions)[0])
            return jnp.zeros((*tokens.shape, CONFIG.hidden_size)), cache

        monkeypatch.setattr(drafters, "cached_forward", record)
        cache = empty_cache(CONFIG, 1, CAPACITY)._replace(length=jnp.array([length]))
        drafter = DRAFTERS["bidirectional"]
        draft_pass({}, jnp.array([clean]), blocks, jnp.array([context]), cache, CONFIG, drafter)
        (all_positions,) = seen
        split = len(clean)
        return all_positions[:split].tolist(), all_positions[split:].reshape(-1, BLOCK).tolist()

    return positions


def test_the_decoder_follows_the_golden_table(positions_of):
    """In-flight block at 2..5, of which outcome a=2 accepts 13 and 14: its successor starts at 5, as in training."""
    p, a = 2, 2
    masks = masked_blocks(1, BLOCK, DRAFTERS["bidirectional"])
    clean, blocks = positions_of(p, [12, 13, 14, 99], masks, [p + b + 1 for b in range(BLOCK)])
    assert clean == [2, 3, 4, 5]
    assert blocks[a] == [position for _, position, _ in GOLDEN]
    assert [block[0] for block in blocks] == [3, 4, 5, 6]
    # What slot o drafted is verified as the token of that very position: it becomes the next block as it stands.
    drafted = jnp.zeros((1, BLOCK, BLOCK), jnp.int32).at[0, a].set(jnp.array([label for _, _, label in GOLDEN]))
    outcome = Outcome(jnp.array([a]), jnp.array([15]), jnp.array([False]))
    block, hit = select(Successors(drafted, jnp.arange(BLOCK)[None], jnp.zeros((1, BLOCK), bool)), outcome)
    assert block.tolist() == [[15, 16, 17, 18]] and hit.tolist() == [True]
    clean, _ = positions_of(p + a + 1, block[0].tolist(), masks, [0] * BLOCK)
    assert list(zip(clean, block[0].tolist(), strict=True)) == [(position, label) for _, position, label in GOLDEN]


def test_the_redraft_follows_the_golden_table(positions_of):
    """Its visible token is the bonus at the block's own start, as in a training block with one visible token."""
    block = anchored_block(jnp.array([15]), DRAFTERS["bidirectional"])
    _, positions = positions_of(5, [], block, [5])
    assert positions == [[position for _, position, _ in GOLDEN]] and block[0, 0, 0] == GOLDEN[0][2]


def test_a_block_of_16_is_one_anchor_and_15_drafts():
    block = np.asarray(anchored_block(jnp.array([3]), DrafterConfig(16, MASK)))
    assert block.shape == (1, 1, 16) and block[0, 0, 0] == 3 and (block == MASK).sum() == 15


def test_the_mask_row_starts_as_the_mean_of_the_tokenizers_rows(stacked):
    changed = with_mean_mask_row(stacked, MASK)
    before, after = np.asarray(stacked["embed_tokens"]), np.asarray(changed["embed_tokens"])
    np.testing.assert_allclose(after[MASK], before[:MASK].mean(axis=0), atol=1e-6)
    others = np.arange(CONFIG.vocab_size) != MASK
    assert np.array_equal(after[others], before[others])
    assert changed["layers"] is stacked["layers"]

"""The pieces of a round as pure functions of device values (docs/algorithm.md 3 and 4).

A round starts with both caches holding exactly the positions before the block's anchor. The drafter's cache
lags by one step of bookkeeping: its length is the start of the block in flight, and moves on when the outcome
of that block is known (`advance`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from d3d_jax.config import AttentionConfig, DecodeConfig, DrafterConfig, ModelConfig
from d3d_jax.decoding.sampling import Sampling, choose, log_probability
from d3d_jax.decoding.state import DraftState, Outcome, PromptChunk, Stop, Successors
from d3d_jax.models.attention import AUTO
from d3d_jax.models.cache import KVCache
from d3d_jax.models.drafter import anchored_block, draft_pass, masked_blocks
from d3d_jax.models.qwen3 import Params, append, logits


@dataclass(frozen=True)
class Drafting:
    """All that is fixed about the drafter: its shape, its block format, how it is used, and which ids exist.

    num_token_ids: ids from here on are not the tokenizer's; they are never drafted.
    """

    model: ModelConfig
    drafter: DrafterConfig
    decode: DecodeConfig
    num_token_ids: int
    attention: AttentionConfig = AUTO


def prefill_target(
    params: Params,
    chunk: PromptChunk,
    cache: KVCache,
    outcome: Outcome,
    sampling: Sampling | None,
    stop: Stop,
    config: ModelConfig,
    attention: AttentionConfig = AUTO,
) -> tuple[KVCache, Outcome, tuple[jax.Array, jax.Array]]:
    """The next chunk of one row's prompt. After the last one the row is under way: its bonus is the first new token.

    Also returns that token and its log-probability, both [1]; they mean something after the last chunk only.
    """
    slot = chunk.slot
    start = jnp.where(chunk.first, 0, cache.length[slot])
    hidden, cache = append(params, chunk.tokens, cache.with_length(slot, start), config, attention, slot)
    length = start + chunk.count
    scores = logits(params, jax.lax.dynamic_slice_in_dim(hidden, chunk.count - 1, 1, axis=1))
    first = choose(scores, length[None, None], of_row(sampling, slot))
    ended = of_row(stop, slot).ends(first)[0, 0] | (length + 1 >= stop.limit[slot])
    outcome = outcome.with_row(slot, first[0, 0], ~chunk.last | ended)
    return cache.with_length(slot, length), outcome, (first[:, 0], log_probability(scores, first)[:, 0])


def prefill_drafter(
    params: Params,
    chunk: PromptChunk,
    state: DraftState,
    successors: Successors,
    sampling: Sampling | None,
    how: Drafting,
) -> tuple[DraftState, Successors]:
    """The next chunk of one row's prompt, and the successor of the one outcome there is after it.

    The prompt's last token plays the block in flight, of which nothing was accepted.
    """
    slot, size = chunk.slot, how.drafter.block_size
    start = jnp.where(chunk.first, 0, state.cache.length[slot])
    context = (start + chunk.count)[None, None]
    cache, blocks = state.cache.with_length(slot, start), masked_blocks(1, 1, how.drafter)
    _, hidden, cache = draft_pass(
        params, chunk.tokens, blocks, context, cache, how.model, how.drafter, how.attention, slot
    )
    tokens, confidence = _drafts(params, hidden, context, None, of_row(sampling, slot), how)
    everywhere = jnp.broadcast_to(tokens[0], (size, size))
    sure = jnp.broadcast_to(confidence[0], (size, size)).astype(jnp.float32)
    state = DraftState(
        cache.with_length(slot, start + chunk.count - chunk.last),
        state.confidence.at[slot].set(sure),
    )
    return state, Successors(
        successors.tokens.at[slot].set(everywhere), successors.drafted.at[slot].set(jnp.arange(size) == 0)
    )


def prefill_previous(
    params: Params, chunk: PromptChunk, cache: KVCache, previous_BG: jax.Array, how: Drafting
) -> tuple[KVCache, jax.Array]:
    """The next chunk of one row's prompt where nothing is drafted ahead.

    The block in flight when decoding starts is the last prompt token, then nothing.
    """
    slot = chunk.slot
    start = jnp.where(chunk.first, 0, cache.length[slot])
    _, cache = append(params, chunk.tokens, cache.with_length(slot, start), how.model, how.attention, slot)
    last = chunk.tokens[0, chunk.count - 1]
    previous = previous_BG.at[slot].set(jnp.where(jnp.arange(how.drafter.block_size) == 0, last, 0))
    return cache.with_length(slot, start + chunk.count - chunk.last), previous


def of_row(tree: Any, slot: jax.Array) -> Any:
    """The arrays [B, ...] of a tree for one row, [1, ...]."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, slot, 1), tree)


def advance(cache: KVCache, outcome: Outcome) -> KVCache:
    """The drafter's cache once the outcome of the block in flight is known."""
    step = jnp.where(outcome.done, 0, outcome.accepted + 1)
    return cache._replace(length=cache.length + step)


def select(successors: Successors, outcome: Outcome) -> tuple[jax.Array, jax.Array]:
    """The next block `[bonus, S[a][1:]]`, int32 [B, G], and whether the bonus had been foreseen, bool [B]."""
    rows = jnp.arange(outcome.bonus.shape[0])
    block = successors.tokens[rows, outcome.accepted]
    hit = successors.drafted[rows, outcome.accepted] & (block[:, 0] == outcome.bonus)
    return block.at[:, 0].set(outcome.bonus), hit


def verify(
    params: Params,
    block_BG: jax.Array,
    done_B: jax.Array,
    cache: KVCache,
    sampling: Sampling | None,
    stop: Stop,
    config: ModelConfig,
    attention: AttentionConfig = AUTO,
) -> tuple[KVCache, Outcome, tuple[jax.Array, jax.Array]]:
    """One target pass over a block: how many drafts are the target's own tokens, and its next one.

    Also returns what the round emits, int32 [B, G], and its log-probabilities: `accepted` drafts, then the bonus; the
    rest is undefined. A row that was done stays as it is.
    """
    size = block_BG.shape[1]
    hidden, cache = append(params, block_BG, cache, config, attention)
    positions = cache.length[:, None] + jnp.arange(1, size + 1)
    scores = logits(params, hidden)
    own = choose(scores, positions, sampling)
    agree = jnp.cumprod(own[:, :-1] == block_BG[:, 1:], axis=1)
    accepted = agree.sum(axis=1, dtype=jnp.int32)
    emitted = jnp.arange(size) <= accepted[:, None]
    length = cache.length + accepted + 1
    stopped = jnp.any(stop.ends(own) & emitted, axis=1)
    done = done_B | stopped | (length + 1 >= stop.limit)
    bonus = jnp.take_along_axis(own, accepted[:, None], axis=1)[:, 0]
    cache = cache._replace(length=jnp.where(done_B, cache.length, length))
    return cache, Outcome(accepted, bonus, done), (own, log_probability(scores, own))


def packed_draft(
    params: Params,
    block_BG: jax.Array,
    confidence_BG: jax.Array,
    cache: KVCache,
    sampling: Sampling | None,
    how: Drafting,
) -> tuple[DraftState, Successors]:
    """The successors of the outcomes of `block` in one pass, while the target verifies it (docs/algorithm.md 3)."""
    batch, size = block_BG.shape
    if how.decode.outcomes == "all":
        outcomes = jnp.broadcast_to(jnp.arange(size), (batch, size))
    else:
        outcomes = likeliest_outcomes(confidence_BG, how.decode.outcomes)
    count = outcomes.shape[1]
    context = cache.length[:, None] + outcomes + 1
    blocks = masked_blocks(batch, count, how.drafter)
    _, hidden, cache = draft_pass(params, block_BG, blocks, context, cache, how.model, how.drafter, how.attention)
    banned = None
    if how.decode.ban_rejected:
        after = jnp.take_along_axis(block_BG, jnp.minimum(outcomes + 1, size - 1), axis=1)
        banned = jnp.where(outcomes < size - 1, after, how.model.vocab_size)  # nothing was rejected after G-1
    tokens, confidence = _drafts(params, hidden, context, banned, sampling, how)
    rows = jnp.arange(batch)[:, None]
    table = jnp.zeros((batch, size, size), jnp.int32).at[rows, outcomes].set(tokens)
    drafted = jnp.zeros((batch, size), bool).at[rows, outcomes].set(True)
    kept = jnp.zeros((batch, size, size), jnp.float32).at[rows, outcomes].set(confidence)
    return DraftState(cache, kept), Successors(table, drafted)


def anchored_draft(
    params: Params,
    previous_BT: jax.Array,
    anchor_B: jax.Array,
    context_B: jax.Array,
    cache: KVCache,
    sampling: Sampling | None,
    how: Drafting,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """A fresh block `[anchor, drafts]` that starts at position `context`.

    previous: clean tokens still missing in the cache, written at its length (T may be 0).
    Returns the block int32 [B, G], the drafter's confidence in each token float32 [B, G] (1 for the
    anchor), and the cache, its length unchanged.
    """
    blocks = anchored_block(anchor_B, how.drafter)
    _, hidden, cache = draft_pass(
        params, previous_BT, blocks, context_B[:, None], cache, how.model, how.drafter, how.attention
    )
    tokens, confidence = _drafts(params, hidden, context_B[:, None], None, sampling, how)
    return tokens[:, 0].at[:, 0].set(anchor_B), confidence[:, 0].at[:, 0].set(1.0), cache


def redraft_missed(
    params: Params,
    successors: Successors,
    outcome: Outcome,
    state: DraftState,
    sampling: Sampling | None,
    how: Drafting,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next block with missed rows drafted again from their now known anchor.

    The pass is skipped on the device when every row hit. `state.cache` is as the last packed pass left it
    and is only read. Returns block [B, G], confidence [B, G], hit [B].
    """
    block, hit = select(successors, outcome)
    kept = selected_confidence(state, outcome)

    def again(nothing_more: None) -> tuple[jax.Array, jax.Array]:
        cache = advance(state.cache, outcome)
        nothing = jnp.zeros((block.shape[0], 0), jnp.int32)
        del nothing_more
        fresh, sure, _ = anchored_draft(params, nothing, outcome.bonus, cache.length, cache, sampling, how)
        return jnp.where(hit[:, None], block, fresh), jnp.where(hit[:, None], kept, sure)

    missed = jnp.any(~hit & ~outcome.done)
    block, kept = jax.lax.cond(missed, again, lambda _: (block, kept), None)
    return block, kept, hit


def selected_confidence(state: DraftState, outcome: Outcome) -> jax.Array:
    """The drafter's confidence in the block that `select` picks, float32 [B, G]."""
    return state.confidence[jnp.arange(outcome.accepted.shape[0]), outcome.accepted]


def likeliest_outcomes(confidence_BG: jax.Array, count: int) -> jax.Array:
    """The `count` likeliest numbers of accepted drafts, int32 [B, count].

    `P(a) = q_1 ... q_a (1 - q_{a+1})` from the confidence q_j in each draft; all G-1 are accepted with the
    product of all.
    """
    drafts = confidence_BG[:, 1:]
    reach = jnp.cumprod(jnp.concatenate([jnp.ones_like(drafts[:, :1]), drafts], axis=1), axis=1)
    fail = jnp.concatenate([1 - drafts, jnp.ones_like(drafts[:, :1])], axis=1)
    return jax.lax.top_k(reach * fail, count)[1].astype(jnp.int32)


def _drafts(
    params: Params,
    hidden_BAGD: jax.Array,
    start_BA: jax.Array,
    banned_BA: jax.Array | None,
    sampling: Sampling | None,
    how: Drafting,
) -> tuple[jax.Array, jax.Array]:
    """The drafter's token at each place, int32 [B, A, G], and its confidence in it, float32 [B, A, G].

    The confidence is computed only where outcomes are ranked by it; otherwise it is 0.
    """
    batch, blocks, size, _ = hidden_BAGD.shape
    scores = logits(params, hidden_BAGD.reshape(batch, blocks * size, -1))
    ids = jnp.arange(scores.shape[-1])
    allowed = (ids < how.num_token_ids) & (ids != how.drafter.mask_token_id)
    if banned_BA is not None:  # a comparison, which fuses with what reads the scores; a scatter would make them a copy
        nothing = jnp.full((batch, blocks, size - 1), how.model.vocab_size)
        banned = jnp.concatenate([banned_BA[:, :, None], nothing], axis=2).reshape(batch, -1)
        allowed = allowed & (ids != banned[..., None])
    flat = jnp.where(allowed, scores, -jnp.inf)
    positions = (start_BA[:, :, None] + jnp.arange(size)).reshape(batch, -1)
    tokens = choose(flat, positions, sampling if how.decode.draft_sampling == "gumbel" else None)
    confidence = jnp.zeros(tokens.shape, jnp.float32)
    if how.decode.outcomes != "all":
        at = jnp.take_along_axis(flat, tokens[..., None], axis=-1)[..., 0]
        confidence = jnp.exp(at - jax.nn.logsumexp(flat, axis=-1))
    return tokens.reshape(batch, blocks, size), confidence.reshape(batch, blocks, size)

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
from d3d_jax.decoding.branches import NO_OUTCOME, choose_branches, num_branches, select, selected_odds
from d3d_jax.decoding.policies import Tactic
from d3d_jax.decoding.sampling import Sampling, choose, log_probability, scores
from d3d_jax.decoding.scripted import Script
from d3d_jax.decoding.state import DraftState, Odds, Outcome, PromptChunk, Stop, Successors
from d3d_jax.models.attention import AUTO
from d3d_jax.models.cache import KVCache
from d3d_jax.models.drafter import anchored_block, draft_pass, masked_blocks
from d3d_jax.models.qwen3 import Params, append, logits


@dataclass(frozen=True)
class Drafting:
    """All that is fixed about the drafter: its shape, its block format, how it is used, and which ids exist.

    num_token_ids: ids from here on are not the tokenizer's; they are never drafted. script: drafted in place of what
    the model would.
    """

    model: ModelConfig
    drafter: DrafterConfig
    decode: DecodeConfig
    num_token_ids: int
    attention: AttentionConfig = AUTO
    script: Script | None = None


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
    slot = chunk.slot
    start = jnp.where(chunk.first, 0, state.cache.length[slot])
    context = (start + chunk.count)[None, None]
    cache, blocks = state.cache.with_length(slot, start), masked_blocks(1, 1, how.drafter)
    _, hidden, cache = draft_pass(
        params, chunk.tokens, blocks, context, cache, how.model, how.drafter, how.attention, slot
    )
    tokens, odds = _drafts(params, hidden, context, None, of_row(sampling, slot), how, slot)
    cache = cache.with_length(slot, start + chunk.count - chunk.last)
    odds = jax.tree.map(lambda kept, new: kept.at[slot].set(new[0]), state.odds, odds)  # the one branch plays them all
    outcome = jnp.where(jnp.arange(successors.outcome.shape[1]) == 0, 0, NO_OUTCOME)
    return DraftState(cache, odds), Successors(
        successors.tokens.at[slot].set(tokens[0]),
        successors.outcome.at[slot].set(outcome),
        successors.anchored.at[slot].set(False),
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


def no_successors(how: Drafting, rows: int) -> tuple[Odds, Successors]:
    """Of rows that have drafted nothing yet."""
    branches, size = num_branches(how.decode), how.drafter.block_size
    tokens = jnp.zeros((rows, branches, size), jnp.int32)
    candidates = jnp.zeros((*tokens.shape, how.decode.num_candidates), jnp.int32)
    odds = Odds(tokens.astype(jnp.float32), candidates, candidates.astype(jnp.float32))
    return odds, Successors(
        tokens, jnp.full((rows, branches), NO_OUTCOME, jnp.int32), jnp.zeros((rows, branches), bool)
    )


def packed_draft(
    params: Params,
    block_BG: jax.Array,
    odds: Odds,
    cache: KVCache,
    sampling: Sampling | None,
    how: Drafting,
    tactic: Tactic,
) -> tuple[DraftState, Successors]:
    """The successors of the outcomes of `block` in one pass, while the target verifies it (docs/algorithm.md 3).

    odds: the drafter's, of that block; they say which branches are worth their rows. Whatever the number of a
    tactic's branches, the results have room for those of any.
    """
    batch, size = block_BG.shape
    outcome, first, anchored = choose_branches(odds, how.decode, tactic, how.drafter.mask_token_id)
    context = cache.length[:, None] + outcome + 1
    blocks = masked_blocks(batch, outcome.shape[1], how.drafter).at[:, :, 0].set(first)
    _, hidden, cache = draft_pass(params, block_BG, blocks, context, cache, how.model, how.drafter, how.attention)
    banned = None
    if how.decode.ban_rejected:
        after = jnp.take_along_axis(block_BG, jnp.minimum(outcome + 1, size - 1), axis=1)
        banned = jnp.where(outcome < size - 1, after, how.model.vocab_size)  # nothing was rejected after G-1
    tokens, odds = _drafts(params, hidden, context, banned, sampling, how)
    tokens = tokens.at[:, :, 0].set(jnp.where(anchored, first, tokens[:, :, 0]))
    room = [(0, 0), (0, num_branches(how.decode) - outcome.shape[1])]
    odds, tokens, anchored = jax.tree.map(
        lambda leaf: jnp.pad(leaf, room + [(0, 0)] * (leaf.ndim - 2)), (odds, tokens, anchored)
    )
    return DraftState(cache, odds), Successors(tokens, jnp.pad(outcome, room, constant_values=NO_OUTCOME), anchored)


def feed(
    params: Params, block_BG: jax.Array, state: DraftState, successors: Successors, how: Drafting
) -> tuple[DraftState, Successors]:
    """The drafter takes note of `block` and drafts nothing: a `packed_draft` without branches."""
    _, cache = append(params, block_BG, state.cache, how.model, how.attention)
    none = jnp.full_like(successors.outcome, NO_OUTCOME)
    return DraftState(cache, state.odds), Successors(successors.tokens, none, jnp.zeros_like(successors.anchored))


def anchored_draft(
    params: Params,
    previous_BT: jax.Array,
    anchor_B: jax.Array,
    context_B: jax.Array,
    cache: KVCache,
    sampling: Sampling | None,
    how: Drafting,
) -> tuple[jax.Array, Odds, KVCache]:
    """A fresh block `[anchor, drafts]` that starts at position `context`.

    previous: clean tokens still missing in the cache, written at its length (T may be 0).
    Returns the block int32 [B, G], its odds, and the cache, its length unchanged.
    """
    blocks = anchored_block(anchor_B, how.drafter)
    _, hidden, cache = draft_pass(
        params, previous_BT, blocks, context_B[:, None], cache, how.model, how.drafter, how.attention
    )
    tokens, odds = _drafts(params, hidden, context_B[:, None], None, sampling, how)
    return tokens[:, 0].at[:, 0].set(anchor_B), jax.tree.map(lambda leaf: leaf[:, 0], odds), cache


def redraft_missed(
    params: Params,
    successors: Successors,
    outcome: Outcome,
    state: DraftState,
    sampling: Sampling | None,
    how: Drafting,
) -> tuple[jax.Array, Odds, jax.Array]:
    """The next block with missed rows drafted again from their now known anchor.

    The pass is skipped on the device when every row hit. `state.cache` is as the last packed pass left it
    and is only read. Returns block [B, G], its odds, hit [B].
    """
    block, hit = select(successors, outcome)
    found = block, selected_odds(state.odds, successors, outcome)

    def again() -> tuple[jax.Array, Odds]:
        cache = advance(state.cache, outcome)
        nothing = jnp.zeros((block.shape[0], 0), jnp.int32)
        fresh = anchored_draft(params, nothing, outcome.bonus, cache.length, cache, sampling, how)[:2]
        kept = [hit.reshape(-1, *[1] * (leaf.ndim - 1)) for leaf in jax.tree.leaves(fresh)]
        return jax.tree.map(jnp.where, jax.tree.unflatten(jax.tree.structure(fresh), kept), found, fresh)

    missed = jnp.any(~hit & ~outcome.done)
    return *jax.lax.cond(missed, again, lambda: found), hit


def _drafts(
    params: Params,
    hidden_BRGD: jax.Array,
    start_BR: jax.Array,
    banned_BR: jax.Array | None,
    sampling: Sampling | None,
    how: Drafting,
    slot: jax.Array | None = None,
) -> tuple[jax.Array, Odds]:
    """The drafter's token at each place, int32 [B, R, G], and its odds, which are 0 unless branches are chosen by them.
    With `slot`, of that one row.

    A block's first token may be given, and its odds then mean nothing: no outcome depends on them.
    """
    batch, blocks, size, _ = hidden_BRGD.shape
    if how.script is not None:
        rows = jnp.arange(batch) if slot is None else slot[None]
        return how.script.drafts(rows, start_BR, size, how.decode.num_candidates)
    by_id = logits(params, hidden_BRGD.reshape(batch, blocks * size, -1))
    ids = jnp.arange(by_id.shape[-1])
    allowed = (ids < how.num_token_ids) & (ids != how.drafter.mask_token_id)
    if banned_BR is not None:  # a comparison, which fuses with what reads the scores; a scatter would make them a copy
        nothing = jnp.full((batch, blocks, size - 1), how.model.vocab_size)
        banned = jnp.concatenate([banned_BR[:, :, None], nothing], axis=2).reshape(batch, -1)
        allowed = allowed & (ids != banned[..., None])
    by_id = jnp.where(allowed, by_id, -jnp.inf)
    positions = (start_BR[:, :, None] + jnp.arange(size)).reshape(batch, -1)
    drawn = scores(by_id, positions, sampling if how.decode.draft_sampling == "gumbel" else None)
    count = how.decode.num_candidates
    best = jax.lax.top_k(drawn, count + 1)[1] if count else jnp.argmax(drawn, axis=-1, keepdims=True)
    best = best.astype(jnp.int32)
    chances = jnp.zeros(best.shape, jnp.float32)
    if how.decode.ranks_branches:
        chances = jnp.exp(jnp.take_along_axis(by_id, best, axis=-1) - jax.nn.logsumexp(by_id, axis=-1, keepdims=True))
    best, chances = (leaf.reshape(batch, blocks, size, -1) for leaf in (best, chances))
    return best[..., 0], Odds(chances[..., 0], best[..., 1:], chances[..., 1:])

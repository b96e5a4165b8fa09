"""Acceptance of a drafter on text that the target has written, without running the target (docs/algorithm.md 8).

What verification emits does not depend on the drafter. So the blocks that decoding would verify start at places of
the stored text, and see nothing but the text before them: drafted from every place in one batched pass, they give the
round trace of every mode and policy (`acceptance.walk`). Only how the target ran is unknown, which is not asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from d3d_jax.config import AttentionConfig, DrafterConfig, ModelConfig
from d3d_jax.devices.sharding import constrain, parts
from d3d_jax.models.attention import AUTO
from d3d_jax.models.layers import linear
from d3d_jax.models.qwen3 import Params, forward_after, head, keys_and_values
from d3d_kernels import Intervals, causal_intervals, training_intervals

TOKENS_AT_ONCE = 4096  # block positions that a device works on at one time
LOGITS_BYTES = 100e6  # float32 logits on a device at one time


class Tail(NamedTuple):
    """How the G-1 drafts of a block fare against the text; int32 arrays, one entry for each place a block starts at.

    accepted: leading drafts that are the text's own, as far as the text goes. rejected: the draft that follows them;
    undefined after G-1. rank: how many numbers of accepted drafts the drafter held for likelier than this one
    (docs/algorithm.md 3), so that with `outcomes: M` its successor is drafted where rank < M.
    """

    accepted: jax.Array
    rejected: jax.Array
    rank: jax.Array


class Everywhere(NamedTuple):
    """Blocks drafted from every response token of rows of packed documents; int32 arrays [B, S] but for `count` [B].

    Entry j of a row is about its j-th response token, in order; entries from `count` on are undefined.
    token: that token. document: the number of its document within the row.
    first, second: the two likeliest tokens there for a block of masks. masked: the rest of that block.
    anchored: the drafts of a block that starts with the token itself.
    """

    count: jax.Array
    token: jax.Array
    document: jax.Array
    first: jax.Array
    second: jax.Array
    masked: Tail
    anchored: Tail


def draft_everywhere(
    params: Params,
    rows: Mapping[str, jax.Array],
    model: ModelConfig,
    drafter: DrafterConfig,
    num_token_ids: int,
    *,
    gates_L: jax.Array | None = None,
    dtype: Any = None,
    attention: AttentionConfig = AUTO,
) -> Everywhere:
    """Draft two blocks from every response token of `rows`: one of masks, one that shows the token.

    Args:
        params: the drafter's, in the stacked form.
        rows: `tokens`, `document`, `start`, `position`, `response` [B, S] of packed rows (`data.packing.PackedRows`).
        num_token_ids: ids from here on are never drafted, nor is the mask.
        gates_L: 1 keeps a layer, 0 turns it off without compiling anything again.
        dtype: type of the computation; the parameters' own when None.
    """
    slots = rows["tokens"].shape[1]
    local_rows = -(-rows["tokens"].shape[0] // parts("batch"))
    at_once = max(1, min(slots, TOKENS_AT_ONCE // (2 * drafter.block_size * local_rows)))
    context = keys_and_values(
        params,
        rows["tokens"],
        model,
        positions_BT=rows["position"],
        intervals=causal_intervals(rows["start"]),
        gates_L=gates_L,
        dtype=dtype,
        attention=attention,
    )
    count = rows["response"].sum(axis=1, dtype=jnp.int32)
    order = jnp.argsort(~rows["response"], axis=1, stable=True)
    starts = jnp.where(jnp.arange(slots) < count[:, None], order, -1)
    starts = jnp.pad(starts, ((0, 0), (0, -slots % at_once)), constant_values=-1)
    draft = partial(
        _draft_from, params, context, rows, model=model, drafter=drafter, num_token_ids=num_token_ids,
        gates_L=gates_L, dtype=dtype, attention=attention,
    )  # fmt: skip

    def part(at: jax.Array) -> tuple:
        return draft(jax.lax.dynamic_slice_in_dim(starts, at, at_once, axis=1))

    def body(carry: tuple) -> tuple:
        at, whole = carry
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=at, axis=1)
        return at + at_once, jax.tree.map(lambda all_of_it, new: put(all_of_it, new), whole, part(at))

    nothing = jnp.zeros((), jnp.int32)
    blank = jax.tree.map(lambda x: jnp.zeros(starts.shape, x.dtype), jax.eval_shape(part, nothing))
    # A loop of unknown length: rows of few responses cost no more than their own.
    _, whole = jax.lax.while_loop(lambda carry: carry[0] < count.max(), body, (nothing, blank))
    found = Everywhere(count, *whole)
    return jax.tree.map(lambda x: x[:, :slots] if x.ndim == 2 else x, found)


def _draft_from(
    params: Params,
    context: tuple[jax.Array, jax.Array],
    rows: Mapping[str, jax.Array],
    start_BC: jax.Array,
    *,
    model: ModelConfig,
    drafter: DrafterConfig,
    num_token_ids: int,
    gates_L: jax.Array | None,
    dtype: Any,
    attention: AttentionConfig,
) -> tuple:
    """The fields of `Everywhere` after `count`, each [B, C], for blocks from the slots `start`; -1 is none."""
    batch, blocks = start_BC.shape
    size, slots = drafter.block_size, rows["tokens"].shape[1]
    offset = jnp.arange(size)
    slot = jnp.maximum(start_BC, 0)[..., None] + offset
    inside = jnp.minimum(slot, slots - 1)
    text, document = (
        jnp.take_along_axis(rows[name], inside.reshape(batch, -1), axis=1).reshape(slot.shape)
        for name in ("tokens", "document")
    )
    there = (slot < slots) & (document == document[..., :1])

    masks = jnp.full((batch, blocks, size), drafter.mask_token_id, jnp.int32)
    tokens = jnp.concatenate([masks, masks.at[..., 0].set(text[..., 0])], axis=1)
    start = jnp.concatenate([start_BC, start_BC], axis=1)
    first_position = jnp.take_along_axis(rows["position"], jnp.maximum(start, 0), axis=1)
    everyone = training_intervals(rows["start"], start, size, drafter.block_attention)
    hidden = forward_after(
        params,
        tokens.reshape(batch, -1),
        context,
        model,
        positions_BT=(first_position[..., None] + offset).reshape(batch, -1),
        intervals=Intervals(*(bound[:, slots:] for bound in everyone)),
        gates_L=gates_L,
        dtype=dtype,
        attention=attention,
    )
    ids = jnp.arange(model.vocab_size)
    can_be_drafted = (ids < num_token_ids) & (ids != drafter.mask_token_id)
    drafts, confidence = _likeliest(hidden, head(params), can_be_drafted)
    drafts, confidence = (x.reshape(batch, 2 * blocks, size) for x in (drafts, confidence))
    first = drafts[:, :blocks, 0]
    first_hidden = hidden.reshape(batch, 2 * blocks, size, -1)[:, :blocks, 0]
    second, _ = _likeliest(first_hidden, head(params), can_be_drafted, without_BT=first)
    tails = [
        _tail(drafts[:, part], confidence[:, part], text, there)
        for part in (slice(0, blocks), slice(blocks, 2 * blocks))
    ]
    return text[..., 0], document[..., 0], first, second, *tails


def _tail(drafts_BCG: jax.Array, confidence_BCG: jax.Array, text_BCG: jax.Array, there_BCG: jax.Array) -> Tail:
    right = (drafts_BCG == text_BCG) & there_BCG
    accepted = jnp.cumprod(right[..., 1:], axis=-1).sum(axis=-1, dtype=jnp.int32)
    size = drafts_BCG.shape[-1]
    after = jnp.minimum(accepted + 1, size - 1)[..., None]
    sure = confidence_BCG[..., 1:]
    reach = jnp.cumprod(jnp.concatenate([jnp.ones_like(sure[..., :1]), sure], axis=-1), axis=-1)
    outcome = reach * jnp.concatenate([1 - sure, jnp.ones_like(sure[..., :1])], axis=-1)
    own = jnp.take_along_axis(outcome, accepted[..., None], axis=-1)
    earlier = jnp.arange(size) < accepted[..., None]  # of equally likely outcomes the lower one comes first
    rank = ((outcome > own) | ((outcome == own) & earlier)).sum(axis=-1, dtype=jnp.int32)
    return Tail(accepted, jnp.take_along_axis(drafts_BCG, after, axis=-1)[..., 0], rank)


def _likeliest(
    hidden_BTD: jax.Array, head_VD: jax.Array, allowed_V: jax.Array, without_BT: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The likeliest allowed token, int32 [B, T], and its probability among them, float32 [B, T].

    without: a token of each row to leave out. Logits exist for a few tokens of each row at a time.
    """
    batch, tokens, _ = hidden_BTD.shape
    of_a_token = 4 * (batch / parts("batch")) * (head_VD.shape[0] / parts("vocab"))
    chunk = max(1, min(tokens, int(LOGITS_BYTES / of_a_token)))
    head_VD = constrain(head_VD, "vocab", None)
    without = jnp.full((batch, tokens), -1) if without_BT is None else without_BT

    def chunks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, -tokens % chunk), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    def body(piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, banned = piece
        logits = constrain(linear(hidden, head_VD), "batch", None, "vocab").astype(jnp.float32)
        allowed = allowed_V & (jnp.arange(logits.shape[-1]) != banned[..., None])
        logits = jnp.where(allowed, logits, -jnp.inf)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        highest = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
        return token, jnp.exp(highest - jax.nn.logsumexp(logits, axis=-1))

    found = jax.lax.map(body, (chunks(hidden_BTD), chunks(without)))
    token, probability = (x.swapaxes(0, 1).reshape(batch, -1)[:, :tokens] for x in found)
    return token, probability

"""The two losses: plain next-token, and the drafter's of docs/algorithm.md 7.

Every mean is one global sum over one global count: under `jit` on a mesh a sum over the batch already spans
all devices. Logits exist for `chunk` tokens of each row at a time and are computed again in the backward
pass, so no [tokens, vocabulary] array in float32 is ever made.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from d3d_jax.config import AttentionConfig, LossConfig, ModelConfig, TrainConfig
from d3d_jax.devices.sharding import constrain, parts
from d3d_jax.errors import ConfigError
from d3d_jax.models.attention import AUTO
from d3d_jax.models.layers import linear
from d3d_jax.models.qwen3 import Params, forward, head
from d3d_kernels import causal_intervals, training_intervals

Batch = dict[str, jax.Array]

LEAST_REST = 1e-6  # probability of "any other token": what is left of 1 is no more exact in float32
LOGITS_BYTES = 100e6  # float32 logits on a device at one time; the loss needs about three times that
GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}  # decay of the position weights that go with a block size


def position_decay(block_size: int, config: LossConfig) -> float:
    """gamma of the weights `exp(-o / gamma)`."""
    if config.gamma is not None:
        return config.gamma
    if block_size not in GAMMA:
        raise ConfigError(f"loss.gamma has no default for block_size={block_size} (known: {sorted(GAMMA)}); set it")
    return GAMMA[block_size]


def cross_entropy(
    hidden_BTD: jax.Array,
    labels_BT: jax.Array,
    head_VD: jax.Array,
    chunk: int,
    teacher: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Cross-entropy of each label in nats, float32 [B, T], and whether it is the likeliest, bool [B, T].

    With `teacher`, ids and log-probabilities [B, T, K], also the divergence from it (`divergence`), float32 [B, T].

    Logits exist for `chunk` tokens of each row at a time, and for fewer where a device would hold more than
    `LOGITS_BYTES` of them. On a mesh each device has its rows' logits over its part of the vocabulary.
    """
    batch, tokens, _ = hidden_BTD.shape
    of_a_token = 4 * (batch / parts("batch")) * (head_VD.shape[0] / parts("vocab"))
    chunk = max(1, min(chunk, tokens, int(LOGITS_BYTES / of_a_token)))
    # Gathered over `fsdp` here, once, and not again for every chunk; in float32, in which its gradient adds up.
    head_VD = constrain(head_VD, "vocab", None)
    hidden_BTD = constrain(hidden_BTD, "batch", None, None)
    pad = -tokens % chunk

    def chunks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, pad), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    def joined(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(batch, -1)[:, :tokens]

    @jax.checkpoint
    def body(_: None, part: tuple) -> tuple[None, tuple[jax.Array, ...]]:
        hidden, labels, *top = part
        logits = constrain(linear(hidden, head_VD), "batch", None, "vocab").astype(jnp.float32)
        at_label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        total = jax.nn.logsumexp(logits, axis=-1)
        found = total - at_label, at_label >= logits.max(axis=-1)
        return None, (*found, divergence(logits, total, *top)) if top else found

    _, found = jax.lax.scan(body, None, tuple(map(chunks, (hidden_BTD, labels_BT, *(teacher or ())))))
    return tuple(map(joined, found))


def divergence(
    logits_BTV: jax.Array, total_BT: jax.Array, top_ids_BTK: jax.Array, top_logprobs_BTK: jax.Array
) -> jax.Array:
    """KL(teacher || model) in nats over K + 1 outcomes: the teacher's likeliest tokens, and any other; float32 [B, T].

    It bounds the divergence over the vocabulary from below, is 0 where the model says of these tokens what the teacher
    says, and needs nothing but their logits and the log-sum-exp `total` of all.
    """
    top = jnp.exp(top_logprobs_BTK)
    own = jnp.take_along_axis(logits_BTV, top_ids_BTK, axis=-1) - total_BT[..., None]
    # Padding has -inf, which must not meet a 0 in the gradient either.
    known = (top * (jnp.where(top > 0, top_logprobs_BTK, 0.0) - own)).sum(axis=-1)
    rest, own_rest = (jnp.clip(1 - p.sum(axis=-1), LEAST_REST, 1.0) for p in (top, jnp.exp(own)))
    return known + rest * (jnp.log(rest) - jnp.log(own_rest))


def mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """A global mean that is 0 where there is nothing to count."""
    return total / jnp.maximum(count, 1.0)


def next_token_targets(batch: Batch, prompt_weight: float) -> tuple[jax.Array, jax.Array]:
    """Label and weight of every clean row i: the token i+1 of the same document, both [B, T]."""
    tokens, document = batch["tokens"], batch["document"]
    labels = jnp.roll(tokens, -1, axis=1)
    same = (document >= 0) & (jnp.roll(document, -1, axis=1) == document)
    same = same.at[:, -1].set(False)
    predicts_response = jnp.roll(batch["response"], -1, axis=1)
    return labels, jnp.where(same, jnp.where(predicts_response, 1.0, prompt_weight), 0.0)


def ar_loss(
    params: Params,
    batch: Batch,
    config: ModelConfig,
    loss: LossConfig,
    dtype: Any,
    remat: bool,
    counts: dict[str, jax.Array] | None = None,
    attention: AttentionConfig = AUTO,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Next-token loss; prompt tokens count `loss.prompt_weight`. The metrics are sums and counts.

    `counts`: what the sums are divided by, from :func:`loss_counts`, when `batch` is a part of a larger one.
    """
    labels, weights = next_token_targets(batch, loss.prompt_weight)
    intervals = causal_intervals(batch["start"])
    hidden = forward(
        params,
        batch["tokens"],
        config,
        positions_BT=batch["position"],
        intervals=intervals,
        dtype=dtype,
        remat=remat,
        attention=attention,
    )
    each, correct = cross_entropy(hidden, labels, head(params), loss.chunk)
    total, count = (weights * each).sum(), weights.sum()
    response = weights >= 1.0
    metrics = {"ar_correct": (correct & response).sum(), "ar_count": response.sum()}
    whole = counts or {"ar_loss_count": count}
    return mean(total, whole["ar_loss_count"]), {"ar_loss_sum": total, "ar_loss_count": count, **metrics}


def d3d_inputs(batch: Batch, block_size: int, mask_token_id: int) -> dict[str, jax.Array]:
    """Tokens, positions, labels and weights of the C masked blocks of each row, all [B, C, G].

    Offset o of a block stands for clean slot `start + o`: it shows that slot's token while `o < visible`
    and the mask from there on, and its label is that same token: no shift. With `uniform` noise some of the others
    show their token too, and are not supervised. inverse_rate: 1/t of each position's block, which its loss counts.
    """
    start, visible, length = batch["block_start"], batch["block_visible"], batch["block_length"]
    offset = jnp.arange(block_size)
    slot = jnp.minimum(jnp.maximum(start, 0)[..., None] + offset, batch["tokens"].shape[1] - 1)
    rows = jnp.arange(slot.shape[0])[:, None, None]
    labels = batch["tokens"][rows, slot]
    first = jnp.take_along_axis(batch["position"], jnp.maximum(start, 0), axis=1)
    masked = offset >= visible[..., None]
    inverse_rate = jnp.ones((), jnp.float32)
    if "block_masked" in batch:
        masked &= batch["block_masked"]
        inverse_rate = 1 / batch["block_rate"][..., None]
    supervised = (start >= 0)[..., None] & masked & (offset < length[..., None])
    return {
        "tokens": jnp.where(masked, mask_token_id, labels),
        "positions": first[..., None] + offset,
        "labels": labels,
        "supervised": supervised,
        "distance": jnp.maximum(offset - visible[..., None], 0),
        "inverse_rate": jnp.broadcast_to(inverse_rate, supervised.shape),
    }


def d3d_loss(
    params: Params,
    batch: Batch,
    config: ModelConfig,
    loss: LossConfig,
    *,
    block_size: int,
    mask_token_id: int,
    block_attention: str,
    dtype: Any,
    remat: bool,
    counts: dict[str, jax.Array] | None = None,
    attention: AttentionConfig = AUTO,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Block loss + ar_weight * next-token loss on the response, in one pass over clean copy and blocks.

    With `kd_weight`, + that times the blocks' weighted mean divergence from the target's stored likeliest tokens.
    `counts` as for :func:`ar_loss`.
    """
    blocks = d3d_inputs(batch, block_size, mask_token_id)
    rows, clean = batch["tokens"].shape

    def joined(first: jax.Array, name: str) -> jax.Array:
        return jnp.concatenate([first, blocks[name].reshape(rows, -1)], axis=1)

    intervals = training_intervals(batch["start"], batch["block_start"], block_size, block_attention)
    hidden = forward(
        params,
        joined(batch["tokens"], "tokens"),
        config,
        positions_BT=joined(batch["position"], "positions"),
        intervals=intervals,
        dtype=dtype,
        remat=remat,
        attention=attention,
    )
    block_weights = _block_weights(blocks, position_decay(block_size, loss)).reshape(rows, -1)
    ar_labels, ar_weights = next_token_targets(batch, 0.0)
    teacher = _teacher(batch, block_size) if loss.kd_weight else None
    each, correct, *apart = cross_entropy(hidden, joined(ar_labels, "labels"), head(params), loss.chunk, teacher)
    ar_sum, ar_count = (ar_weights * each[:, :clean]).sum(), ar_weights.sum()
    block_sum, block_count = (block_weights * each[:, clean:]).sum(), block_weights.sum()
    block_correct = correct[:, clean:].reshape(blocks["labels"].shape)
    fresh = blocks["supervised"] & (batch["block_visible"] == 0)[..., None]
    whole = counts or {"block_loss_count": block_count, "ar_loss_count": ar_count}
    value = mean(block_sum, whole["block_loss_count"]) + loss.ar_weight * mean(ar_sum, whole["ar_loss_count"])
    distilled = {}
    if apart:
        kd_sum = (block_weights * apart[0][:, clean:]).sum()
        value += loss.kd_weight * mean(kd_sum, whole["block_loss_count"])
        distilled = {"kd_loss_sum": kd_sum, "kd_loss_count": block_count}
    return value, {
        **distilled,
        "block_loss_sum": block_sum,
        "block_loss_count": block_count,
        "ar_loss_sum": ar_sum,
        "ar_loss_count": ar_count,
        "ar_correct": (correct[:, :clean] & (ar_weights > 0)).sum(),
        "ar_count": ar_count,
        "position_correct": (block_correct & fresh).sum(axis=(0, 1)),
        "position_count": fresh.sum(axis=(0, 1)),
    }


def _teacher(batch: Batch, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Stored ids and log-probabilities for the labels of all rows, [B, S + C G, K]; clean ones are not distilled."""
    rows, clean, width = batch["top_ids"].shape
    slot = jnp.minimum(jnp.maximum(batch["block_start"], 0)[..., None] + jnp.arange(block_size), clean - 1)

    def joined(stored: jax.Array, nothing: Any) -> jax.Array:
        of_blocks = jnp.take_along_axis(stored, slot.reshape(rows, -1, 1), axis=1)
        return jnp.concatenate([jnp.full((rows, clean, width), nothing, stored.dtype), of_blocks], axis=1)

    return joined(batch["top_ids"], 0), joined(batch["top_logprobs"], -jnp.inf)


def _block_weights(blocks: dict[str, jax.Array], gamma: float) -> jax.Array:
    """Weight of each position's cross-entropy [B, C, G]; 0 where there is no label."""
    return jnp.where(blocks["supervised"], blocks["inverse_rate"] * jnp.exp(-blocks["distance"] / gamma), 0.0)


def loss_counts(config: TrainConfig, batch: Batch) -> dict[str, jax.Array]:
    """What the sums of a batch's losses are divided by. They depend on the batch alone, not on the parameters."""
    if config.objective == "ar":
        return {"ar_loss_count": next_token_targets(batch, config.loss.prompt_weight)[1].sum()}
    assert config.mask_token_id is not None  # checked when the run is planned
    blocks = d3d_inputs(batch, config.blocks.block_size, config.mask_token_id)
    weights = _block_weights(blocks, position_decay(config.blocks.block_size, config.loss))
    return {"block_loss_count": weights.sum(), "ar_loss_count": next_token_targets(batch, 0.0)[1].sum()}

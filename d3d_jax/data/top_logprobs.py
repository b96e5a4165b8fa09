"""The target's likeliest tokens at every place of its own responses: what a drafter can be distilled from.

They cost one more pass of the target over each finished response, in the form that training uses; its weights are on
the device a second time meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.config import ModelConfig
from d3d_jax.data.packing import Top
from d3d_jax.models.layers import linear
from d3d_jax.models.qwen3 import Params, forward, head

LENGTH_STEP = 128  # texts are padded to multiples of this, so that few programs serve all lengths
TOKENS_AT_ONCE = 64  # of each text, whose logits exist at one time


class Teacher:
    """The target, to say what it held for likely. `params` are the stacked form."""

    def __init__(self, params: Params, config: ModelConfig, k: int, batch_size: int, device: jax.Device, dtype: Any):
        self._params = jax.device_put(jax.tree.map(lambda w: w.astype(dtype), params), device)
        self._batch_size, self._device = batch_size, device
        self._run = jax.jit(partial(top_logprobs, config=config, k=k))

    def __call__(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[Top]:
        """`texts`: at most `batch_size` of them, token ids and how many of these are the prompt."""
        longest = max(len(ids) for ids, _ in texts)
        tokens = np.zeros((self._batch_size, -(-longest // LENGTH_STEP) * LENGTH_STEP), np.int32)
        for row, (ids, _) in enumerate(texts):
            tokens[row, : len(ids)] = ids
        found_ids, found = jax.device_get(self._run(self._params, jax.device_put(tokens, self._device)))
        # Row i of the output is about token i + 1.
        spans = [slice(prompt - 1, len(ids) - 1) for ids, prompt in texts]
        return [Top(found_ids[row, span], found[row, span]) for row, span in enumerate(spans)]


def top_logprobs(params: Params, tokens_BT: jax.Array, config: ModelConfig, k: int) -> tuple[jax.Array, jax.Array]:
    """The k likeliest next tokens after each token, int32 [B, T, k], and their log-probabilities, float32 [B, T, k]."""
    batch, tokens = tokens_BT.shape
    hidden = forward(params, tokens_BT, config)
    chunk = min(TOKENS_AT_ONCE, tokens)
    pieces = jnp.pad(hidden, ((0, 0), (0, -tokens % chunk), (0, 0))).reshape(batch, -1, chunk, hidden.shape[-1])

    def body(piece: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = linear(piece, head(params)).astype(jnp.float32)
        highest, ids = jax.lax.top_k(logits, k)
        return ids.astype(jnp.int32), highest - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    found = jax.lax.map(body, pieces.swapaxes(0, 1))
    ids, logprobs = (x.swapaxes(0, 1).reshape(batch, -1, k)[:, :tokens] for x in found)
    return ids, logprobs

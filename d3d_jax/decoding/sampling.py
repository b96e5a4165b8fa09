"""How the target chooses a token: greedy, or position-keyed Gumbel-max (docs/algorithm.md 5).

The token at absolute position i is `argmax(filter(logits) / T + g_i)` with `g_i` drawn from the key
`fold_in(seed, i)`. The output is then a function of target and seed alone, whatever drafts were offered,
so sampled decoding is tested by equality.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.config import SamplingParams


class Sampling(NamedTuple):
    """Sampling settings of each row as arrays [B], so that a new setting compiles nothing."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any


def as_columns(params: Sequence[SamplingParams]) -> Sampling | None:
    """Settings of the rows, on the host; None when all are greedy, which is a program of its own and far cheaper."""
    if all(p.temperature == 0 for p in params):
        return None
    return Sampling(
        np.array([p.temperature for p in params], np.float32),
        np.array([p.top_k for p in params], np.int32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        np.array([p.seed for p in params], np.uint32),
    )


def filtered(logits_BTV: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits after temperature, top-k, top-p and min-p, in that order, as transformers defines them.

    Tokens filtered out are -inf. Tokens that tie with the last one kept are kept as well.
    """
    temperature, top_k, top_p, min_p = (field[:, None, None] for field in sampling[:4])
    scaled = logits_BTV / jnp.where(temperature > 0, temperature, 1.0)
    vocabulary = scaled.shape[-1]
    ordered = -jnp.sort(-scaled, axis=-1)
    rank = jnp.arange(vocabulary)
    ordered = jnp.where((top_k == 0) | (rank < top_k), ordered, -jnp.inf)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    kept = ((top_p >= 1) | (before < top_p)) & (probability >= min_p * probability[..., :1]) & (ordered > -jnp.inf)
    last = jnp.sum(kept, axis=-1, keepdims=True) - 1
    threshold = jnp.take_along_axis(ordered, jnp.maximum(last, 0), axis=-1)
    return jnp.where(scaled >= threshold, scaled, -jnp.inf)


def position_noise(seed_B: jax.Array, positions_BT: jax.Array, vocabulary: int) -> jax.Array:
    """g_i of every position: Gumbel noise [B, T, V] that depends on seed and absolute position alone."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocabulary,))

    return jax.vmap(jax.vmap(one, (None, 0)))(seed_B, positions_BT)


def scores(logits_BTV: jax.Array, positions_BT: jax.Array, sampling: Sampling | None) -> jax.Array:
    """What the token at each of the absolute `positions` is the best of, [B, T, V]."""
    if sampling is None:
        return logits_BTV
    noise = position_noise(sampling.seed, positions_BT, logits_BTV.shape[-1])
    drawn = filtered(logits_BTV, sampling) + noise
    return jnp.where(sampling.temperature[:, None, None] > 0, drawn, logits_BTV)


def choose(logits_BTV: jax.Array, positions_BT: jax.Array, sampling: Sampling | None) -> jax.Array:
    """The token at each of the absolute `positions`, int32 [B, T], from the logits that predict it."""
    return jnp.argmax(scores(logits_BTV, positions_BT, sampling), axis=-1).astype(jnp.int32)


def log_probability(logits_BTV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Log-probability of each token under the model's own distribution, unfiltered and at temperature 1; float32."""
    at = jnp.take_along_axis(logits_BTV, tokens_BT[..., None], axis=-1)[..., 0]
    return at - jax.nn.logsumexp(logits_BTV, axis=-1)

"""What a Qwen3 layer computes. Pure functions over dicts of arrays; one `layer` for every use.

Weights keep the checkpoint's `[out, in]` orientation, so that conversion is a renaming. A layer's dict
holds either `q_proj`, `k_proj`, `v_proj` and `gate_proj`, `up_proj`, or the decoding form's `qkv_proj` and
`gate_up_proj`, with every matrix as `[in, out]` (see :func:`for_decoding`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.config import ModelConfig, RopeConfig
from d3d_jax.errors import ConfigError

Weights = Mapping[str, jax.Array]
# (q [B,N,T,H], k [B,K,T,H], v [B,K,T,H]) -> (output [B,N,T,H], whatever the caller wants kept)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class Param(NamedTuple):
    """One parameter: drives initialisation, sharding and restoring alike.

    `axes` names the logical axis of each dimension (`devices.sharding` maps them to mesh axes).
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str  # "normal" or "ones"


class Rotation(NamedTuple):
    """Cosine and sine of the rotary phases, each float32 [B, T, H]; the first half of the sines is negated."""

    cos: jax.Array
    sin: jax.Array


def layer_table(config: ModelConfig) -> dict[str, Param]:
    """The parameters of one layer, without the leading layer axis."""
    width, forward, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    return {
        "input_layernorm": Param((width,), ("embed",), "ones"),
        "q_proj": Param((queries, width), ("heads", "embed"), "normal"),
        "k_proj": Param((keys, width), ("kv_heads", "embed"), "normal"),
        "v_proj": Param((keys, width), ("kv_heads", "embed"), "normal"),
        "o_proj": Param((width, queries), ("embed", "heads"), "normal"),
        "q_norm": Param((head,), ("head_dim",), "ones"),
        "k_norm": Param((head,), ("head_dim",), "ones"),
        "post_attention_layernorm": Param((width,), ("embed",), "ones"),
        "gate_proj": Param((forward, width), ("mlp", "embed"), "normal"),
        "up_proj": Param((forward, width), ("mlp", "embed"), "normal"),
        "down_proj": Param((width, forward), ("embed", "mlp"), "normal"),
    }


def decoding_table(config: ModelConfig) -> dict[str, Param]:
    """The parameters of one layer in the decoding form.

    Columns of `qkv_proj` are the queries, the key and the value of one key head, then those of the next; `gate_up_proj`
    is [in, 2, out]. So a device that has some key heads and a part of the feed-forward has whole triples and pairs.
    """
    width, forward, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    norms = {name: param for name, param in layer_table(config).items() if name.endswith("norm")}
    return {
        **norms,
        "qkv_proj": Param((width, queries + 2 * keys), ("embed", "kv_heads"), "normal"),
        "o_proj": Param((queries, width), ("heads", "embed"), "normal"),
        "gate_up_proj": Param((width, 2, forward), ("embed", "pair", "mlp"), "normal"),
        "down_proj": Param((forward, width), ("mlp", "embed"), "normal"),
    }


def for_decoding(weights: Weights) -> dict[str, jax.Array]:
    """One layer's weights, or a stack of layers' [L, ...], in the form of :func:`decoding_table`."""
    *stack, head = weights["q_norm"].shape
    width = weights["q_proj"].shape[-1]
    heads = [weights[name].reshape(*stack, weights["k_proj"].shape[-2] // head, -1, width) for name in _QKV]
    qkv = jnp.concatenate(heads, axis=-2).reshape(*stack, -1, width)
    pair = jnp.stack([weights["gate_proj"], weights["up_proj"]], axis=-3)
    turned = {"qkv_proj": qkv, "o_proj": weights["o_proj"], "down_proj": weights["down_proj"]}
    return {
        **{name: weight for name, weight in weights.items() if name.endswith("norm")},
        **{name: weight.swapaxes(-1, -2) for name, weight in turned.items()},
        "gate_up_proj": jnp.moveaxis(pair, -1, -3),
    }


_QKV = ("q_proj", "k_proj", "v_proj")


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalise the last axis in float32, cast, then scale: the order transformers uses."""
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normal.astype(x.dtype) * weight.astype(x.dtype)


def linear(x: jax.Array, weight_out_in: jax.Array) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, weight_out_in.astype(x.dtype))


def rope_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies, float32 [H/2], and the factor that scales cosine and sine.

    YaRN after Peng et al. 2023 (arXiv 2309.00071), with the parameters transformers reads.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    frequency = rope.theta**exponent
    if rope.rope_type == "default":
        return (1.0 / frequency).astype(np.float32), 1.0
    if rope.rope_type != "yarn":
        raise ConfigError(f"rope_type {rope.rope_type!r} is not supported; known: default, yarn")

    trained = rope.original_max_position_embeddings or max_position_embeddings

    def mscale(factor: float, slope: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0

    scale = rope.attention_factor
    if scale is None:
        if rope.mscale and rope.mscale_all_dim:
            scale = mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
        else:
            scale = mscale(rope.factor)

    def channel(rotations: float) -> float:
        """The channel pair that turns `rotations` times over the trained context."""
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    keep = 1.0 - ramp  # fast channels keep their frequency, slow ones are stretched by `factor`
    return ((1 - keep) / (rope.factor * frequency) + keep / frequency).astype(np.float32), scale


def rotation(positions_BT: jax.Array, config: ModelConfig) -> Rotation:
    """Rotary phases of the given absolute positions, in float32."""
    inverse, scale = rope_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    angle = positions_BT.astype(jnp.float32)[..., None] * inverse
    cos, sin = jnp.cos(angle) * scale, jnp.sin(angle) * scale
    return Rotation(jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1))


def rotate(x_BTNH: jax.Array, turn: Rotation) -> jax.Array:
    """Apply the rotary embedding, pairing channel i with i + H/2 as Qwen3 does."""
    cos, sin = (part[:, :, None].astype(x_BTNH.dtype) for part in turn)
    # A reversal, not a concatenation of the halves: XLA makes one loop of it, without a branch for each channel.
    halves = x_BTNH.reshape(*x_BTNH.shape[:-1], 2, -1)
    return x_BTNH * cos + halves[..., ::-1, :].reshape(x_BTNH.shape) * sin


def layer(
    weights: Weights, x_BTD: jax.Array, turn: Rotation, config: ModelConfig, attend: Attend
) -> tuple[jax.Array, Any]:
    """One Qwen3 layer: attention with q/k norm before RoPE, then the gated feed-forward.

    `attend` decides what the queries see and where keys and values go (training row, cache, packed pass).
    Returns the new [B, T, D] and whatever `attend` kept.
    """
    batch, tokens, _ = x_BTD.shape
    eps, head = config.rms_norm_eps, config.head_dim
    queries, keys = config.num_attention_heads, config.num_key_value_heads

    normal = rms_norm(x_BTD, weights["input_layernorm"], eps)
    product = jnp.matmul if "qkv_proj" in weights else linear
    if "qkv_proj" in weights:
        # Without the barrier XLA on TPU makes the product head by head, and turns the matrix around for it each time.
        joined = jax.lax.optimization_barrier(product(normal, weights["qkv_proj"]))
        joined = joined.reshape(batch, tokens, keys, -1, head)
        q, k, v = joined[..., :-2, :].reshape(batch, tokens, queries, head), joined[..., -2, :], joined[..., -1, :]
    else:
        q = linear(normal, weights["q_proj"]).reshape(batch, tokens, queries, head)
        k = linear(normal, weights["k_proj"]).reshape(batch, tokens, keys, head)
        v = linear(normal, weights["v_proj"]).reshape(batch, tokens, keys, head)
    q = rotate(rms_norm(q, weights["q_norm"], eps), turn).swapaxes(1, 2)
    k = rotate(rms_norm(k, weights["k_norm"], eps), turn).swapaxes(1, 2)
    output, kept = attend(q, k, v.swapaxes(1, 2))
    x_BTD = x_BTD + product(output.swapaxes(1, 2).reshape(batch, tokens, -1), weights["o_proj"])

    normal = rms_norm(x_BTD, weights["post_attention_layernorm"], eps)
    if "gate_up_proj" in weights:
        joined = jnp.einsum("...i,ico->...co", normal, weights["gate_up_proj"])
        gate, up = joined[..., 0, :], joined[..., 1, :]
    else:
        gate, up = linear(normal, weights["gate_proj"]), linear(normal, weights["up_proj"])
    return x_BTD + product(jax.nn.silu(gate) * up, weights["down_proj"]), kept

"""Qwen3: parameters, and the trunk that target and drafter share.

Two forms of the same parameters. *Stacked*: every layer weight has a leading layer axis and the layers run
under `lax.scan` (training, oracle, pruning). *Decoding*: a list of per-layer dicts, unrolled, with q/k/v and
gate/up joined, made once at load by `for_decoding`. Scanning a stack on a GPU copies each layer's weights out
of it on every step, which decoding cannot afford.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from d3d_jax.config import AttentionConfig, ModelConfig
from d3d_jax.devices.sharding import RULES, constrain, parts, spec
from d3d_jax.models import layers
from d3d_jax.models.attention import AUTO, attend_after, attend_cached, attend_within
from d3d_jax.models.cache import KVCache
from d3d_jax.models.layers import Attend, Param, Rotation, layer, layer_table, linear, rms_norm, rotation
from d3d_kernels import Intervals, causal_intervals, verify_intervals

Params = dict[str, Any]


def parameter_table(config: ModelConfig) -> dict[str, Any]:
    """Every parameter of the stacked form, nested as the parameters are."""
    vocabulary = Param((config.vocab_size, config.hidden_size), ("vocab", "embed"), "normal")
    count = config.num_hidden_layers
    table: dict[str, Any] = {
        "embed_tokens": vocabulary,
        "layers": {
            name: Param((count, *shape), ("layers", *axes), init)
            for name, (shape, axes, init) in layer_table(config).items()
        },
        "norm": Param((config.hidden_size,), ("embed",), "ones"),
    }
    if not config.tie_word_embeddings:
        table["lm_head"] = vocabulary
    return table


def _filled(module: nnx.Module, table: dict[str, Any], rngs: nnx.Rngs, scale: float, dtype: Any) -> None:
    for name, param in table.items():
        if isinstance(param, dict):
            child = nnx.Module()
            _filled(child, param, rngs, scale, dtype)
            setattr(module, name, child)
        elif param.init == "ones":
            setattr(module, name, nnx.Param(jnp.ones(param.shape, dtype)))
        else:
            # Residual writers are scaled down with depth, so that the residual stream starts at one size.
            small = scale / (2 * param.shape[0]) ** 0.5 if name in ("o_proj", "down_proj") else scale
            setattr(module, name, nnx.Param(small * jax.random.normal(rngs.params(), param.shape, dtype)))


class Qwen3(nnx.Module):
    """The model as a module: `Qwen3(config, rngs=nnx.Rngs(0))(tokens)` gives logits [B, T, V].

    Programs work on `nnx.to_pure_dict` of its state (see `init_params`) and never pass the module itself
    through `jit`: walking a module on every call costs milliseconds of host time.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, scale: float = 0.02):
        self.config = config
        _filled(self, parameter_table(config), rngs, scale, dtype)

    def params(self) -> Params:
        """The stacked parameters as a pure dict."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        params = self.params()
        return logits(params, forward(params, tokens_BT, self.config))


def init_params(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Params:
    """Fresh random parameters in the stacked form."""
    return Qwen3(config, rngs=nnx.Rngs(seed), dtype=dtype).params()


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model by shapes alone, tied embeddings counted once."""
    leaves = jax.tree.leaves(parameter_table(config), is_leaf=lambda x: isinstance(x, Param))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def forward(
    params: Params,
    tokens_BT: jax.Array,
    config: ModelConfig,
    *,
    positions_BT: jax.Array | None = None,
    intervals: Intervals | None = None,
    gates_L: jax.Array | None = None,
    dtype: Any = None,
    remat: bool = False,
    attention: AttentionConfig = AUTO,
) -> jax.Array:
    """The stacked form without a cache: final hidden states [B, T, D], normed.

    Args:
        positions_BT: absolute positions; 0, 1, 2... when None.
        intervals: what each row sees; causal when None.
        gates_L: 1 keeps a layer, 0 turns it off without compiling anything again.
        dtype: type of the computation; the parameters' own when None.
        remat: recompute each layer in the backward pass instead of keeping its activations.
    """
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    if intervals is None:
        intervals = causal_intervals(jnp.zeros_like(tokens_BT))
    x = _embedded(params, tokens_BT, dtype)
    turn, attend = rotation(positions_BT, config), attend_within(intervals, attention)

    def body(x: jax.Array, scanned: tuple) -> tuple[jax.Array, None]:
        return _gated_layer(scanned, x, turn, config, attend)[0], None

    body = jax.checkpoint(body) if remat else body
    x, _ = jax.lax.scan(body, x, (params["layers"], gates_L))
    return rms_norm(x, params["norm"], config.rms_norm_eps)


def keys_and_values(
    params: Params,
    tokens_BT: jax.Array,
    config: ModelConfig,
    *,
    positions_BT: jax.Array,
    intervals: Intervals,
    gates_L: jax.Array | None = None,
    dtype: Any = None,
    attention: AttentionConfig = AUTO,
) -> tuple[jax.Array, jax.Array]:
    """What :func:`forward` of these tokens leaves for later ones to see: keys and values, each [L, B, K, T, H]."""
    turn, attend = rotation(positions_BT, config), attend_within(intervals, attention, keep=True)
    x = _embedded(params, tokens_BT, dtype)
    return jax.lax.scan(
        lambda x, scanned: _gated_layer(scanned, x, turn, config, attend), x, (params["layers"], gates_L)
    )[1]


def forward_after(
    params: Params,
    tokens_BT: jax.Array,
    context: tuple[jax.Array, jax.Array],
    config: ModelConfig,
    *,
    positions_BT: jax.Array,
    intervals: Intervals,
    gates_L: jax.Array | None = None,
    dtype: Any = None,
    attention: AttentionConfig = AUTO,
) -> jax.Array:
    """:func:`forward` of tokens that may also see those of an earlier pass.

    Args:
        context: keys and values [L, B, K, S, H] of :func:`keys_and_values`.
        intervals: of each row, over the S slots of the context and then the T of these tokens.
    """
    turn = rotation(positions_BT, config)

    def body(x: jax.Array, scanned: tuple) -> tuple[jax.Array, None]:
        layer_and_gate, (k, v) = scanned
        return _gated_layer(layer_and_gate, x, turn, config, attend_after(k, v, intervals, attention))[0], None

    x, _ = jax.lax.scan(body, _embedded(params, tokens_BT, dtype), ((params["layers"], gates_L), context))
    return rms_norm(x, params["norm"], config.rms_norm_eps)


def _embedded(params: Params, tokens_BT: jax.Array, dtype: Any) -> jax.Array:
    x = constrain(params["embed_tokens"], "vocab", None)[tokens_BT]
    return constrain(x if dtype is None else x.astype(dtype), "batch", None, None)


def _gated_layer(scanned: tuple, x: jax.Array, turn: Rotation, config: ModelConfig, attend: Attend) -> tuple:
    """One layer of the stack, switched by its gate if there is one, and whatever `attend` kept."""
    weights, gate = scanned
    after, kept = layer(weights, x, turn, config, attend)
    after = constrain(after, "batch", None, None)
    return (after if gate is None else x + gate.astype(x.dtype) * (after - x)), kept


def head(params: Params) -> jax.Array:
    """The output matrix [V, D]: `lm_head`, or the embedding when tied."""
    return params.get("lm_head", params["embed_tokens"])


def logits(params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """[B, T, V] in float32."""
    return linear(hidden_BTD, head(params)).astype(jnp.float32)


def for_decoding(params: Params, dtype: Any = None) -> Params:
    """The decoding form: `layers` becomes a list of per-layer dicts of joined projections, matrices as [in, out].

    So a product reads its weights row by row: on CPU a block of 8 tokens takes three quarters of the time.
    """
    stacked = layers.for_decoding(params["layers"])
    count = stacked["input_layernorm"].shape[0]
    decoding = {**params, "layers": [{name: w[i] for name, w in stacked.items()} for i in range(count)]}
    return decoding if dtype is None else jax.tree.map(lambda w: w.astype(dtype), decoding)


def decoding_table(config: ModelConfig) -> dict[str, Any]:
    """Every parameter of the decoding form, nested as the parameters are."""
    each = layers.decoding_table(config)
    return {**parameter_table(config), "layers": [each] * config.num_hidden_layers}


def embed(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Embeddings [B, T, D]. Where the table's rows lie on several devices, each adds those that it has.

    Left to the compiler, a single token would have every device gather the whole table.
    """
    axis = RULES["vocab"]
    if parts("vocab") == 1:
        return table_VD[tokens_BT]

    def own(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        row = tokens_BT - jax.lax.axis_index(axis) * table_VD.shape[0]
        here = (row >= 0) & (row < table_VD.shape[0])
        return jax.lax.psum(jnp.where(here[..., None], table_VD[jnp.where(here, row, 0)], 0), axis)

    everywhere = PartitionSpec()
    return jax.shard_map(own, in_specs=(spec(("vocab", None)), everywhere), out_specs=everywhere)(table_VD, tokens_BT)


def cached_forward(
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    intervals: Intervals,
    cache: KVCache,
    num_clean: int,
    config: ModelConfig,
    attention: AttentionConfig = AUTO,
    slot: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """The decoding form over a cache: normed hidden states [B, T, D] and the cache with new slots.

    The first `num_clean` tokens are written at each row's length; the length itself is left to the caller,
    who knows how many of them are to stay. With `slot`, the tokens [1, T] are of that row of the cache alone.
    """
    x = embed(params["embed_tokens"], tokens_BT)
    turn = rotation(positions_BT, config)
    start, slots = cache.lengths(slot), []
    for weights, k, v in zip(params["layers"], cache.k, cache.v, strict=True):
        attend = attend_cached(k, v, start, num_clean, intervals, attention, slot)
        x, kept = layer(weights, x, turn, config, attend)
        slots.append(kept)
    keys, values = zip(*slots, strict=True)
    return rms_norm(x, params["norm"], config.rms_norm_eps), KVCache(keys, values, cache.length)


def append(
    params: Params,
    tokens_BT: jax.Array,
    cache: KVCache,
    config: ModelConfig,
    attention: AttentionConfig = AUTO,
    slot: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """T further tokens after each row's length: hidden [B, T, D] and the cache, its length unchanged.

    With `slot`, tokens [1, T] of that row alone.
    """
    num_tokens, start = tokens_BT.shape[1], cache.lengths(slot)
    positions = start[:, None] + jnp.arange(num_tokens)
    intervals = verify_intervals(start, num_tokens)
    return cached_forward(params, tokens_BT, positions, intervals, cache, num_tokens, config, attention, slot)

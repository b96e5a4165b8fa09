"""Models and settings where a mode needs them: the target on its device, the drafter on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from d3d_jax.config import AttentionConfig, DecodeConfig, DrafterConfig, MeshConfig, ModelConfig, SamplingParams
from d3d_jax.decoding.programs import Drafting
from d3d_jax.decoding.sampling import Sampling, as_columns
from d3d_jax.decoding.scripted import Script
from d3d_jax.decoding.state import Stop
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.devices.sharding import replicated, spec, tree_shardings
from d3d_jax.errors import CapacityError, CompatibilityError
from d3d_jax.models.attention import AUTO, DECODE, resolve_attention
from d3d_jax.models.cache import KVCache, empty_cache
from d3d_jax.models.qwen3 import Params, decoding_table, for_decoding

STOP_IDS = 8  # a row's stop ids are padded to a multiple of this
NO_TOKEN = -1


@dataclass(frozen=True)
class Model:
    """A model as loaded: its shape, its stacked parameters, and, for a drafter, its block format.

    script: what a drafter drafts in place of its own tokens, for tests and measurements; of the engine's rows.
    """

    config: ModelConfig
    params: Params
    drafter: DrafterConfig | None = None
    script: Script | None = None


Devices = jax.Device | Sequence[jax.Device]
"""Of one model: a single one, or several that its matrices are split over."""


@dataclass(frozen=True)
class Side:
    """One model on its device or devices, in the decoding form.

    home: where small arrays go, such as tokens: the device, or whole on each of several.
    """

    config: ModelConfig
    params: Params
    home: jax.Device | NamedSharding
    max_len: int
    dtype: Any
    attention: AttentionConfig = AUTO

    @classmethod
    def place(cls, model: Model, devices: Devices, max_len: int, dtype: Any, attention: AttentionConfig = AUTO) -> Side:
        """Raises CompatibilityError when the model cannot be split over so many devices."""
        several = as_devices(devices)
        params = for_decoding(model.params, dtype)
        if len(several) == 1:
            return cls(model.config, jax.device_put(params, several[0]), several[0], max_len, dtype, attention)
        check_split(model.config, len(several))
        mesh = make_mesh(MeshConfig(1, 1, len(several)), several)
        params = jax.device_put(params, tree_shardings(mesh, decoding_table(model.config)))
        return cls(model.config, params, replicated(mesh), max_len, dtype, attention)

    def fixed(self) -> dict[str, Any]:
        """What the target's programs are compiled for."""
        return {"config": self.config, "attention": self.attention}

    def cache(self, batch: int) -> KVCache:
        empty = empty_cache(self.config, batch, self.max_len, self.dtype)
        if not isinstance(self.home, NamedSharding):
            return jax.device_put(empty, self.home)
        return jax.device_put(empty, _layout(empty, self.home))

    def compiled(self, function: Callable, **options: Any) -> Callable:
        """`jax.jit(function, **options)` for this side's programs.

        On several devices caches stay split by their heads and everything else is whole on each of them, so that what
        one program gives is laid out as the next one takes it, and nothing is compiled twice.
        """
        home = self.home
        if not isinstance(home, NamedSharding):
            return jax.jit(function, **options)

        @wraps(function)
        def laid_out(*args: Any, **kwargs: Any) -> Any:
            results = function(*args, **kwargs)
            return jax.lax.with_sharding_constraint(results, _layout(results, home))

        program, mesh = jax.jit(laid_out, **options), cast(Mesh, home.mesh)

        def call(*args: Any, **kwargs: Any) -> Any:
            with jax.set_mesh(mesh):
                return program(*args, **kwargs)

        return call


def as_devices(devices: Devices) -> tuple[jax.Device, ...]:
    return (devices,) if isinstance(devices, jax.Device) else tuple(devices)


def check_split(config: ModelConfig, parts: int, name: str = "the model") -> None:
    """Refuse a model whose heads, matrices or vocabulary do not come out even over `parts` devices.

    Raises:
        CompatibilityError: naming all that do not.
    """
    fields = ("num_key_value_heads", "num_attention_heads", "intermediate_size", "vocab_size")
    uneven = [f"{field}={getattr(config, field)}" for field in fields if getattr(config, field) % parts]
    if uneven:
        raise CompatibilityError(
            f"{name} cannot be split over {parts} devices: {', '.join(uneven)} must be a multiple of {parts}; "
            "use fewer devices for it"
        )


def _layout(tree: Any, home: NamedSharding) -> Any:
    """Caches by heads, the rest whole on each device."""
    by_heads: Any = NamedSharding(home.mesh, spec((None, "kv_heads")))
    whole: Any = home

    def place(node: Any) -> Any:
        if not isinstance(node, KVCache):
            return whole
        return KVCache(tuple(by_heads for _ in node.k), tuple(by_heads for _ in node.v), whole)

    return jax.tree.map(place, tree, is_leaf=lambda node: isinstance(node, KVCache))


@dataclass(frozen=True)
class Placed:
    """Target and drafter on their devices, for `rows` rows; without a drafter only mode `ar` can run."""

    target: Side
    drafter: Side | None
    how: Drafting | None
    decode: DecodeConfig
    rows: int

    def drafting(self) -> tuple[Side, Drafting]:
        """The drafter's side. Raises CompatibilityError without one."""
        if self.drafter is None or self.how is None:
            raise CompatibilityError(f"mode {self.decode.mode!r} needs a drafter; give one, or use mode 'ar'")
        return self.drafter, self.how


class Settings:
    """What ends and samples each row: kept on the host, copied to a side's `home` when it has changed."""

    def __init__(self, rows: int):
        self._params = [SamplingParams()] * rows
        self._ids = np.full((rows, STOP_IDS), NO_TOKEN, np.int32)
        self._limit = np.zeros(rows, np.int32)
        self._copies: dict[Any, Any] = {}

    def set_row(self, slot: int, params: SamplingParams, stop_ids: Sequence[int], limit: int) -> None:
        """`limit`: tokens of prompt and output together."""
        # Few or many stop ids must not be a program each: fill up with an id that is no token's.
        width = max(self._ids.shape[1], -(-len(stop_ids) // STOP_IDS) * STOP_IDS)
        wider = ((0, 0), (0, width - self._ids.shape[1]))
        # New arrays, since a device may still read from the old ones.
        self._ids, self._limit = np.pad(self._ids, wider, constant_values=NO_TOKEN), self._limit.copy()
        self._ids[slot] = NO_TOKEN
        self._ids[slot, : len(stop_ids)] = stop_ids
        self._limit[slot] = limit
        self._params[slot] = params
        self._copies.clear()

    def free_row(self, slot: int) -> None:
        """A free row is greedy, so that it asks for no program that samples."""
        if self._params[slot].temperature:
            self._params[slot] = SamplingParams()
            self._copies.clear()

    def sampling(self, device: Any) -> Sampling | None:
        """None when every row is greedy."""
        return self._copy("sampling", device, lambda: as_columns(self._params))

    def stop(self, device: Any) -> Stop:
        return self._copy("stop", device, lambda: Stop(self._ids, self._limit))  # pyright: ignore[reportArgumentType]

    def _copy(self, name: str, device: Any, make: Callable[[], Any]) -> Any:
        if (name, device) not in self._copies:
            self._copies[name, device] = jax.device_put(make(), device)
        return self._copies[name, device]


def attention_of(config: ModelConfig, decode: DecodeConfig, device: jax.Device, dtype: Any) -> AttentionConfig:
    """What computes a model's attention on its device.

    Raises:
        CompatibilityError: for a backend that cannot.
    """
    return resolve_attention(decode.attention, DECODE, config, dtype, device)


def check_pair(target: Model, drafter: Model | None, decode: DecodeConfig, num_token_ids: int) -> None:
    """Refuse a pair and settings that do not go together.

    Raises:
        CompatibilityError: naming what does not fit.
    """
    rows = target.config.vocab_size
    if not 0 < num_token_ids <= rows:
        raise CompatibilityError(f"the tokenizer has {num_token_ids} ids, but the target's embedding has {rows} rows")
    if decode.mode == "ar":
        return
    if drafter is None or drafter.drafter is None:
        found = "no drafter" if drafter is None else "a model without d3d_config"
        raise CompatibilityError(
            f"mode {decode.mode!r} needs a trained drafter, but there is {found}; or use mode 'ar'"
        )
    if drafter.config.vocab_size != rows:
        raise CompatibilityError(
            f"target and drafter have {rows} and {drafter.config.vocab_size} vocabulary rows; they must share one "
            "tokenizer (to pad a checkpoint's vocabulary on purpose: d3d convert --pad-vocab-to)"
        )
    if decode.num_candidates >= num_token_ids:
        raise CompatibilityError(
            f"candidates={decode.num_candidates}, but the tokenizer has {num_token_ids} ids, one of which was drafted"
        )
    if decode.block_size != drafter.drafter.block_size:
        raise CompatibilityError(
            f"block_size={decode.block_size}, but the drafter was trained for {drafter.drafter.block_size}; "
            f"use --block-size {drafter.drafter.block_size}"
        )


def check_prompt(
    name: str, prompt: Sequence[int], max_tokens: int | None, config: ModelConfig, slots_past_end: int, max_len: int
) -> int:
    """How many new tokens a prompt may get: what was asked for, or all that there is room for.

    Raises:
        CapacityError: naming a prompt that is malformed or would run over the cache or the model's context.
    """
    if not len(prompt):
        raise CapacityError(f"{name} is empty; a prompt is at least one token")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= config.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise CapacityError(f"{name} holds id {wrong}, outside the vocabulary of {config.vocab_size}")
    limit = min(config.max_position_embeddings, max_len - slots_past_end)
    text = len(prompt) + (max_tokens or 1)
    if text > limit:
        asked = f"; with max_tokens={max_tokens} that is {text}" if max_tokens else ""
        raise CapacityError(
            f"{name} has {len(prompt)} tokens{asked}, and there is room for {limit}; "
            "shorten the prompt, lower max_tokens or raise max_len"
        )
    return max_tokens or limit - len(prompt)

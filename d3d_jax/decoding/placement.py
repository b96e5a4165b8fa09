"""Models and settings where a mode needs them: the target on its device, the drafter on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from d3d_jax.config import AttentionConfig, DecodeConfig, DrafterConfig, ModelConfig, SamplingParams
from d3d_jax.decoding.programs import Drafting
from d3d_jax.decoding.sampling import Sampling, as_columns
from d3d_jax.decoding.state import Stop
from d3d_jax.errors import CapacityError, CompatibilityError
from d3d_jax.models.attention import AUTO, DECODE, resolve_attention
from d3d_jax.models.cache import KVCache, empty_cache
from d3d_jax.models.qwen3 import Params, for_decoding

STOP_IDS = 8  # a row's stop ids are padded to a multiple of this
NO_TOKEN = -1


@dataclass(frozen=True)
class Model:
    """A model as loaded: its shape, its stacked parameters, and, for a drafter, its block format."""

    config: ModelConfig
    params: Params
    drafter: DrafterConfig | None = None


@dataclass(frozen=True)
class Side:
    """One model on its device, in the decoding form."""

    config: ModelConfig
    params: Params
    device: jax.Device
    max_len: int
    dtype: Any
    attention: AttentionConfig = AUTO

    @classmethod
    def place(
        cls, model: Model, device: jax.Device, max_len: int, dtype: Any, attention: AttentionConfig = AUTO
    ) -> Side:
        params = jax.device_put(for_decoding(model.params, dtype), device)
        return cls(model.config, params, device, max_len, dtype, attention)

    def fixed(self) -> dict[str, Any]:
        """What the target's programs are compiled for."""
        return {"config": self.config, "attention": self.attention}

    def cache(self, batch: int) -> KVCache:
        return jax.device_put(empty_cache(self.config, batch, self.max_len, self.dtype), self.device)


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
    """What ends and samples each row: kept on the host, copied to a device when it has changed."""

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

    def sampling(self, device: jax.Device) -> Sampling | None:
        """None when every row is greedy."""
        return self._copy("sampling", device, lambda: as_columns(self._params))

    def stop(self, device: jax.Device) -> Stop:
        return self._copy("stop", device, lambda: Stop(self._ids, self._limit))  # pyright: ignore[reportArgumentType]

    def _copy(self, name: str, device: jax.Device, make: Callable[[], Any]) -> Any:
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

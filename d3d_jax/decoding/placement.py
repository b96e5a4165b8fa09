"""Models and prompts where a mode needs them: the target on its device, the drafter on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from d3d_jax.config import DecodeConfig, DrafterConfig, ModelConfig, SamplingParams
from d3d_jax.decoding.programs import Drafting
from d3d_jax.decoding.sampling import Sampling, to_device
from d3d_jax.decoding.state import Stop
from d3d_jax.errors import CapacityError, CompatibilityError
from d3d_jax.models.cache import KVCache, empty_cache
from d3d_jax.models.qwen3 import Params, for_decoding

BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # padded prompt lengths that get a program
STOP_IDS = 8  # stop ids are padded to a multiple of this


@dataclass(frozen=True)
class Model:
    """A model as loaded: its shape, its stacked parameters, and, for a drafter, its block format."""

    config: ModelConfig
    params: Params
    drafter: DrafterConfig | None = None


class PromptBatch(NamedTuple):
    """Prompts padded to one bucket, with what ends and samples each row; on one device.

    tokens int32 [B, P], lengths int32 [B]; `sampling` is None when every row is greedy.
    """

    tokens: jax.Array
    lengths: jax.Array
    sampling: Sampling | None
    stop: Stop


@dataclass(frozen=True)
class Side:
    """One model on its device, in the decoding form."""

    config: ModelConfig
    params: Params
    device: jax.Device
    max_len: int
    dtype: Any

    @classmethod
    def place(cls, model: Model, device: jax.Device, max_len: int, dtype: Any) -> Side:
        params = jax.device_put(for_decoding(model.params, dtype), device)
        return cls(model.config, params, device, max_len, dtype)

    def cache(self, batch: int) -> KVCache:
        return jax.device_put(empty_cache(self.config, batch, self.max_len, self.dtype), self.device)


@dataclass(frozen=True)
class Placed:
    """Target and drafter on their devices; without a drafter only mode `ar` can run."""

    target: Side
    drafter: Side | None
    how: Drafting | None
    decode: DecodeConfig

    def drafting(self) -> tuple[Side, Drafting]:
        """The drafter's side. Raises CompatibilityError without one."""
        if self.drafter is None or self.how is None:
            raise CompatibilityError(f"mode {self.decode.mode!r} needs a drafter; give one, or use mode 'ar'")
        return self.drafter, self.how


def bucket(length: int, max_len: int) -> int:
    """The padded length of a prompt: the next bucket, or the whole cache."""
    return min(next((size for size in BUCKETS if size >= length), max_len), max_len)


def prompt_batch(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sequence[SamplingParams],
    side: Side,
) -> PromptBatch:
    """The prompts on the device of `side`."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), bucket(int(lengths.max()), side.max_len)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    # Few or many stop ids must not be a program each: fill up with an id that is no token's.
    ids = np.full(max(STOP_IDS, -(-len(stop_ids) // STOP_IDS) * STOP_IDS), -1, np.int32)
    ids[: len(stop_ids)] = stop_ids
    limit = lengths + np.int32(max_new_tokens)
    placed, lengths, ids, limit = jax.device_put((tokens, lengths, ids, limit), side.device)
    return PromptBatch(placed, lengths, to_device(sampling, side.device), Stop(ids, limit))


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
    if decode.block_size != drafter.drafter.block_size:
        raise CompatibilityError(
            f"block_size={decode.block_size}, but the drafter was trained for {drafter.drafter.block_size}; "
            f"use --block-size {drafter.drafter.block_size}"
        )


def check_request(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, config: ModelConfig, slots_past_end: int, max_len: int
) -> None:
    """Refuse a request that is malformed or would run over the cache or the model's context.

    Raises:
        CapacityError: naming the prompt.
    """
    if not prompts or max_new_tokens < 1:
        raise CapacityError(f"{len(prompts)} prompts, max_new_tokens={max_new_tokens}; both must be at least 1")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise CapacityError(f"prompt {number} is empty; a prompt is at least one token")
        lowest, highest = min(prompt), max(prompt)
        if lowest < 0 or highest >= config.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise CapacityError(f"prompt {number} holds id {wrong}, outside the vocabulary of {config.vocab_size}")
        text = len(prompt) + max_new_tokens
        if text > config.max_position_embeddings or text + slots_past_end > max_len:
            limit = min(config.max_position_embeddings, max_len - slots_past_end)
            raise CapacityError(
                f"prompt {number} has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} that is {text}, and "
                f"there is room for {limit}; shorten the prompt, lower max_new_tokens or raise max_len"
            )

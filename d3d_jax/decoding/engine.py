"""The engine: a pair of models on their devices, decoding prompts in one mode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from d3d_jax.config import DecodeConfig, SamplingParams
from d3d_jax.decoding.asynchronous import Asynchronous
from d3d_jax.decoding.autoregressive import Autoregressive
from d3d_jax.decoding.observer import Observer, StepByStep
from d3d_jax.decoding.placement import Model, Placed, Side, bucket, check_pair, check_request, prompt_batch
from d3d_jax.decoding.programs import Drafting
from d3d_jax.decoding.state import Completion
from d3d_jax.decoding.synchronous import Synchronous
from d3d_jax.models.cache import slots_past_end

MODES = {"ar": Autoregressive, "sync": Synchronous, "async": Asynchronous}


class Engine:
    """Decodes prompts in one mode; every mode gives the target's own tokens.

    Args:
        target, drafter: the models; the drafter may be None for mode `ar`.
        decode: mode, block size and policies.
        devices: of target and drafter; the same device twice is one device.
        max_len: cache slots per row: prompt, new tokens, and two blocks.
        num_token_ids: ids that the tokenizer knows; the drafter offers no others.

    Raises:
        CompatibilityError: before any device work, for a pair and settings that do not go together.
    """

    def __init__(
        self,
        target: Model,
        drafter: Model | None,
        decode: DecodeConfig,
        *,
        devices: tuple[jax.Device, jax.Device],
        max_len: int,
        num_token_ids: int,
        dtype: Any = jnp.float32,
    ):
        check_pair(target, drafter, decode, num_token_ids)
        self.decode, self.max_len = decode, max_len
        side, how = None, None
        if decode.mode != "ar" and drafter is not None and drafter.drafter is not None:
            side = Side.place(drafter, devices[1], max_len, dtype)
            how = Drafting(drafter.config, drafter.drafter, decode, num_token_ids)
        self._placed = Placed(Side.place(target, devices[0], max_len, dtype), side, how, decode)
        self._run = MODES[decode.mode](self._placed)
        self._past_end = slots_past_end(1 if decode.mode == "ar" else decode.block_size)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: Sequence[int],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        observer: Observer | None = None,
    ) -> list[Completion]:
        """Decode the prompts as one batch.

        Args:
            prompts: token ids, one or more a prompt.
            max_new_tokens: most tokens after each prompt.
            stop_ids: ids that end a row; the stop token is part of the output.
            sampling: one setting for all rows, or one each; the engine's own when None.
            observer: sees every program that a loop launches.

        Raises:
            CapacityError: before any device work, for a prompt that is malformed or does not fit.
        """
        target = self._placed.target
        check_request(prompts, max_new_tokens, target.config, self._past_end, self.max_len)
        sampling = sampling or self.decode.sampling
        rows = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        batch = prompt_batch(prompts, max_new_tokens, stop_ids, rows, target)
        if observer is None:
            observer = StepByStep() if self.decode.step_by_step else Observer()
        decoded = self._run(batch, observer)
        stops = set(stop_ids)
        completions = []
        for prompt, tokens, rounds in zip(prompts, decoded.tokens, decoded.rounds, strict=True):
            tokens = tokens[:max_new_tokens]
            end = next((at + 1 for at, token in enumerate(tokens) if token in stops), None)
            completions.append(
                Completion(
                    tuple(prompt),
                    tuple(tokens[:end]),
                    "length" if end is None else "stop",
                    rounds,
                    decoded.prefill_s,
                    decoded.decode_s,
                )
            )
        return completions

    def warm_up(self, prompt_lengths: Sequence[int], sampling: SamplingParams | None = None, batch: int = 1) -> float:
        """Compile every program for prompts of these lengths; returns the seconds it took."""
        begin = time.perf_counter()
        longest = self.max_len - self._past_end - 3
        for size in sorted({bucket(length, self.max_len) for length in prompt_lengths}):
            self.generate([[0] * min(size, longest)] * batch, 3, [], sampling)
        return time.perf_counter() - begin

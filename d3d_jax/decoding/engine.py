"""The engine: a pair of models on their devices, decoding many prompts at once in one mode."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from d3d_jax.config import DecodeConfig, SamplingParams, from_mapping
from d3d_jax.decoding.asynchronous import Asynchronous
from d3d_jax.decoding.autoregressive import Autoregressive
from d3d_jax.decoding.loading import open_pair, sampling_defaults
from d3d_jax.decoding.observer import Observer, StepByStep
from d3d_jax.decoding.placement import Devices, Model, Placed, Side, as_devices, attention_of, check_pair, check_prompt
from d3d_jax.decoding.policies import Tactic
from d3d_jax.decoding.programs import Drafting
from d3d_jax.decoding.prompt_chunks import one_of_each_size
from d3d_jax.decoding.request import Request
from d3d_jax.decoding.scheduler import Scheduler
from d3d_jax.decoding.state import Completion
from d3d_jax.decoding.synchronous import Synchronous
from d3d_jax.decoding.text import Piece
from d3d_jax.devices.host import device_pair
from d3d_jax.errors import CapacityError, CompatibilityError
from d3d_jax.models.cache import slots_past_end

MODES = {"ar": Autoregressive, "sync": Synchronous, "async": Asynchronous}
Prompt = str | Sequence[int]


class Engine:
    """Decodes prompts in one mode; every mode gives the target's own tokens, whatever else it decodes beside them.

    Args:
        target, drafter: the models; the drafter may be None for mode `ar`.
        decode: mode, block size and policies.
        devices: of target and drafter; the same device twice is one device. Several of one model, as a list, split its
            matrices and its cache between them (tensor parallelism).
        max_len: cache slots of each row: prompt, new tokens, and two blocks.
        max_batch: rows, the prompts that are decoded at one time; more wait for their turn.
        num_token_ids: ids that the tokenizer knows; the drafter offers no others.
        stop_ids: ids that end every output, unless its settings say `ignore_eos`.
        tokenizer: for prompts, stop texts and output as text; without one all is ids.

    Raises:
        CompatibilityError: before any device work, for a pair and settings that do not go together.
    """

    def __init__(
        self,
        target: Model,
        drafter: Model | None,
        decode: DecodeConfig,
        *,
        devices: tuple[Devices, Devices],
        max_len: int,
        num_token_ids: int,
        max_batch: int = 1,
        stop_ids: Sequence[int] = (),
        tokenizer: Any = None,
        dtype: Any = jnp.float32,
    ):
        check_pair(target, drafter, decode, num_token_ids)
        dtype = jnp.dtype(dtype)
        attention = attention_of(target.config, decode, as_devices(devices[0])[0], dtype)
        if max_batch < 1:
            raise CapacityError(f"max_batch={max_batch}; an engine has at least one row")
        self.decode, self.max_len, self.max_batch = decode, max_len, max_batch
        self.tokenizer = tokenizer
        self._stop_ids, self._config = tuple(stop_ids), target.config
        side, how = None, None
        if decode.mode != "ar" and drafter is not None and drafter.drafter is not None:
            draft_attention = attention_of(drafter.config, decode, as_devices(devices[1])[0], dtype)
            side = Side.place(drafter, devices[1], max_len, dtype, draft_attention)
            how = Drafting(drafter.config, drafter.drafter, decode, num_token_ids, draft_attention, drafter.script)
        placed = Placed(Side.place(target, devices[0], max_len, dtype, attention), side, how, decode, max_batch)
        plain = (lambda: Autoregressive(placed)) if side and decode.on_draft_failure != "error" else None
        self._scheduler = Scheduler(
            lambda: MODES[decode.mode](placed),
            max_batch,
            max_len,
            decode.lookahead,
            plain,
            decode.stall_s,
            try_again=decode.on_draft_failure == "retry",
        )
        self._lock = threading.Lock()  # streams of several threads share the rows
        self._past_end = slots_past_end(1 if decode.mode == "ar" else decode.block_size)
        self._drafter_context = how.model.max_position_embeddings if how else max_len

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        mode: str | None = None,
        devices: tuple[Devices, Devices] | None = None,
        block_size: int | None = None,
        max_batch: int = 1,
        max_len: int | None = None,
        dtype: str = "float32",
        attention_backend: str = "auto",
        **policies: Any,
    ) -> Engine:
        """An engine from model folders.

        Args:
            target, draft: Hugging Face folders; without a drafter the target decodes alone.
            mode: `ar`, `sync` or `async`; the last where there is a drafter.
            devices: of target and drafter; the best two there are when None.
            block_size: the drafter's own when None.
            max_len: cache slots of each row; when None, the target's context or 4,096 tokens, whichever is less.
            attention_backend: what computes attention, one of `d3d_kernels.BACKENDS`, used or refused; `auto` is that
                of each model's device. Short for the policy `attention={"backend": ...}`.
            policies: further fields of :class:`DecodeConfig`. The default sampling is the target's own, from its
                generation_config.json.

        Raises:
            CheckpointError, ConfigError, CompatibilityError: before a tensor is read.
        """
        pair = open_pair(target, draft, block_size=block_size)
        mode = mode or ("async" if draft else "ar")
        size = {} if pair.block_size is None else {"block_size": pair.block_size}
        attention = {"attention": {"backend": attention_backend}}
        decode = from_mapping(DecodeConfig, {"mode": mode, **size, **attention, **policies})
        if "sampling" not in policies:
            decode = replace(decode, sampling=sampling_defaults(target))
        if max_len is None:
            max_len = min(pair.target.config.max_position_embeddings, 4096) + slots_past_end(decode.block_size)
        devices = devices or device_pair(None)
        pair.check_devices(decode, devices, dtype)
        loaded = pair.load(dtype)
        return cls(
            loaded.target,
            None if mode == "ar" else loaded.drafter,
            decode,
            devices=devices,
            max_len=max_len,
            num_token_ids=loaded.num_token_ids,
            max_batch=max_batch,
            stop_ids=loaded.stop_ids,
            tokenizer=loaded.tokenizer,
            dtype=jnp.dtype(dtype),
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        observer: Observer | None = None,
        on_completion: Callable[[int, Completion], None] = lambda number, completion: None,
    ) -> list[Completion]:
        """Decode prompts, texts or token ids.

        Args:
            params: one setting for all prompts, or one each; the engine's own when None.
            observer: sees every program that is launched.
            on_completion: called with a prompt's number as soon as it is done, in whatever order that is.

        Returns:
            The completions in the order of the prompts.

        Raises:
            CapacityError: before any device work, for a prompt that is malformed or does not fit.
        """
        if not prompts:
            raise CapacityError("there are 0 prompts; give at least one")
        settings = params if params is not None else self.decode.sampling
        each = [settings] * len(prompts) if isinstance(settings, SamplingParams) else list(settings)
        if len(each) != len(prompts):
            raise CapacityError(f"there are {len(prompts)} prompts and {len(each)} settings; give one for all or each")
        asked = enumerate(zip(prompts, each, strict=True))
        requests = [self._request(f"prompt {number}", prompt, setting) for number, (prompt, setting) in asked]
        with self._lock:
            for request in requests:  # only now: a prompt that is refused leaves none of the others behind
                self._scheduler.submit(request)
        unfinished = dict(enumerate(requests))
        try:
            while unfinished:
                self.step(observer)
                for number in [number for number, request in unfinished.items() if request.finished]:
                    on_completion(number, unfinished.pop(number).completion())
        finally:
            for request in unfinished.values():
                self.cancel(request)
        return [request.completion() for request in requests]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        name: str = "the prompt",
        *,
        listens: bool = False,
    ) -> Request:
        """Queue a prompt beside others; `step` until it is `finished`. For callers that feed the engine as they go.

        With `listens`, somebody wants the text as it comes, so that no launch runs long.

        Raises:
            CapacityError: for a prompt that is malformed or does not fit; `name` is what the error calls it.
        """
        request = self._request(name, prompt, params or self.decode.sampling, listens)
        with self._lock:
            self._scheduler.submit(request)
        return request

    @property
    def idle(self) -> bool:
        """Nothing is under way and nothing waits."""
        return self._scheduler.idle

    def rates(self) -> dict[Tactic, float]:
        """Tokens a second, all rows together, of the tactics among which an `auto` setting chooses."""
        return self._scheduler.rates()

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        with self._lock:
            self._scheduler.cancel(request)

    def step(self, observer: Observer | None = None) -> None:
        """One launch for all rows under way, at most one chunk of a prompt, and the reading of what is due."""
        if observer is None:
            observer = StepByStep() if self.decode.step_by_step else Observer()
        with self._lock:
            self._scheduler.step(observer)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Piece, None, None]:
        """Decode one prompt and give its text piece by piece; closing the iterator cancels the request.

        Several streams may be read in turns: each step advances all of them.

        Raises:
            CompatibilityError: where the engine has no tokenizer.
        """
        if self.tokenizer is None:
            raise CompatibilityError("streaming gives text; make the engine with its tokenizer")
        return self._pieces(self.submit(prompt, params, listens=True))

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Piece]:
        """As :meth:`stream`, for many at a time in one event loop, which is never held up."""
        stream = self.stream(prompt, params)
        try:
            while (piece := await asyncio.to_thread(next, stream, None)) is not None:
                yield piece
        finally:
            stream.close()

    def warm_up(
        self,
        prompt_lengths: Sequence[int] | None = None,
        params: Sequence[SamplingParams] | None = None,
        advance: Callable[[], None] = lambda: None,
    ) -> float:
        """Compile every program, so that none is compiled in service; returns the seconds it took.

        Args:
            prompt_lengths: lengths that will occur; None for any.
            params: settings that will occur; None for any. Greedy decoding has programs of its own.
            advance: called after each of the `warm_up_steps`.
        """
        begin = time.perf_counter()
        with self._scheduler.rehearsal() as rounds:
            for length, setting in self._warm_ups(prompt_lengths, params):
                brief = replace(setting, max_tokens=3, ignore_eos=True, stop=(), stop_token_ids=())
                for _ in range(rounds):
                    self.generate([[0] * length], brief)
                advance()
        return time.perf_counter() - begin

    def warm_up_steps(
        self, prompt_lengths: Sequence[int] | None = None, params: Sequence[SamplingParams] | None = None
    ) -> int:
        """How many steps `warm_up` takes, for a progress bar."""
        return len(self._warm_ups(prompt_lengths, params))

    def _warm_ups(
        self, prompt_lengths: Sequence[int] | None, params: Sequence[SamplingParams] | None
    ) -> list[tuple[int, SamplingParams]]:
        longest = min(self.max_len - self._past_end, self._config.max_position_embeddings) - 3
        lengths = one_of_each_size(prompt_lengths, longest, self.max_len)
        every = (SamplingParams(), SamplingParams(temperature=1.0)) if params is None else params
        kinds = {setting.temperature > 0: setting for setting in every}
        return [(length, setting) for setting in kinds.values() for length in lengths]

    def _request(self, name: str, prompt: Prompt, params: SamplingParams, listens: bool = False) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise CompatibilityError(f"{name} is a text; make the engine with its tokenizer, or give token ids")
            ids: Sequence[int] = self.tokenizer(prompt)["input_ids"]
        else:
            ids = prompt
        if params.stop and self.tokenizer is None:
            raise CompatibilityError(f"stop={params.stop} are texts; make the engine with its tokenizer")
        tokens = check_prompt(name, ids, params.max_tokens, self._config, self._past_end, self.max_len)
        if len(ids) + tokens > self._drafter_context:
            warnings.warn(
                f"{name} may reach {len(ids) + tokens} tokens, and the drafter knows {self._drafter_context}: past "
                "them few drafts will be accepted, and the tokens stay the target's",
                stacklevel=3,
            )
            self._drafter_context = self.max_len  # told once
        ends = (() if params.ignore_eos else self._stop_ids) + params.stop_token_ids
        return Request(ids, params, ends, tokens, self.tokenizer, listens)

    def _pieces(self, request: Request) -> Generator[Piece, None, None]:
        try:
            finished = False
            while not finished:
                if not request.finished:  # another stream's step may have brought the end
                    self.step()
                finished, parts = request.finished, tuple(request.new_text())
                if finished:
                    yield Piece(parts, request.completion())
                elif parts:
                    yield Piece(parts)
        finally:
            self.cancel(request)

"""One prompt on its way through an engine, as the host sees it: tokens in, stop texts, text out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from d3d_jax.config import SamplingParams
from d3d_jax.decoding.state import Completion, Progress, Round
from d3d_jax.decoding.text import TextStream


class Request:
    """A prompt, its settings, and what has come of it.

    Args:
        stop_ids: every id that ends this output; the id is part of it.
        max_tokens: most new tokens.
        tokenizer: gives the text; without one there is none, and no stop text can be watched for.
        listens: somebody waits for every piece, so a launch must not run long.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        stop_ids: Sequence[int],
        max_tokens: int,
        tokenizer: Any = None,
        listens: bool = False,
    ):
        self.prompt, self.params, self.stop_ids, self.max_tokens = tuple(prompt), params, tuple(stop_ids), max_tokens
        self.listens = listens
        self.finish_reason: str | None = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._rounds: list[Round] = []
        self._stream = None if tokenizer is None else TextStream(tokenizer, skip_special_tokens=True)
        self._text = ""
        self._given = 0  # characters of the text that were handed out
        self._marks: list[tuple[int, bool]] = []  # where the text of each token ends; the target's own token?
        self._started = self._first = self._ended = time.perf_counter()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def committed(self) -> tuple[int, ...]:
        """The prompt and every token so far: what a cache that was lost is rebuilt from."""
        return (*self.prompt, *self._ids)

    @property
    def limit(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.prompt) + self.max_tokens

    def start(self) -> None:
        """The prompt goes to the devices now, for the first time or, with what has come of it, again."""
        if not self._ids:
            self._started = self._first = time.perf_counter()

    def take(self, progress: Progress) -> None:
        """What a launch gave this row; the rest of a round that holds the end is dropped."""
        if not progress.tokens:
            return
        if not self._ids:
            self._first = time.perf_counter()
        self._rounds += progress.rounds
        for token, logprob, own in zip(progress.tokens, progress.logprobs, progress.own(), strict=True):
            self._ids.append(token)
            self._logprobs.append(logprob)
            if self._stream is not None:
                self._text += self._stream.push(token)
                self._marks.append((len(self._text), own))
            if token in self.stop_ids:
                return self.finish("stop")
            if self._cut_at_stop_text():
                return self.finish("stop")
            if len(self._ids) == self.max_tokens:
                return self.finish("length")

    def finish(self, reason: str) -> None:
        """No more tokens are taken."""
        if self._stream is not None and not self.finished:
            self._text += self._stream.finish()
            self._cut_at_stop_text()
        self.finish_reason = reason
        self._ended = time.perf_counter()

    def new_text(self) -> list[tuple[str, bool]]:
        """Text since the last call, token by token, and whether each is the target's own or was drafted.

        While more may come, what could be the beginning of a stop text is held back.
        """
        end = len(self._text)
        if not self.finished:
            end -= max((self._beginning_of(stop) for stop in self.params.stop), default=0)
        parts = []
        for mark, own in [*self._marks, (end, True)]:
            upto = min(mark, end)
            if upto > self._given:
                parts.append((self._text[self._given : upto], own))
                self._given = upto
        return parts

    def completion(self) -> Completion:
        return Completion(
            self.prompt,
            tuple(self._ids),
            self.finish_reason or "cancelled",
            tuple(self._rounds),
            self._first - self._started,
            self._ended - self._first,
            None if self._stream is None else self._text,
            tuple(self._logprobs) if self.params.logprobs else None,
        )

    def _cut_at_stop_text(self) -> bool:
        places = [place for stop in self.params.stop if (place := self._text.find(stop)) >= 0]
        if places:
            self._text = self._text[: min(places)]
        return bool(places)

    def _beginning_of(self, stop: str) -> int:
        """The longest end of the text that is a beginning of `stop`."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self._text.endswith(stop[:n])), 0)

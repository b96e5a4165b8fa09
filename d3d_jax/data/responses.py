"""The target's own responses to prompts: what a drafter is trained on (docs/algorithm.md 7)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from d3d_jax.data.chat import encode_prompt
from d3d_jax.data.documents import Row
from d3d_jax.data.packing import Top
from d3d_jax.data.prompts import Conversation
from d3d_jax.data.top_logprobs import Teacher
from d3d_jax.errors import DataError

AT_ONCE = 4096  # questions handed over together: enough to keep every row of an engine busy


class Answer(Protocol):
    """Answers questions in any order: calls `on_answer(question, ids, finished)` for each as soon as it is known.

    ids: the tokens that follow the prompt; finished: they ended with a stop token. A fourth argument is the `Top` of
    the response.
    """

    def __call__(self, questions: Sequence[Question], on_answer: OnAnswer) -> None: ...


class OnAnswer(Protocol):
    """Takes an answer."""

    def __call__(self, question: Question, ids: Sequence[int], finished: bool, top: Top | None = None) -> None: ...


@dataclass(frozen=True)
class Question:
    """A prompt to answer: its name, its place in the file, and its token ids."""

    id: str
    row: int
    prompt: list[int]


@dataclass(frozen=True)
class Counts:
    """What became of the questions; the four add up to their number."""

    answered: int
    truncated: int
    empty: int
    skipped: int


class Tally:
    """Counts as they grow."""

    def __init__(self) -> None:
        self.answered = self.truncated = self.empty = self.skipped = 0

    def add(self, response: Sequence[int], finished: bool) -> None:
        """One more response: a finished one of nothing but its stop token is empty."""
        if not finished:
            self.truncated += 1
        elif len(response) <= 1:
            self.empty += 1
        else:
            self.answered += 1

    def counts(self) -> Counts:
        return Counts(self.answered, self.truncated, self.empty, self.skipped)


def questions_of(conversations: Sequence[Conversation], tokenizer: Any) -> list[Question]:
    """The first user turn of each conversation as a prompt, thinking off."""
    found = []
    for row, conversation in enumerate(conversations):
        user = next(message for message in conversation.messages if message["role"] == "user")
        found.append(Question(conversation.id, row, encode_prompt(tokenizer, [user])))
    return found


def with_top_logprobs(answer: Answer, teacher: Teacher, batch_size: int) -> Answer:
    """Answers that come with the target's likeliest tokens, `batch_size` of them at a time."""

    def whole(questions: Sequence[Question], on_answer: OnAnswer) -> None:
        waiting: list[tuple[Question, list[int], bool]] = []

        def hand_over() -> None:
            if waiting:
                texts = [([*question.prompt, *ids], len(question.prompt)) for question, ids, _ in waiting]
                for (question, ids, finished), top in zip(waiting, teacher(texts), strict=True):
                    on_answer(question, ids, finished, top)
                waiting.clear()

        def collect(question: Question, ids: Sequence[int], finished: bool, top: Top | None = None) -> None:
            waiting.append((question, list(ids), finished))
            if len(waiting) == batch_size:
                hand_over()

        answer(questions, collect)
        hand_over()

    return whole


@dataclass(frozen=True)
class Agreement:
    """How far given responses are what the target would say: of all their tokens, those that it holds for likeliest.

    skipped: rows that were too long. Rows that an earlier run has labelled count.
    """

    rows: int
    skipped: int
    tokens: int
    agreeing: int

    @property
    def share(self) -> float:
        return self.agreeing / max(1, self.tokens)


def label(
    rows: Iterable[Row],
    teacher: Teacher,
    output: str | Path,
    *,
    batch_size: int,
    longest: int,
    on_row: Callable[[], None] = lambda: None,
) -> Agreement:
    """Write given rows with the target's likeliest tokens for them into the JSONL file `output`, as `respond` does.

    longest: rows of more tokens are skipped and counted. A run that was stopped goes on where it was.
    """
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    done, skipped, tokens, agreeing = _answered(output, top=True), 0, 0, 0

    def count(ids: Sequence[int], prompt_length: int, top_ids: Sequence[Sequence[int]]) -> None:
        nonlocal tokens, agreeing
        response = ids[prompt_length:]
        tokens += len(response)
        agreeing += sum(int(token == top[0]) for token, top in zip(response, top_ids, strict=True))

    for stored in done.values():
        count(stored["ids"], stored["prompt_length"], stored["top_ids"])
    written = len(done)
    with output.open("a") as file:
        waiting: list[Row] = []

        def hand_over() -> None:
            nonlocal written
            texts = [(row.ids.tolist(), row.prompt_length) for row in waiting]
            for row, (ids, prompt_length), top in zip(waiting, texts, teacher(texts), strict=True):
                file.write(_line(row.id, ids, prompt_length, row.finished, top))
                count(ids, prompt_length, top.ids.tolist())
                written += 1
                on_row()
            file.flush()
            waiting.clear()

        for row in rows:
            if row.id in done:
                continue
            if len(row.ids) > longest:
                skipped += 1
                continue
            waiting.append(row)
            if len(waiting) == batch_size:
                hand_over()
        if waiting:
            hand_over()
    return Agreement(written, skipped, tokens, agreeing)


def _line(name: str, ids: Sequence[int], prompt_length: int, finished: bool, top: Top | None) -> str:
    row: dict[str, Any] = {"id": name, "ids": list(ids), "prompt_length": prompt_length, "finished": finished}
    if top is not None:
        row["top_ids"] = top.ids.tolist()
        row["top_logprobs"] = np.round(top.logprobs.astype(np.float64), 4).tolist()
    return json.dumps(row, separators=(",", ":")) + "\n"


def respond(
    asked: Sequence[Question],
    answer: Answer,
    output: str | Path,
    *,
    longest_prompt: int,
    top: bool = False,
    on_counts: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Answer the questions into the JSONL file `output`, in whatever order answers come; returns the counts.

    Lines are `{"id", "ids", "prompt_length", "finished"}`, and `top_ids` and `top_logprobs` where answers come with
    the target's likeliest tokens, a list of K for each token of the response. Questions already in the file are not
    asked again, so a run that was stopped goes on where it was. Prompts longer than `longest_prompt` are skipped and
    counted. `on_counts` gets the counts so far after each answer. top: answers come with likeliest tokens.

    Raises:
        DataError: when the file holds rows of the other kind.
    """
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    done = _answered(output, top)
    tally = Tally()
    for row in done.values():
        tally.add(row["ids"][row["prompt_length"] :], row["finished"])
    fitting = [question for question in asked if len(question.prompt) <= longest_prompt]
    tally.skipped = len(asked) - len(fitting)
    waiting = [question for question in fitting if question.id not in done]
    on_counts(tally.counts())
    with output.open("a") as file:

        def on_answer(question: Question, ids: Sequence[int], finished: bool, top: Top | None = None) -> None:
            file.write(_line(question.id, [*question.prompt, *ids], len(question.prompt), finished, top))
            file.flush()
            tally.add(ids, finished)
            on_counts(tally.counts())

        for first in range(0, len(waiting), AT_ONCE):
            answer(waiting[first : first + AT_ONCE], on_answer)
    return tally.counts()


def _answered(output: Path, top: bool) -> dict[str, dict]:
    """Rows of an earlier run; a last line that was cut while it was written is dropped from the file.

    Raises:
        DataError: when they come with the target's likeliest tokens and `top` is False, or the other way.
    """
    if not output.is_file():
        return {}
    rows, whole = {}, []
    for line in output.read_text().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not line.endswith("\n"):
            break
        if ("top_ids" in row) is not top:
            has = "no likeliest tokens" if top else "the target's likeliest tokens"
            raise DataError(f"{output}: row {row['id']!r} has {has}; go on as it was begun, or name another file")
        rows[row["id"]] = row
        whole.append(line)
    output.write_text("".join(whole))
    return rows

"""The target's own responses to prompts: what a drafter is trained on (docs/algorithm.md 7)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d3d_jax.data.chat import encode_prompt
from d3d_jax.data.prompts import Conversation

# (prompts' ids) -> for each: the ids that follow, and whether they ended with a stop token
Generate = Callable[[list[list[int]]], list[tuple[list[int], bool]]]


@dataclass(frozen=True)
class Question:
    """A prompt to answer: its name, token ids, and the characters of the answer that came with it."""

    id: str
    prompt: list[int]
    answer_length: int


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


def questions(conversations: Sequence[Conversation], tokenizer: Any) -> list[Question]:
    """The first user turn of each conversation as a prompt, thinking off."""
    found = []
    for conversation in conversations:
        user = next(message for message in conversation.messages if message["role"] == "user")
        answer = "".join(m["content"] for m in conversation.messages if m["role"] == "assistant")
        found.append(Question(conversation.id, encode_prompt(tokenizer, [user]), len(answer)))
    return found


def respond(
    asked: Sequence[Question], generate: Generate, output: str | Path, *, batch_size: int, longest_prompt: int
) -> Iterator[Counts]:
    """Answer the questions into the JSONL file `output`, yielding the counts so far after each batch.

    Lines are `{"id", "ids", "prompt_length", "finished"}`. Questions already in the file are not asked again, so
    a run that was stopped goes on where it was. Prompts longer than `longest_prompt` are skipped and counted.
    """
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    done = _answered(output)
    tally = Tally()
    for row in done.values():
        tally.add(row["ids"][row["prompt_length"] :], row["finished"])
    fitting = [question for question in asked if len(question.prompt) <= longest_prompt]
    tally.skipped = len(asked) - len(fitting)
    # Rows of a batch wait for its longest: the length of the answer at hand tells who is alike.
    waiting = sorted((q for q in fitting if q.id not in done), key=lambda q: (q.answer_length, len(q.prompt)))
    yield tally.counts()
    with output.open("a") as file:
        for first in range(0, len(waiting), batch_size):
            batch = waiting[first : first + batch_size]
            # A short last batch is filled up, so that it needs no program of its own.
            prompts = [question.prompt for question in batch] + [batch[-1].prompt] * (batch_size - len(batch))
            for question, (ids, finished) in zip(batch, generate(prompts), strict=False):
                row = {
                    "id": question.id,
                    "ids": [*question.prompt, *ids],
                    "prompt_length": len(question.prompt),
                    "finished": finished,
                }
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
                tally.add(ids, finished)
            file.flush()
            yield tally.counts()


def _answered(output: Path) -> dict[str, dict]:
    """Rows of an earlier run; a last line that was cut while it was written is dropped from the file."""
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
        rows[row["id"]] = row
        whole.append(line)
    output.write_text("".join(whole))
    return rows

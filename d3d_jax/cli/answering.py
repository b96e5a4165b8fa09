"""Answering prompts turn by turn, and a JSONL file of answers that an interrupted run can go on with."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d3d_jax.cli.pair_options import progress_bar
from d3d_jax.errors import DataError

if TYPE_CHECKING:
    from d3d_jax.config import SamplingParams
    from d3d_jax.data.prompts import Prompt
    from d3d_jax.decoding.engine import Engine
    from d3d_jax.decoding.loading import LoadedPair
    from d3d_jax.decoding.request import Request
    from d3d_jax.decoding.state import Completion


class Session(NamedTuple):
    """Everything that answering needs, once it is loaded."""

    engine: Engine
    pair: LoadedPair
    params: SamplingParams
    enable_thinking: bool


class Talk:
    """A conversation under way: each turn is asked after the answers to those before it."""

    def __init__(self, session: Session, prompt: Prompt):
        self.prompt, self.completions = prompt, []
        self._session, self._turns = session, deque(prompt.turns)
        self._messages: list[dict[str, str]] = []

    def ask(self) -> Request:
        """Hand the next turn to the engine.

        Raises:
            CapacityError: when it no longer fits with what was said before.
        """
        from d3d_jax.data.chat import encode_prompt

        self._messages.append(user(self._turns.popleft()))
        ids = encode_prompt(self._session.pair.tokenizer, self._messages, self._session.enable_thinking)
        name = f"prompt {self.prompt.id!r}" + (" (with its earlier answers)" if self.completions else "")
        return self._session.engine.submit(ids, self._session.params, name)

    def hear(self, completion: Completion) -> bool:
        """The answer to the last turn; whether there is another to ask."""
        self.completions.append(completion)
        self._messages.append({"role": "assistant", "content": completion.text or ""})
        return bool(self._turns)


def converse(session: Session, prompts: Sequence[Prompt]) -> Iterator[Talk]:
    """Conversations, as many at a time as the engine has rows and then some, each given when it is over."""
    waiting = deque(prompts)
    under_way: dict[Request, Talk] = {}
    while waiting or under_way:
        while waiting and len(under_way) < 2 * session.engine.max_batch:
            talk = Talk(session, waiting.popleft())
            under_way[talk.ask()] = talk
        session.engine.step()
        for request in [request for request in under_way if request.finished]:
            talk = under_way.pop(request)
            if talk.hear(request.completion()):
                under_way[talk.ask()] = talk
            else:
                yield talk


def user(text: str) -> dict[str, str]:
    """A user's turn as a chat message."""
    return {"role": "user", "content": text}


def answer_file(session: Session, waiting: Sequence[Prompt], total: int, output: Path, err: Any) -> int:
    """Append a line for each prompt as soon as it is answered, in whatever order; figures go to stderr.

    Raises:
        CapacityError: when a later turn, with the answers before it, no longer fits; lines written so far stay.
    """
    drop_cut_line(output)
    completions: list[Completion] = []
    begin = time.perf_counter()
    with progress_bar(err, "answering", len(waiting)) as advance, output.open("a", encoding="utf-8") as file:
        for talk in converse(session, waiting):
            record = {
                "id": talk.prompt.id,
                "turns": list(talk.prompt.turns),
                "responses": [done.text for done in talk.completions],
                "finish_reasons": [done.finish_reason for done in talk.completions],
                **figures_of(session, talk.completions),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            completions += talk.completions
            tokens = sum(len(done.ids) for done in completions)
            advance(f"({tokens / (time.perf_counter() - begin):.0f} tok/s)")
    print(f"{output}: {len(waiting)} answered, {total - len(waiting)} were there", file=sys.stderr)
    print(in_words(figures_of(session, completions)), file=sys.stderr)
    return 0


def figures_of(session: Session, completions: Sequence[Completion]) -> dict[str, Any]:
    """Tokens, seconds and acceptance of some outputs. A prompt length met for the first time compiles in prefill_s."""
    from d3d_jax.acceptance.metrics import Sample, measure

    decode = session.engine.decode
    found = measure((Sample(done.rounds, len(done.ids)) for done in completions), decode.block_size)
    after_first, decode_s = sum(len(done.ids) - 1 for done in completions), sum(done.decode_s for done in completions)
    return {
        "mode": decode.mode,
        "tokens": after_first + len(completions),
        "prefill_s": sum(done.prefill_s for done in completions),
        "decode_s": decode_s,
        "tok_per_s": after_first / decode_s if decode_s else None,
        "tau": found.tau,
        "hit_rate": found.hit_rate,
        **choice_of(session.engine, found.tau, completions),
    }


def choice_of(engine: Engine, tau: float | None, completions: Sequence[Completion]) -> dict[str, Any]:
    """Where the engine may leave drafting out: how often it drafted, and the tau from which on that pays here."""
    from d3d_jax.decoding.policies import PLAIN, break_even_tau

    rounds = sum(len(done.rounds) for done in completions)
    if engine.decode.drafting != "auto" or not rounds:
        return {}
    rates = engine.rates()
    drafted = max((rate for tactic, rate in rates.items() if tactic != PLAIN), default=0.0)
    even = None
    if tau is not None and drafted and PLAIN in rates:
        even = break_even_tau(tau, drafted, rates[PLAIN])
    return {
        "drafted_share": sum(done.drafted_rounds for done in completions) / rounds,
        "break_even_tau": even,
    }


def in_words(figures: dict[str, Any]) -> str:
    """One line for stderr."""
    text = f"{figures['mode']}: {figures['tokens']} tokens"
    if figures["tok_per_s"]:
        text += f", {figures['tok_per_s']:.0f} tok/s decoding"
    if figures["tau"] is not None:
        text += f", {figures['tau']:.2f} tokens a round"
    if figures["hit_rate"] is not None:
        text += f", hit rate {figures['hit_rate']:.2f}"
    if figures.get("break_even_tau"):
        text += (
            f" (drafting pays from {figures['break_even_tau']:.2f}; {figures['drafted_share']:.0%} of rounds drafted)"
        )
    return text


def answered_ids(output: Path) -> set[str]:
    """Ids in an earlier run's file; a last line that was cut while being written does not count.

    Raises:
        DataError: for any other line that is none of ours.
    """
    if not output.is_file():
        return set()
    found = set()
    for number, line in enumerate(output.read_bytes().split(b"\n")[:-1], start=1):
        try:
            found.add(str(json.loads(line)["id"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{output}:{number}: not a line of an earlier run; name another --output") from error
    return found


def drop_cut_line(output: Path) -> None:
    """Take off a last line that was cut while being written."""
    if output.is_file():
        whole = output.read_bytes().rpartition(b"\n")
        with output.open("r+b") as file:
            file.truncate(len(whole[0]) + len(whole[1]))

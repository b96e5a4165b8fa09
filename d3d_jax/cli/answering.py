"""Answering prompts turn by turn, and a JSONL file of answers that an interrupted run can go on with."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d3d_jax.cli.pair_options import progress_bar, too_long
from d3d_jax.errors import CapacityError, DataError

if TYPE_CHECKING:
    from d3d_jax.config import SamplingParams
    from d3d_jax.data.prompts import Prompt
    from d3d_jax.decoding.engine import Engine
    from d3d_jax.decoding.loading import LoadedPair
    from d3d_jax.decoding.state import Completion


class Session(NamedTuple):
    """Everything that answering needs, once it is loaded."""

    engine: Engine
    pair: LoadedPair
    max_new_tokens: int
    sampling: SamplingParams
    enable_thinking: bool

    def warm_up(self, turn: str) -> None:
        """Compile what a prompt like this needs, so that no rate holds it."""
        from d3d_jax.data.chat import encode_prompt

        prompt = encode_prompt(self.pair.tokenizer, [user(turn)], self.enable_thinking)
        self.engine.generate([prompt], min(4, self.max_new_tokens), self.pair.stop_ids, self.sampling)

    def answer(self, turns: Sequence[str]) -> list[tuple[Completion, str]]:
        """The completion and text of each turn; a turn is asked after the answers to those before it."""
        from d3d_jax.data.chat import encode_prompt

        messages: list[dict[str, str]] = []
        answers = []
        for turn in turns:
            messages.append(user(turn))
            prompt = encode_prompt(self.pair.tokenizer, messages, self.enable_thinking)
            done = self.engine.generate([prompt], self.max_new_tokens, self.pair.stop_ids, self.sampling)[0]
            text = self.pair.tokenizer.decode(done.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            messages.append({"role": "assistant", "content": text})
            answers.append((done, text))
        return answers


def user(text: str) -> dict[str, str]:
    """A user's turn as a chat message."""
    return {"role": "user", "content": text}


def answer_file(session: Session, waiting: Sequence[Prompt], total: int, output: Path, err: Any) -> int:
    """Append a line for each prompt as soon as it is answered; figures go to stderr.

    Raises:
        CapacityError: when a later turn, with the answers before it, no longer fits; lines written so far stay.
    """
    drop_cut_line(output)
    completions: list[Completion] = []
    with progress_bar(err, "answering", len(waiting)) as advance, output.open("a", encoding="utf-8") as file:
        for prompt in waiting:
            try:
                answers = session.answer(prompt.turns)
            except CapacityError as error:
                raise too_long(error, f"{prompt.id!r} (with its earlier answers)") from error
            done = [completion for completion, _ in answers]
            record = {
                "id": prompt.id,
                "turns": list(prompt.turns),
                "responses": [text for _, text in answers],
                "finish_reasons": [completion.finish_reason for completion in done],
                **figures_of(session, done),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            completions += done
            advance()
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

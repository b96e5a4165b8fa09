"""`d3d chat`: talk with a target on the terminal; what was drafted and accepted is coloured."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from d3d_jax.cli.answer import DRAFTED, OWN, legend
from d3d_jax.cli.pair_options import (
    SLOT_STEP,
    add_pair_arguments,
    load_with_progress,
    open_chosen_pair,
    progress_bar,
    refuse_drafting_contradictions,
    sampling_of,
    start_devices,
)
from d3d_jax.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from d3d_jax.decoding.state import Completion

NAME = "chat"
HELP = "talk with a target on the terminal, as it writes; drafted tokens are coloured"
SAYINGS = "/stats: figures so far   /reset: forget what was said   /quit: leave"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.epilog = "example: d3d chat --model-path Qwen3-8B --draft-model-path D3D-1.7B-8B --dtype bfloat16"


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from d3d_jax.models.cache import slots_past_end

    refuse_drafting_contradictions(args)
    params = replace(sampling_of(args), max_tokens=args.max_new_tokens)
    devices = start_devices(args.device)
    pair, decode = open_chosen_pair(args)
    room = min(pair.target.config.max_position_embeddings, 4096) + slots_past_end(decode.block_size)
    max_len = args.max_len or -(-room // SLOT_STEP) * SLOT_STEP
    if args.max_new_tokens + slots_past_end(decode.block_size) >= max_len:
        raise ConfigError(f"--max-len {max_len} leaves no room for a prompt and {args.max_new_tokens} new tokens")

    import jax.numpy as jnp

    from d3d_jax.cli.answering import Session
    from d3d_jax.decoding.engine import Engine

    err = Console(stderr=True)
    loaded = load_with_progress(pair, decode, devices, args.dtype, err)
    engine = Engine(
        loaded.target,
        None if decode.mode == "ar" else loaded.drafter,
        decode,
        devices=devices,
        max_len=max_len,
        num_token_ids=loaded.num_token_ids,
        stop_ids=loaded.stop_ids,
        tokenizer=loaded.tokenizer,
        dtype=jnp.dtype(args.dtype),
    )
    with progress_bar(err, "compiling", engine.warm_up_steps(None, [params])) as advance:
        engine.warm_up(None, [params], advance)
    err.print(SAYINGS, style="dim")
    return talk(Session(engine, loaded, params, args.enable_thinking), Console(highlight=False), err)


def talk(session: Any, out: Any, err: Any) -> int:
    """Read what the user says, line by line, until the input ends. Ctrl-C stops an answer, not the chat."""
    from d3d_jax.cli.answering import figures_of, in_words, user
    from d3d_jax.data.chat import encode_prompt

    messages: list[dict[str, str]] = []
    completions: list[Completion] = []
    while True:
        err.print("> ", end="", style="bold")
        line = sys.stdin.readline()
        said = line.strip()
        if not line or said == "/quit":
            return 0
        if said == "/stats":
            err.print(in_words(figures_of(session, completions)) if completions else "nothing was said yet")
        elif said == "/reset":
            messages.clear()
            err.print("forgotten", style="dim")
        elif said.startswith("/"):
            err.print(f"unknown command {said}; {SAYINGS}")
        elif said:
            turn = [*messages, user(said)]
            ids = encode_prompt(session.pair.tokenizer, turn, session.enable_thinking)
            try:
                done = answer(session, ids, out)
            except CapacityError as error:
                err.print(f"{error}; /reset makes room", style="red", highlight=False)
                continue
            completions.append(done)
            messages[:] = [*turn, {"role": "assistant", "content": done.text or ""}]
            if done.rounds and out.is_terminal:
                err.print("tokens: ", legend(len(done.ids), done.bonus_positions), sep="")


def answer(session: Any, ids: list[int], out: Any) -> Completion:
    """Print an answer as it comes, and give it whole."""
    from rich.text import Text

    request = session.engine.submit(ids, session.params, listens=True)
    drafting = session.engine.decode.mode != "ar"
    with interrupted() as stop:
        while not request.finished:
            session.engine.step()
            if stop:
                session.engine.cancel(request)
            for text, own in request.new_text():
                out.print(Text(text, (OWN if own else DRAFTED) if drafting else ""), end="", soft_wrap=True)
    out.print()
    return request.completion()


@contextmanager
def interrupted() -> Iterator[list[int]]:
    """A list that Ctrl-C fills: an exception between two programs could lose a cache that one gave to the other."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)

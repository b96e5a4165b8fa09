"""`d3d generate`: text from a target, alone or with a drafter."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d3d_jax.cli.answering import Session, answer_file, answered_ids, converse, figures_of, in_words
from d3d_jax.cli.pair_options import (
    SLOT_STEP,
    add_pair_arguments,
    check_writable,
    load_with_progress,
    open_chosen_pair,
    plan_slots,
    positive,
    progress_bar,
    refuse_drafting_contradictions,
    sampling_of,
    start_devices,
    too_long,
)
from d3d_jax.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from d3d_jax.config import DecodeConfig
    from d3d_jax.data.prompts import Prompt
    from d3d_jax.decoding.loading import OpenedPair

NAME = "generate"
HELP = "text from a target, alone or with a drafter: one prompt, or a JSONL file of them (resumable)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="what the user says")
    source.add_argument("--input", metavar="F.jsonl", help="lines of {'id', 'turns': [text, ...]}")
    parser.add_argument("--output", metavar="F.jsonl", help="with --input: answers; ids that are there are skipped")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="B", help="prompts decoded at one time")
    parser.add_argument("--output-json", metavar="F", help="with --prompt: answer, ids and rounds")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  d3d generate --prompt 'Tom has 3 apples and buys 4 more. How many has he?'\n"
        "  d3d generate --model-path Qwen3-8B --draft-model-path D3D-1.7B-8B --dtype bfloat16 \\\n"
        "      --input prompts.jsonl --output answers.jsonl"
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from d3d_jax.data.prompts import Prompt, load_prompts

    refuse_contradictions(args)
    refuse_drafting_contradictions(args)
    sampling = sampling_of(args)
    asked = load_prompts(args.input) if args.input else [Prompt("--prompt", (args.prompt,))]
    answered = answered_ids(Path(args.output)) if args.output else set()
    waiting = [prompt for prompt in asked if prompt.id not in answered]
    devices = start_devices(args.device)
    pair, decode = open_chosen_pair(args)
    err = Console(stderr=True)
    if not waiting:
        print(f"{args.output}: all {len(asked)} prompts are answered already", file=sys.stderr)
        return 0
    max_len = planned(args, pair, decode, waiting)

    import jax.numpy as jnp

    from d3d_jax.decoding.engine import Engine

    loaded = load_with_progress(pair, decode, devices, args.dtype, err)
    engine = Engine(
        loaded.target,
        None if decode.mode == "ar" else loaded.drafter,
        decode,
        devices=devices,
        max_len=max_len,
        max_batch=min(args.batch_size, len(waiting)),
        num_token_ids=loaded.num_token_ids,
        stop_ids=loaded.stop_ids,
        tokenizer=loaded.tokenizer,
        dtype=jnp.dtype(args.dtype),
    )
    session = Session(engine, loaded, replace(sampling, max_tokens=args.max_new_tokens), args.enable_thinking)
    lengths = None if any(len(prompt.turns) > 1 for prompt in waiting) else prompt_lengths(session, waiting)
    with progress_bar(err, "compiling", engine.warm_up_steps(lengths, [sampling])) as advance:
        engine.warm_up(lengths, [sampling], advance)
    if args.input:
        return answer_file(session, waiting, len(asked), Path(args.output), err)
    return answer_one(session, waiting[0], args.output_json, err)


def prompt_lengths(session: Session, prompts: Sequence[Prompt]) -> list[int]:
    """Tokens of each prompt's first turn."""
    from d3d_jax.data.chat import encode_prompt

    tokenizer = session.pair.tokenizer
    return [len(encode_prompt(tokenizer, prompt.messages(), session.enable_thinking)) for prompt in prompts]


def refuse_contradictions(args: argparse.Namespace) -> None:
    """Flags that do not go together, told before anything is read.

    Raises:
        ConfigError: naming them.
    """
    if bool(args.input) != bool(args.output):
        raise ConfigError("--input and --output go together; name the file that the answers go to")
    if args.input and args.output_json:
        raise ConfigError("--output-json is for --prompt; the answers to --input go to --output")
    if args.prompt is not None and args.batch_size > 1:
        raise ConfigError("--batch-size is for --input; one prompt is a batch of 1")
    if args.prompt == "":
        raise ConfigError("--prompt is empty; say something")
    check_writable(args.output, "--output")
    check_writable(args.output_json, "--output-json")


def planned(args: argparse.Namespace, pair: OpenedPair, decode: DecodeConfig, waiting: Sequence[Prompt]) -> int:
    """Cache slots for the prompts, each of which must fit. Later turns depend on answers: they get a budget each."""
    from d3d_jax.cli.answering import user
    from d3d_jax.data.chat import encode_prompt

    config, most = pair.target.config, args.max_new_tokens
    block_size = None if decode.mode == "ar" else pair.block_size
    slots = []
    for prompt in waiting:
        first = encode_prompt(pair.tokenizer, prompt.messages(), args.enable_thinking)
        try:
            slots.append(plan_slots([first], most, config, block_size, args.max_len))
        except CapacityError as error:
            raise too_long(error, repr(prompt.id) if args.input else "--prompt") from error
        if len(prompt.turns) > 1 and args.max_len is None:
            spoken = sum(
                len(encode_prompt(pair.tokenizer, [user(turn)], args.enable_thinking)) for turn in prompt.turns
            )
            whole = min(spoken + (len(prompt.turns) - 1) * (most + SLOT_STEP), config.max_position_embeddings - most)
            slots.append(plan_slots([[0] * whole], most, config, block_size, None))
    return max(slots)


def answer_one(session: Session, prompt: Prompt, output_json: str | None, err: Any) -> int:
    """Print the answer, coloured on a terminal; figures go to stderr."""
    from rich.console import Console

    from d3d_jax.cli.answer import coloured, legend
    from d3d_jax.decoding.text import pieces

    [talk] = converse(session, [prompt])
    [done] = talk.completions
    out = Console(highlight=False)
    if out.is_terminal and done.rounds:
        own = done.bonus_positions
        out.print(coloured(pieces(session.pair.tokenizer, done.ids, skip_special_tokens=True), own))
        err.print("tokens: ", legend(len(done.ids), own), sep="")
    else:
        print(done.text)
    figures = figures_of(session, [done])
    print(in_words(figures), file=sys.stderr)
    if output_json:
        record = {"prompt": prompt.turns[0], "response": done.text, **figures, "completion": asdict(done)}
        Path(output_json).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0

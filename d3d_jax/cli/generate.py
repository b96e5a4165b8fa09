"""`d3d generate`: text from a target, alone or with a drafter."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d3d_jax.cli.answering import Session, answer_file, answered_ids, figures_of, in_words
from d3d_jax.cli.pair_options import (
    SLOT_STEP,
    add_device_argument,
    add_drafting_arguments,
    add_sampling_arguments,
    check_writable,
    decode_config,
    load_with_progress,
    plan_slots,
    positive,
    sampling_of,
    start_devices,
    too_long,
)
from d3d_jax.errors import CapacityError, CompatibilityError, ConfigError

if TYPE_CHECKING:
    from d3d_jax.config import DecodeConfig
    from d3d_jax.data.prompts import Prompt
    from d3d_jax.decoding.loading import OpenedPair

NAME = "generate"
HELP = "text from a target, alone or with a drafter: one prompt, or a JSONL file of them (resumable)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", metavar="DIR", help="folder of the target (default: the embedded pair)")
    parser.add_argument("--draft-model-path", metavar="DIR", help="folder of its drafter")
    parser.add_argument("--mode", choices=("ar", "sync", "async"), help="default: async with a drafter, else ar")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="what the user says")
    source.add_argument("--input", metavar="F.jsonl", help="lines of {'id', 'turns': [text, ...]}")
    parser.add_argument("--output", metavar="F.jsonl", help="with --input: answers; ids that are there are skipped")
    parser.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="a turn (default: 256)")
    parser.add_argument("--block-size", type=positive, metavar="G", help="default: what the drafter was trained for")
    parser.add_argument("--enable-thinking", action="store_true", help="let the chat template ask for thoughts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-len", type=positive, metavar="S", help="cache slots: prompt, new tokens, two blocks")
    parser.add_argument("--output-json", metavar="F", help="with --prompt: answer, ids and rounds")
    add_device_argument(parser)
    add_sampling_arguments(parser)
    add_drafting_arguments(parser)
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
    sampling = sampling_of(args)
    asked = load_prompts(args.input) if args.input else [Prompt("--prompt", (args.prompt,))]
    answered = answered_ids(Path(args.output)) if args.output else set()
    waiting = [prompt for prompt in asked if prompt.id not in answered]
    devices = start_devices(args.device)
    pair, decode = opened(args)
    err = Console(stderr=True)
    if not waiting:
        print(f"{args.output}: all {len(asked)} prompts are answered already", file=sys.stderr)
        return 0
    max_len = planned(args, pair, decode, waiting)

    import jax.numpy as jnp

    from d3d_jax.decoding.engine import Engine

    loaded = load_with_progress(pair, args.dtype, err)
    engine = Engine(
        loaded.target,
        None if decode.mode == "ar" else loaded.drafter,
        decode,
        devices=devices,
        max_len=max_len,
        num_token_ids=loaded.num_token_ids,
        dtype=jnp.dtype(args.dtype),
    )
    session = Session(engine, loaded, args.max_new_tokens, sampling, args.enable_thinking)
    with err.status("compiling"):
        session.warm_up(waiting[0].turns[0])
    if args.input:
        return answer_file(session, waiting, len(asked), Path(args.output), err)
    return answer_one(session, args.prompt, args.output_json, err)


def refuse_contradictions(args: argparse.Namespace) -> None:
    """Flags that do not go together, told before anything is read.

    Raises:
        ConfigError: naming them.
    """
    if bool(args.input) != bool(args.output):
        raise ConfigError("--input and --output go together; name the file that the answers go to")
    if args.input and args.output_json:
        raise ConfigError("--output-json is for --prompt; the answers to --input go to --output")
    if args.draft_model_path and not args.model_path:
        raise ConfigError("--draft-model-path needs --model-path, the target that it drafts for")
    if args.mode == "ar" and args.draft_model_path:
        raise ConfigError("--mode ar uses no drafter; leave --draft-model-path or --mode out")
    if args.mode == "ar" or (args.model_path and not args.draft_model_path):
        for name in ("miss", "outcomes", "block_size"):
            if getattr(args, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is for drafting, but there is no drafter; leave it out, or give one")
    if args.mode == "sync" and (args.miss or args.outcomes):
        raise ConfigError("--miss and --outcomes are for --mode async; leave them out")
    if args.prompt == "":
        raise ConfigError("--prompt is empty; say something")
    check_writable(args.output, "--output")
    check_writable(args.output_json, "--output-json")


def opened(args: argparse.Namespace) -> tuple[OpenedPair, DecodeConfig]:
    """The checked pair and the settings of the mode; nothing is loaded yet."""
    from d3d_jax import demo
    from d3d_jax.decoding.loading import open_pair

    target = args.model_path or demo.target_folder()
    draft = args.draft_model_path
    if args.model_path is None and args.mode != "ar":
        draft = demo.drafter_folder()
    mode = args.mode or ("async" if draft else "ar")
    if mode != "ar" and draft is None:
        raise CompatibilityError(f"--mode {mode} needs --draft-model-path; or use --mode ar")
    pair = open_pair(target, draft, block_size=args.block_size)
    return pair, decode_config(args, mode, pair.block_size)


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


def answer_one(session: Session, prompt: str, output_json: str | None, err: Any) -> int:
    """Print the answer, coloured on a terminal; figures go to stderr."""
    from rich.console import Console

    from d3d_jax.cli.answer import coloured, legend
    from d3d_jax.decoding.text import pieces

    done, text = session.answer([prompt])[0]
    out = Console(highlight=False)
    if out.is_terminal and done.rounds:
        own = done.bonus_positions
        out.print(coloured(pieces(session.pair.tokenizer, done.ids, skip_special_tokens=True), own))
        err.print("tokens: ", legend(len(done.ids), own), sep="")
    else:
        print(text)
    figures = figures_of(session, [done])
    print(in_words(figures), file=sys.stderr)
    if output_json:
        record = {"prompt": prompt, "response": text, **figures, "completion": asdict(done)}
        Path(output_json).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0

"""`d3d respond`: the target's own responses to the prompts of a conversations file.

Row i of the file samples with seed + i.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

from d3d_jax.cli.pair_options import (
    add_device_argument,
    add_sampling_arguments,
    decode_config,
    load_with_progress,
    positive,
    progress_bar,
    sampling_of,
    start_devices,
)

NAME = "respond"
HELP = "let the target answer prompts, to train a drafter on (JSONL, resumable)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", required=True, help="folder of the target, with its tokenizer")
    parser.add_argument("--input", required=True, help="JSONL of {'id', 'conversations'}, .gz too")
    parser.add_argument("--output", required=True, help="JSONL of token ids; lines already there are kept")
    parser.add_argument("--max-new-tokens", type=positive, default=1024)
    parser.add_argument("--max-len", type=positive, default=2048, help="cache slots a row: prompt and response")
    parser.add_argument("--batch-size", type=positive, default=32, help="rows decoded at one time")
    add_device_argument(parser)
    add_sampling_arguments(parser)
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th question, from the i-th")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.epilog = "example: d3d respond --model-path Qwen3-8B --input prompts.jsonl --output out-0.jsonl --shard 0/8"


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from d3d_jax.data.prompts import load_conversations
    from d3d_jax.data.responses import Counts, Question, questions_of, respond
    from d3d_jax.decoding.loading import open_pair
    from d3d_jax.errors import ConfigError
    from d3d_jax.models.cache import slots_past_end

    index, count = _shard(args.shard)
    sampling = sampling_of(args)
    past_end = slots_past_end(1)
    if args.max_new_tokens + past_end >= args.max_len:
        raise ConfigError(f"--max-len {args.max_len} leaves no room for a prompt and {args.max_new_tokens} new tokens")
    devices = start_devices(args.device)
    pair = open_pair(args.model_path)
    asked = questions_of(load_conversations(args.input), pair.tokenizer)[index::count]

    import jax.numpy as jnp

    from d3d_jax.decoding.engine import Engine

    err = Console(stderr=True)
    decode = decode_config(args, "ar", None)
    loaded = load_with_progress(pair, decode, devices, args.dtype, err)
    engine = Engine(
        loaded.target,
        None,
        decode,
        devices=(devices[0], devices[0]),
        max_len=args.max_len,
        max_batch=args.batch_size,
        num_token_ids=loaded.num_token_ids,
        stop_ids=loaded.stop_ids,
        dtype=jnp.dtype(args.dtype),
    )

    def answer(questions: Sequence[Question], on_answer: Callable[[Question, Sequence[int], bool], None]) -> None:
        settings = [
            replace(sampling, seed=(args.seed + question.row) % 2**32, max_tokens=args.max_new_tokens)
            for question in questions
        ]
        engine.generate(
            [question.prompt for question in questions],
            settings,
            on_completion=lambda i, done: on_answer(questions[i], done.ids, done.finish_reason == "stop"),
        )

    with progress_bar(err, "responses", len(asked)) as advance:
        before = 0

        def on_counts(counts: Counts) -> None:
            nonlocal before
            finished = counts.answered + counts.truncated + counts.empty + counts.skipped
            advance(f"({counts.truncated} cut)", by=finished - before)
            before = finished

        longest = args.max_len - args.max_new_tokens - past_end
        counts = respond(asked, answer, args.output, longest_prompt=longest, on_counts=on_counts)
    print(f"{args.output}: {counts}")
    return 0


def _shard(text: str) -> tuple[int, int]:
    from d3d_jax.errors import ConfigError

    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError:
        index, count = -1, 0
    if not 0 <= index < count:
        raise ConfigError(f"--shard {text!r}: expected i/n with 0 <= i < n, such as 0/8")
    return index, count

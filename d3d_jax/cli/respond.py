"""`d3d respond`: the target's own responses to the prompts of a conversations file.

Row i of the file samples with seed + i.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from d3d_jax.data.documents import Row
    from d3d_jax.decoding.loading import OpenedPair

OWN_SHARE = 0.9  # of tokens that the target holds for likeliest: with fewer, responses are taken for another's
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
    parser.add_argument("--top-logprobs", type=positive, metavar="K", help="also store the target's K likeliest tokens "
                        "at every place, to distil from (loss.kd_weight); one more pass of the target, whose weights "
                        "are then on the device twice")  # fmt: skip
    parser.add_argument("--keep-responses", action="store_true", help="with --top-logprobs: keep the answers of the "
                        "input, and tell how far they are what the target would say")  # fmt: skip
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th question, from the i-th")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.epilog = "example: d3d respond --model-path Qwen3-8B --input prompts.jsonl --output out-0.jsonl --shard 0/8"


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from d3d_jax.data.prompts import load_conversations
    from d3d_jax.data.responses import Counts, OnAnswer, Question, questions_of, respond, with_top_logprobs
    from d3d_jax.decoding.loading import open_pair
    from d3d_jax.errors import ConfigError
    from d3d_jax.models.cache import slots_past_end

    if args.keep_responses and not args.top_logprobs:
        raise ConfigError("--keep-responses stores nothing new without --top-logprobs K; name K, such as 16")
    index, count = _shard(args.shard)
    sampling = sampling_of(args)
    past_end = slots_past_end(1)
    if args.max_new_tokens + past_end >= args.max_len:
        raise ConfigError(f"--max-len {args.max_len} leaves no room for a prompt and {args.max_new_tokens} new tokens")
    devices = start_devices(args.device)
    pair = open_pair(args.model_path)
    if args.top_logprobs and args.top_logprobs > pair.num_token_ids:
        raise ConfigError(f"--top-logprobs {args.top_logprobs}, but the tokenizer has {pair.num_token_ids} ids")
    if args.keep_responses:
        return _label(args, pair, devices[0], (index, count))
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

    def answer(questions: Sequence[Question], on_answer: OnAnswer) -> None:
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
        if args.top_logprobs:
            from d3d_jax.data.top_logprobs import Teacher

            target, size = loaded.target, args.batch_size
            teacher = Teacher(target.params, target.config, args.top_logprobs, size, devices[0], jnp.dtype(args.dtype))
            answer = with_top_logprobs(answer, teacher, size)
        top = args.top_logprobs is not None
        counts = respond(asked, answer, args.output, longest_prompt=longest, top=top, on_counts=on_counts)
    print(f"{args.output}: {counts}")
    return 0


def _label(args: argparse.Namespace, pair: OpenedPair, device: Any, shard: tuple[int, int]) -> int:
    from itertools import islice

    import jax.numpy as jnp
    from rich.console import Console

    from d3d_jax.config import DecodeConfig
    from d3d_jax.data.documents import read_rows
    from d3d_jax.data.responses import label
    from d3d_jax.data.top_logprobs import Teacher

    err, dropped = Console(stderr=True), []
    target = load_with_progress(pair, DecodeConfig(mode="ar"), (device, device), args.dtype, err).target
    teacher = Teacher(target.params, target.config, args.top_logprobs, args.batch_size, device, jnp.dtype(args.dtype))

    def rows() -> Iterator[Row]:
        everyone = read_rows(args.input, pair.tokenizer, lambda *drop: dropped.append(drop))
        return islice(everyone, shard[0], None, shard[1])

    total = sum(1 for _ in rows())
    dropped.clear()
    with progress_bar(err, "rows", total) as advance:
        found = label(
            rows(), teacher, args.output, batch_size=args.batch_size, longest=args.max_len, on_row=lambda: advance()
        )
    print(
        f"{args.output}: {found.rows:,} rows, {found.skipped:,} skipped, longer than --max-len {args.max_len}; "
        f"{len(dropped)} turns dropped"
    )
    print(f"{found.share:.1%} of {found.tokens:,} response tokens are what the target holds for likeliest")
    if found.share < OWN_SHARE:
        print(
            f"warning: under {OWN_SHARE:.0%}: these are hardly the target's own responses, and a drafter trained on "
            "them foresees another model; let the target answer (without --keep-responses), or distil "
            "(loss.kd_weight)",
            file=sys.stderr,
        )
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

"""`d3d respond`: the target's own responses to the prompts of a conversations file.

Row i of the file samples with seed + i.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from d3d_jax.cli.pair_options import add_sampling_arguments, sampling_of

NAME = "respond"
HELP = "let the target answer prompts, to train a drafter on (JSONL, resumable)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", required=True, help="folder of the target, with its tokenizer")
    parser.add_argument("--input", required=True, help="JSONL of {'id', 'conversations'}, .gz too")
    parser.add_argument("--output", required=True, help="JSONL of token ids; lines already there are kept")
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--max-len", type=int, default=2048, help="cache slots a row: prompt and response")
    parser.add_argument("--batch-size", type=int, default=32)
    add_sampling_arguments(parser)
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th question, from the i-th")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.epilog = "example: d3d respond --model-path Qwen3-8B --input prompts.jsonl --output out-0.jsonl --shard 0/8"


def run(args: argparse.Namespace) -> int:
    import jax
    import jax.numpy as jnp
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from d3d_jax.checkpoints.convert import load
    from d3d_jax.checkpoints.special_tokens import read_eos_ids
    from d3d_jax.config import DecodeConfig
    from d3d_jax.data.chat import load_tokenizer
    from d3d_jax.data.prompts import load_conversations
    from d3d_jax.data.responses import questions, respond
    from d3d_jax.decoding.engine import Engine
    from d3d_jax.decoding.placement import Model
    from d3d_jax.errors import ConfigError

    index, count = _shard(args.shard)
    sampling = sampling_of(args)
    tokenizer = load_tokenizer(args.model_path)
    asked = questions(load_conversations(args.input), tokenizer)
    seeds = {question.id: (args.seed + row) % 2**32 for row, question in enumerate(asked)}
    asked = asked[index::count]
    stop = read_eos_ids(args.model_path)
    if args.max_new_tokens + 4 >= args.max_len:
        raise ConfigError(f"--max-len {args.max_len} leaves no room for a prompt and {args.max_new_tokens} new tokens")
    loaded = load(args.model_path, dtype=args.dtype)
    device = jax.devices()[0]
    engine = Engine(
        Model(loaded.config, loaded.params),
        None,
        DecodeConfig(mode="ar"),
        devices=(device, device),
        max_len=args.max_len,
        num_token_ids=len(tokenizer),
        dtype=jnp.dtype(args.dtype),
    )
    by_prompt = {tuple(question.prompt): seeds[question.id] for question in asked}

    def generate(prompts: list[list[int]]) -> list[tuple[list[int], bool]]:
        settings = [replace(sampling, seed=by_prompt[tuple(prompt)]) for prompt in prompts]
        completions = engine.generate(prompts, args.max_new_tokens, stop, settings)
        return [(list(c.ids), c.finish_reason == "stop") for c in completions]

    columns = (
        TextColumn("responses"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(asked), now="")
        longest = args.max_len - args.max_new_tokens - 4
        for counts in respond(asked, generate, args.output, batch_size=args.batch_size, longest_prompt=longest):
            finished = counts.answered + counts.truncated + counts.empty + counts.skipped
            progress.update(task, completed=finished, now=str(counts))
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

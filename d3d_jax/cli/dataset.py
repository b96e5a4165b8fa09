"""`d3d dataset`: JSONL -> a tokenised dataset folder to train from."""

from __future__ import annotations

import argparse

NAME = "dataset"
HELP = "tokenise responses or conversations (JSONL) into a dataset folder to train from, with a report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", required=True, nargs="+", metavar="FILE", help="JSONL of `d3d respond`, or of "
                        "{'id', 'conversations'}; .gz too")  # fmt: skip
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="folder of the target's tokenizer")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="leave longer rows out: row_length of training")
    parser.add_argument("--enable-thinking", action="store_true", help="render conversations with thinking on")
    parser.epilog = "example: d3d dataset --input responses-*.jsonl --output data/train --tokenizer Qwen3-8B"


def run(args: argparse.Namespace) -> int:
    from d3d_jax.data.builder import build_dataset
    from d3d_jax.errors import ConfigError

    if args.max_tokens is not None and args.max_tokens < 2:
        raise ConfigError(f"--max-tokens {args.max_tokens}: a row has a prompt and a response, 2 tokens at least")
    report = build_dataset(
        args.input,
        args.output,
        args.tokenizer,
        enable_thinking=args.enable_thinking,
        max_tokens=args.max_tokens,
    )
    print("\n".join(report.lines()))
    print(f"written to {args.output}; train from it with train_data: {args.output}")
    return 0

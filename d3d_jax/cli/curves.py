"""`d3d curves`: the curves of one or several training runs as a picture."""

from __future__ import annotations

import argparse

NAME = "curves"
HELP = "draw loss, accuracy, acceptance length and hit rate of training runs (PNG)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run, or NAME=output_dir")
    parser.add_argument("--output", required=True, metavar="FILE", help="image to write: .png, .svg or .pdf")
    parser.epilog = "example: d3d curves runs/drafter 'no AR term=runs/ablation' --output curves.png"


def run(args: argparse.Namespace) -> int:
    from d3d_jax.benchmarks.curves import draw, read_run
    from d3d_jax.cli.pair_options import check_image

    check_image(args.output, "--output")
    named = [text.rpartition("=") for text in args.runs]
    draw([read_run(path, name or None) for name, _, path in named], args.output)
    print(f"written to {args.output}")
    return 0

"""`d3d curves`: one or several training runs side by side, as a table and a picture."""

from __future__ import annotations

import argparse

NAME = "curves"
HELP = "compare training runs: a table, and a picture of loss, accuracy, acceptance length and hit rate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run, or NAME=output_dir")
    parser.add_argument("--output", metavar="FILE", help="picture to draw: .png, .svg or .pdf")
    parser.epilog = "example: d3d curves runs/drafter 'no AR term=runs/ablation' --output curves.png"


def run(args: argparse.Namespace) -> int:
    import sys

    from d3d_jax.benchmarks.curves import draw, read_run, table
    from d3d_jax.cli.pair_options import check_image

    check_image(args.output, "--output")
    named = [text.rpartition("=") for text in args.runs]
    runs = [read_run(path, name or None) for name, _, path in named]
    print(table(runs))
    if args.output:
        draw(runs, args.output)
        print(f"curves: {args.output}", file=sys.stderr)
    return 0

"""The `d3d` command: one module of this package for each subcommand.

A command module has NAME, HELP, `add_arguments(parser)` and `run(args) -> exit code`, and imports nothing heavy at
its top: help and refused arguments come at once, and flags of XLA can be set before JAX starts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from d3d_jax import __version__
from d3d_jax.errors import ConfigError, D3DError, nearest

COMMANDS = ("demo", "generate", "chat", "respond", "dataset", "train", "curves", "export", "convert", "doctor")


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage, so that every mistake is told in the same one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def build_parser() -> Parser:
    """The parser of all commands; `args.run` is the function of the one that was chosen."""
    parser = Parser(
        prog="d3d",
        description="Block-diffusion drafting in parallel with verification, for Qwen3, in JAX.",
        epilog="example: d3d demo      (each command has its own: d3d COMMAND --help)",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"d3d-jax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for name in COMMANDS:
        module = importlib.import_module(f"d3d_jax.cli.{name}")
        command = commands.add_parser(module.NAME, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 2 for a mistake that the user can mend, 130 when interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would miss PyTorch, which is not needed
    try:
        if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
            raise ConfigError(f"unknown command {argv[0]!r}{nearest(argv[0], COMMANDS)}")
        args = build_parser().parse_args(argv)
        if not hasattr(args, "run"):
            build_parser().print_help(sys.stderr)
            return 2
        return args.run(args)
    except D3DError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())

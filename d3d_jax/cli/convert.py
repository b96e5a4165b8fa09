"""`d3d convert`: a Hugging Face folder -> a checked one, or an orbax folder; and an orbax folder back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "convert"
HELP = "check a Hugging Face model folder and write it anew, in another type or as orbax; and back"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  d3d convert ~/Qwen3-0.6B --dry-run                  do the tensors fit the config?\n"
        "  d3d convert ~/Qwen3-0.6B out/bf16 --dtype bfloat16\n"
        "  d3d convert ~/Qwen3-0.6B out/orbax --orbax\n"
        "  d3d convert out/orbax out/hf                        an orbax folder is recognised"
    )
    parser.add_argument("source", metavar="SRC", help="Hugging Face folder, or one written with --orbax")
    parser.add_argument("destination", metavar="DST", nargs="?", help="folder to write; needed unless --dry-run")
    add_writing_arguments(parser)
    parser.add_argument("--orbax", action="store_true", help="write an orbax tree instead of safetensors")
    parser.add_argument(
        "--lm-head",
        choices=("strict", "ignore", "untie"),
        default="strict",
        help="a stored output matrix of a tied model: refuse it when it differs, drop it, or keep it",
    )
    parser.add_argument("--pad-vocab-to", type=int, metavar="N", help="add zero rows up to N to the embedding")
    parser.add_argument("--dry-run", action="store_true", help="check everything, write nothing")


def add_writing_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `d3d export` shares."""
    parser.add_argument(
        "--dtype",
        choices=("keep", "float32", "bfloat16", "float16"),
        default="keep",
        help="type of the tensors written",
    )
    parser.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB", help="size of one file at most")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that stands at DST")


def run(args: argparse.Namespace) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")  # moving bytes needs no accelerator

    from d3d_jax.checkpoints.atomic_folder import atomic_folder, check_destination
    from d3d_jax.checkpoints.convert import Source, as_dtype, fill
    from d3d_jax.checkpoints.export import dominant_dtype, outgoing, outgoing_from, write_side_files
    from d3d_jax.checkpoints.hf_config import carried_keys, has_drafter_config, read_drafter_config, read_model_config
    from d3d_jax.checkpoints.orbax_io import PARAMS_FOLDER, is_orbax, restore_tree, save_tree
    from d3d_jax.checkpoints.safetensors_io import write_tensors
    from d3d_jax.errors import ConfigError
    from d3d_jax.models.qwen3 import parameter_count

    folder = Path(args.source)
    destination = check_destination(args.destination, overwrite=args.overwrite) if args.destination else None
    if destination == folder.resolve():
        raise ConfigError(f"SRC and DST are both {folder}; name another folder to write")
    if destination is None and not args.dry_run:
        raise ConfigError("DST is missing; name a folder to write, or say --dry-run")
    dtype = as_dtype(args.dtype)
    drafter = read_drafter_config(folder) if has_drafter_config(folder) else None
    source = None
    if is_orbax(folder):
        if args.orbax or args.pad_vocab_to or args.lm_head != "strict":
            raise ConfigError(f"{folder} is orbax already; --orbax, --pad-vocab-to and --lm-head are for safetensors")
        config = read_model_config(folder)
        tensors = outgoing(restore_tree(folder / PARAMS_FOLDER, config), config, dtype)
        print(f"{len(tensors)} tensors read, {len(tensors)} used")
    else:
        source = Source(folder, lm_head=args.lm_head, pad_vocab_to=args.pad_vocab_to)
        config = source.config
        tensors = outgoing_from(source, dtype)
        print(source.ledger)
    kind = dominant_dtype(tensors)
    size = sum(tensor.nbytes for tensor in tensors) / 1e9
    what = f"drafter with blocks of {drafter.block_size}" if drafter else "model"
    print(f"{what}: {config.num_hidden_layers} layers, {parameter_count(config):,} parameters, {kind}, {size:.2f} GB")
    if args.dry_run or destination is None:
        print("dry run: nothing written")
        return 0
    with atomic_folder(destination, overwrite=args.overwrite) as partial, tensor_progress(len(tensors)) as advance:
        write_side_files(partial, config, kind, drafter=drafter, tokenizer_folder=folder, extras=carried_keys(folder))
        if source is not None and args.orbax:
            save_tree(partial / PARAMS_FOLDER, fill(source, dtype=dtype, on_tensor=advance))
        else:
            write_tensors(partial, tensors, max_shard_bytes=int(args.max_shard_gb * 1e9), on_tensor=advance)
    print(f"written: {destination}")
    return 0


@contextmanager
def tensor_progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr over `total` tensors; call what it gives with each tensor's name."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda name: progress.update(task, advance=1, description=name)

"""`d3d export`: a checkpoint of a training run -> a Hugging Face folder."""

from __future__ import annotations

import argparse

from d3d_jax.cli.convert import add_writing_arguments, tensor_progress

NAME = "export"
HELP = "write a checkpoint of a training run as a Hugging Face model folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "example:\n  d3d export runs/drafter out/drafter --dtype bfloat16 --target-model Qwen/Qwen3-8B"
    parser.add_argument("run_dir", metavar="RUN_DIR", help="output_dir of `d3d train`")
    parser.add_argument("destination", metavar="DST", help="folder to write")
    parser.add_argument("--step", type=int, metavar="N", help="training step; the newest complete one when not given")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer; the run's own when not given")
    parser.add_argument("--target-model", metavar="NAME", help="what the drafter drafts for, noted in its config")
    add_writing_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")  # moving bytes needs no accelerator

    from dataclasses import replace

    from d3d_jax.checkpoints.atomic_folder import check_destination
    from d3d_jax.checkpoints.export import save_params
    from d3d_jax.checkpoints.training_run import read_run
    from d3d_jax.errors import ConfigError

    check_destination(args.destination, overwrite=args.overwrite)
    trained = read_run(args.run_dir, args.step)
    drafter = trained.drafter
    if args.target_model:
        if drafter is None:
            raise ConfigError("--target-model is for drafters; this run trained a plain model")
        drafter = replace(drafter, target_model=args.target_model)
    total = 11 * trained.config.num_hidden_layers + (2 if trained.config.tie_word_embeddings else 3)
    with tensor_progress(total) as advance:
        count = save_params(
            args.destination,
            trained.params,
            trained.config,
            dtype=args.dtype,
            drafter=drafter,
            tokenizer_folder=args.tokenizer or trained.tokenizer_folder,
            extras=trained.extras,
            max_shard_bytes=int(args.max_shard_gb * 1e9),
            overwrite=args.overwrite,
            on_tensor=advance,
        )
    print(f"step {trained.step}: {count} tensors written to {args.destination}")
    if not (args.tokenizer or trained.tokenizer_folder):
        print("no tokenizer was copied: the run names none; add one with --tokenizer DIR")
    return 0

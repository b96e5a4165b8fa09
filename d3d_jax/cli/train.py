"""`d3d train`: one run from its configuration, or on from its last checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import sys

NAME = "train"
HELP = "train a target (next token) or a drafter (block diffusion); resumes by itself"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="YAML file; see configs/train/")
    parser.add_argument("overrides", nargs="*", help="a.b=c, such as optimizer.learning_rate=1e-4")
    parser.add_argument("--host-devices", type=int, help="split a CPU into this many devices")
    parser.add_argument("--multi-host", action="store_true", help="join the run's processes, found by JAX (SLURM, GKE, "
                        "TPU VM, Open MPI)")  # fmt: skip
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="join them by hand: where process 0 listens")
    parser.add_argument("--process", metavar="i/n", help="and which of how many this one is")
    parser.add_argument("--tensorboard", action="store_true", help="also write event files (watch.tensorboard=true)")
    parser.add_argument("--wandb", metavar="PROJECT", help="also tell Weights & Biases (watch.wandb_project)")
    parser.add_argument("--wandb-offline", action="store_true", help="without network, for `wandb sync` later")
    parser.add_argument("--plot", metavar="FILE", help="draw the run's curves into this image when it ends or stops")
    parser.add_argument("--dry-run", action="store_true", help="check configuration and data, then stop")
    parser.epilog = "example: d3d train --config configs/train/demo_drafter.yaml steps=200 --host-devices 2"


def run(args: argparse.Namespace) -> int:
    from d3d_jax.cli.pair_options import check_image
    from d3d_jax.config import TrainConfig, load

    check_image(args.plot, "--plot")
    config = load(TrainConfig, args.config, [*args.overrides, *_watching(args)])
    if args.host_devices:
        from d3d_jax.devices.host import prepare_cpu

        prepare_cpu(args.host_devices)
    from d3d_jax.devices.distributed import is_first, join_processes

    join_processes(args.coordinator, args.process, detect=args.multi_host)
    from d3d_jax.training.loop import train
    from d3d_jax.training.plan import plan_run

    if args.dry_run:
        plan = plan_run(config)
        print(f"{plan.report}; {plan.train.steps_per_epoch} steps an epoch, {config.steps} steps planned")
        return 0
    try:
        last = train(config)
    except BaseException as error:
        _end_all(error)
        raise
    if is_first():
        for name, value in last.items():
            print(f"{name}: {value:.4f}")
        if args.plot:
            from d3d_jax.benchmarks.curves import draw, read_run

            draw([read_run(config.output_dir)], args.plot)
            print(f"curves: {args.plot}")
    return 0


def _watching(args: argparse.Namespace) -> list[str]:
    """The flags as overrides of the configuration."""
    flags = {
        "watch.tensorboard=true": args.tensorboard,
        f"watch.wandb_project={json.dumps(args.wandb)}": args.wandb,
        "watch.wandb_mode=offline": args.wandb_offline,
    }
    return [override for override, given in flags.items() if given]


def _end_all(error: BaseException) -> None:
    """End this process at once if it is one of several, naming it.

    An orderly end would wait for the others, which wait for this one; without it they learn that it is gone.
    """
    from d3d_jax.devices.distributed import several, this_host

    if several():
        print(f"error: on {this_host()}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(getattr(error, "exit_code", 1))

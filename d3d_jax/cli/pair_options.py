"""Flags and first steps of the commands that decode with a pair of models."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from d3d_jax.devices.host import KINDS, device_groups, keep_programs, prepare_cpu
from d3d_jax.errors import CapacityError, CompatibilityError, ConfigError

if TYPE_CHECKING:
    import jax
    from rich.console import Console

    from d3d_jax.config import DecodeConfig, ModelConfig, SamplingParams
    from d3d_jax.decoding.loading import LoadedPair, OpenedPair
    from d3d_jax.decoding.placement import Devices

ASYNC_ONLY = ("miss", "outcomes", "bonus", "candidates", "row_budget")
DRAFTING = (*ASYNC_ONLY, "drafting", "on_draft_failure", "stall_s")
IMAGES = (".png", ".svg", ".pdf")
BACKENDS = ("auto", "xla", "mosaic_gpu", "triton", "mosaic_tpu")  # as AttentionConfig knows them
SLOT_STEP = 64  # cache sizes are multiples of this, so that runs alike share their programs


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def outcomes(text: str) -> str | int:
    """`all`, `auto`, or how many, for argparse."""
    return text if text in ("all", "auto") else positive(text)


def candidates(text: str) -> str | int:
    """`auto`, or how many, for argparse."""
    return text if text == "auto" else positive(text)


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Which pair, and how it decodes."""
    parser.add_argument("--model-path", metavar="DIR", help="folder of the target (default: the embedded pair)")
    parser.add_argument("--draft-model-path", metavar="DIR", help="folder of its drafter")
    parser.add_argument("--mode", choices=("ar", "sync", "async"), help="default: async with a drafter, else ar")
    parser.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="a turn (default: 256)")
    parser.add_argument("--block-size", type=positive, metavar="G", help="default: what the drafter was trained for")
    parser.add_argument("--enable-thinking", action="store_true", help="let the chat template ask for thoughts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-len", type=positive, metavar="S", help="cache slots: prompt, new tokens, two blocks")
    add_device_argument(parser)
    add_split_argument(parser)
    add_sampling_arguments(parser)
    add_drafting_arguments(parser)


def add_split_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N", help="devices to split the target over (default: 1)"
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens; 0 is off")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep a mass of P; 1 is off")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="drop below P x the likeliest; 0 is off")
    group.add_argument("--seed", type=int, default=0, help="same seed, same tokens, in every mode")


def add_drafting_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafting")
    group.add_argument(
        "--miss",
        choices=("keep", "redraft", "auto"),
        help="async: what to do when a bonus token was not foreseen; auto: what has been faster",
    )
    group.add_argument(
        "--outcomes",
        type=outcomes,
        metavar="all|M|auto",
        help="draft for all outcomes, the M likeliest, or what is fastest",
    )
    group.add_argument(
        "--bonus",
        choices=("masked", "anchored", "both"),
        help="a successor's first token: left open (default), given (a successor for each candidate), or both",
    )
    group.add_argument(
        "--candidates", type=candidates, metavar="K|auto", help="bonus tokens of an outcome to anchor on (default: 2)"
    )
    group.add_argument("--row-budget", type=positive, metavar="N", help="most rows that successors may take in a pass")
    group.add_argument(
        "--drafting",
        choices=("always", "auto"),
        help="auto: the target goes alone while that is faster, as with many rows (default: always)",
    )
    group.add_argument(
        "--on-draft-failure",
        choices=("error", "plain", "retry"),
        help="plain: the target goes on alone; retry: drafting begins anew first (default: error)",
    )
    group.add_argument(
        "--stall-s", type=float, metavar="S", help="seconds without a result that count as a failure (default: none)"
    )


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attention-backend", choices=BACKENDS, default="auto", help="used or refused (default: that of the device)"
    )
    parser.add_argument("--device", choices=KINDS, help="refused when it is not there (default: the best that is)")


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Raises ConfigError for settings that contradict each other."""
    from d3d_jax.config import SamplingParams

    return SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)


def decode_config(args: argparse.Namespace, mode: str, block_size: int | None, **fields: object) -> DecodeConfig:
    """The settings of one mode; drafting flags that were not given keep their defaults."""
    from d3d_jax.config import DecodeConfig, from_mapping

    values = {name: value for name in DRAFTING if (value := getattr(args, name, None)) is not None}
    values["attention"] = {"backend": args.attention_backend}
    if block_size is not None:
        values["block_size"] = block_size
    return from_mapping(DecodeConfig, {"mode": mode, **values, **fields})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse_drafting_contradictions(args: argparse.Namespace) -> None:
    """Flags of `add_pair_arguments` that do not go together.

    Raises:
        ConfigError: naming them.
    """
    if args.draft_model_path and not args.model_path:
        raise ConfigError("--draft-model-path needs --model-path, the target that it drafts for")
    if args.mode == "ar" and args.draft_model_path:
        raise ConfigError("--mode ar uses no drafter; leave --draft-model-path or --mode out")
    if args.mode == "ar" or (args.model_path and not args.draft_model_path):
        for name in (*DRAFTING, "block_size"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{flag(name)} is for drafting, but there is no drafter; leave it out, or give one")
    given = [flag(name) for name in ASYNC_ONLY if getattr(args, name) is not None]
    if args.mode == "sync" and given:
        raise ConfigError(f"{', '.join(given)}: for --mode async alone; leave them out")
    if args.candidates is not None and args.bonus in (None, "masked"):
        raise ConfigError("--candidates is for anchored successors; add --bonus anchored or --bonus both")


def open_chosen_pair(args: argparse.Namespace) -> tuple[OpenedPair, DecodeConfig]:
    """The checked pair and the settings of the mode; nothing is loaded yet."""
    from d3d_jax import demo
    from d3d_jax.decoding.loading import open_pair

    target = args.model_path or demo.target_folder()
    draft = args.draft_model_path
    if args.model_path is None and args.mode != "ar":
        draft = demo.drafter_folder()
    mode = args.mode or ("async" if draft else "ar")
    if mode != "ar" and draft is None:
        raise CompatibilityError(f"--mode {mode} needs --draft-model-path; or use --mode ar")
    pair = open_pair(target, draft, block_size=args.block_size)
    return pair, decode_config(args, mode, pair.block_size)


def start_devices(kind: str | None) -> tuple[jax.Device, jax.Device]:
    """Devices of target and drafter; two host cores on CPU. Comes before anything else that JAX does.

    Raises:
        DeviceError: when the kind is not there.
    """
    (target,), drafter = start_device_groups(kind, 1)
    return target, drafter


def start_device_groups(kind: str | None, parts: int) -> tuple[tuple[jax.Device, ...], jax.Device]:
    """As :func:`start_devices`, with `parts` devices for the target."""
    if kind in (None, "cpu"):
        prepare_cpu(parts + 1)
    devices = device_groups(kind, parts)
    keep_programs()
    import jax

    # An accelerator would round float32 products to fewer bits, and the modes' tokens might part.
    jax.config.update("jax_default_matmul_precision", "highest")
    return devices


def plan_slots(
    prompts: list[list[int]], max_new_tokens: int, config: ModelConfig, block_size: int | None, max_len: int | None
) -> int:
    """Cache slots of a row: what was asked for, or what the longest prompt needs.

    Raises:
        CapacityError: naming the prompt that fits neither the cache nor the model's context.
    """
    from d3d_jax.decoding.placement import check_prompt
    from d3d_jax.models.cache import slots_past_end

    beyond = slots_past_end(block_size or 1)
    longest = max(len(prompt) for prompt in prompts)
    if max_len is None:
        max_len = -(-(longest + max_new_tokens + beyond) // SLOT_STEP) * SLOT_STEP
    for number, prompt in enumerate(prompts):
        check_prompt(f"prompt {number}", prompt, max_new_tokens, config, beyond, max_len)
    return max_len


def check_writable(path: str | None, flag: str) -> None:
    """Refuse an output file that cannot be written, before the work whose result it would hold.

    Raises:
        ConfigError: naming the flag.
    """
    if path is None:
        return
    parent = Path(path).absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{flag} {path}: the folder {parent} does not exist; make it first")
    if Path(path).is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file in it")


def check_image(path: str | None, flag: str) -> None:
    """As :func:`check_writable`, for a picture."""
    check_writable(path, flag)
    if path is not None and Path(path).suffix.lower() not in IMAGES:
        raise ConfigError(f"{flag} {path}: expected a name that ends in one of {', '.join(IMAGES)}")


def load_with_progress(
    pair: OpenedPair, decode: DecodeConfig, devices: tuple[Devices, Devices], dtype: str, console: Console
) -> LoadedPair:
    """Load the tensors under a progress bar, once it is certain that the devices can compute with them."""
    pair.check_devices(decode, devices, dtype)
    with progress_bar(console, "loading", pair.tensor_count()) as advance:
        return pair.load(dtype, on_tensor=lambda name: advance())


@contextmanager
def progress_bar(console: Console, text: str, total: int) -> Iterator:
    """A bar on a terminal that vanishes at the end; call what it gives at each step, or for several with `by`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total)

        def advance(now: str | None = None, by: int = 1) -> None:
            progress.update(task, advance=by, description=text if now is None else f"{text} {now}")

        yield advance


def too_long(error: CapacityError, name: str) -> CapacityError:
    """The same error, naming the prompt as the user knows it."""
    return CapacityError(str(error).replace("prompt 0", f"prompt {name}", 1))

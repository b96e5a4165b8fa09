"""`d3d demo`: questions decoded three ways side by side, with the same tokens and the time of each."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from d3d_jax.cli.pair_options import (
    ASYNC_ONLY,
    add_device_argument,
    add_drafting_arguments,
    add_sampling_arguments,
    check_writable,
    decode_config,
    load_with_progress,
    plan_slots,
    positive,
    progress_bar,
    sampling_of,
    start_devices,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from d3d_jax.benchmarks.runner import Task
    from d3d_jax.config import DecodeConfig
    from d3d_jax.data.prompts import Prompt
    from d3d_jax.decoding.engine import Engine
    from d3d_jax.decoding.loading import OpenedPair
    from d3d_jax.decoding.observer import Span
    from d3d_jax.decoding.state import Completion

NAME = "demo"
HELP = "the embedded pair on GSM8K questions: autoregressive, synchronous and asynchronous side by side"
DTYPE = "float32"  # in which the modes' tokens are equal by construction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=positive, default=8, metavar="N", help="questions (default: 8)")
    parser.add_argument("--max-new-tokens", type=positive, default=192, metavar="N", help="a question (default: 192)")
    parser.add_argument("--output-json", metavar="F", help="write every figure to this file")
    parser.add_argument("--timeline", metavar="F.png", help="draw the two devices' rounds into this file")
    parser.add_argument("--target", metavar="DIR", help="another target than the embedded one; needs --draft")
    parser.add_argument("--draft", metavar="DIR", help="its drafter")
    parser.add_argument("--dataset", metavar="F.jsonl", help="other prompts: lines of {'id', 'turns': [text]}")
    add_device_argument(parser)
    add_sampling_arguments(parser)
    add_drafting_arguments(parser)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "exit code 1 when any token differs from autoregressive decoding\n\n"
        "examples:\n"
        "  d3d demo\n"
        "  d3d demo --temperature 0.8 --num-prompts 4 --output-json demo.json --timeline demo.png"
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from d3d_jax.errors import ConfigError

    out, err = Console(highlight=False), Console(stderr=True)
    if not out.is_terminal:
        out.width = 110
    if bool(args.target) != bool(args.draft):
        raise ConfigError("--target and --draft go together; name both, or neither for the embedded pair")
    if args.drafting == "auto":
        raise ConfigError(
            "--drafting auto: the demo tells what drafting brings, so that it always drafts; leave it out"
        )
    sampling = sampling_of(args)
    check_writable(args.output_json, "--output-json")
    check_writable(args.timeline, "--timeline")
    devices = start_devices(args.device)

    from d3d_jax import demo
    from d3d_jax.benchmarks.runner import Task
    from d3d_jax.data.chat import encode_prompt
    from d3d_jax.data.prompts import load_prompts
    from d3d_jax.decoding.loading import open_pair

    paths = (args.target, args.draft) if args.target else (demo.target_folder(), demo.drafter_folder())
    pair = open_pair(*paths)
    decode = {mode: decode_config(args, mode, pair.block_size) for mode in ("ar", "sync", "async")}
    questions = load_prompts(args.dataset or demo.prompts_file())
    if len(questions) < args.num_prompts:
        raise ConfigError(f"--num-prompts {args.num_prompts}: there are {len(questions)} prompts; ask for fewer")
    questions = questions[: args.num_prompts]
    prompts = [encode_prompt(pair.tokenizer, question.messages()) for question in questions]
    max_len = plan_slots(prompts, args.max_new_tokens, pair.target.config, pair.block_size, None)
    task = Task(tuple(map(tuple, prompts)), args.max_new_tokens, pair.stop_ids, sampling)
    print_header(out, args, pair, devices, decode["async"])

    loaded = load_with_progress(pair, decode["async"], devices, DTYPE, err)

    from d3d_jax.decoding.engine import Engine

    def engine(mode: str, step_by_step: bool = False) -> Engine:
        return Engine(
            loaded.target,
            None if mode == "ar" else loaded.drafter,
            decode_config(args, mode, pair.block_size, step_by_step=step_by_step),
            devices=devices if mode == "async" else (devices[0], devices[0]),
            max_len=max_len,
            num_token_ids=loaded.num_token_ids,
        )

    engines = {mode: engine(mode) for mode in decode}
    result, first, spans = measured(err, engines, engine("sync", step_by_step=True), task, devices)
    result["config"] = settings(args, pair, decode, max_len)
    result["prompts"]["question_ids"] = [question.id for question in questions]
    show_answer(out, questions[0], loaded.tokenizer, first)
    show_result(out, result)
    if args.output_json:
        from d3d_jax.benchmarks.report import write_json

        write_json(result, args.output_json)
        out.print(f"figures: {args.output_json}")
    if args.timeline:
        from d3d_jax.benchmarks.plots import timeline

        hidden = result["modes"]["async"].get("draft_hidden")
        words = f"{pair_in_words(pair)}; {result['device']['words']}"
        timeline(spans, args.timeline, hidden=hidden, subtitle=words)
        out.print(f"timeline: {args.timeline}")
    return 0 if all(mode["identical_to_ar"] == 1 for mode in result["modes"].values()) else 1


def measured(
    err: Console, engines: dict[str, Engine], sync_steps: Engine, task: Task, devices: tuple
) -> tuple[dict[str, Any], Completion, Sequence[Span]]:
    """The result without its config, the first asynchronous output, and the spans of a watched one."""
    from d3d_jax.benchmarks.parts import watched
    from d3d_jax.benchmarks.provenance import device_facts, git_revision, prompts_hash, versions
    from d3d_jax.benchmarks.runner import Lane, run_lanes
    from d3d_jax.benchmarks.summary import PartTimes, summarize
    from d3d_jax.decoding.observer import StepByStep, Timeline

    count = {"ar": 1, "sync": 1, "async": len(set(devices))}
    lanes = {mode: Lane(engine) for mode, engine in engines.items()}
    lanes["sync, step by step"] = Lane(sync_steps, StepByStep)
    lanes["async, step by step"] = Lane(engines["async"], StepByStep)
    lanes["async, watched"] = Lane(engines["async"], Timeline)
    with progress_bar(err, "decoding", len(lanes) * (1 + len(task.prompts))) as advance:
        run = run_lanes(lanes, task, devices=devices, advance=advance)
    seen = {name: watched(one.spans) for name, one in run.lanes.items() if one.spans}
    together = seen["async, watched"]
    parts = {
        "sync": PartTimes(seen["sync, step by step"]),
        "async": PartTimes(seen["async, step by step"], together if count["async"] > 1 else None),
    }
    result = {
        **summarize(run, engines["async"].decode.block_size, count, parts),
        "device": device_facts(devices),
        "versions": versions(),
        "git_revision": git_revision(),
        "prompts": {"count": len(task.prompts), "sha256": prompts_hash(task.prompts)},
    }
    return result, run.lanes["async"].completions[0], together.spans


def settings(args: argparse.Namespace, pair: OpenedPair, decode: dict, max_len: int) -> dict[str, Any]:
    """What the figures depend on besides devices and versions."""
    from d3d_jax.config import to_mapping

    assert pair.drafter is not None
    return {
        "target": {"path": args.target or "embedded", **to_mapping(pair.target.config)},
        "drafter": {
            "path": args.draft or "embedded",
            **to_mapping(pair.drafter.config),
            **to_mapping(pair.drafter_config),
        },
        "dataset": args.dataset or "embedded GSM8K test questions",
        "dtype": DTYPE,
        "enable_thinking": False,
        "batch_size": 1,
        "max_new_tokens": args.max_new_tokens,
        "cache_slots": max_len,
        "sampling": to_mapping(sampling_of(args)),
        "decode": {mode: to_mapping(one) for mode, one in decode.items()},
    }


def pair_in_words(pair: OpenedPair) -> str:
    from d3d_jax.models.qwen3 import parameter_count

    assert pair.drafter is not None  # --target and --draft go together
    target, drafter = (parameter_count(source.config) / 1e6 for source in (pair.target, pair.drafter))
    return f"{target:.1f}M target, {drafter:.1f}M drafter, blocks of {pair.block_size}"


def print_header(
    out: Console, args: argparse.Namespace, pair: OpenedPair, devices: tuple, decode: DecodeConfig
) -> None:
    from rich.text import Text

    from d3d_jax.devices.host import describe

    how = f"temperature {args.temperature:g}, seed {args.seed}" if args.temperature else "greedy"
    which = "the embedded pair" if not args.target else f"{args.target} with {args.draft}"
    shared = "" if len(set(devices)) > 1 else "; target and drafter share it"
    out.print(Text("d3d demo", style="bold"))
    out.print(f"  models    {which}: {pair_in_words(pair)}", markup=False)
    out.print(f"  prompts   {args.num_prompts}, up to {args.max_new_tokens} new tokens each, {how}, {DTYPE}")
    out.print(f"  devices   {describe(devices)}{shared}")
    chosen = [f"{name} {value}" for name in ASYNC_ONLY if (value := getattr(decode, name)) is not None]
    out.print(f"  async     {', '.join(chosen)}", markup=False)


def show_answer(out: Console, question: Prompt, tokenizer: Any, completion: Completion) -> None:
    """The question and the asynchronous answer to it, its tokens told apart by colour."""
    from rich.text import Text

    from d3d_jax.cli.answer import coloured, legend
    from d3d_jax.decoding.text import pieces

    own = completion.bonus_positions
    out.print(Text(f"\nQuestion {question.id}", style="bold"))
    out.print(Text(question.turns[0]))
    out.print(Text("\nAnswer", style="bold"))
    out.print(coloured(pieces(tokenizer, completion.ids, skip_special_tokens=True), own))
    out.print(Text.assemble(("\nTokens: ", "dim"), legend(len(completion.ids), own)), "\n", sep="")


def show_result(out: Console, result: dict[str, Any]) -> None:
    from d3d_jax.benchmarks.report import sentences, table

    out.print(table(result))
    for text in sentences(result):
        out.print(text, markup=False)
    parted = [mode for mode, one in result["modes"].items() if one["identical_to_ar"] != 1]
    if parted:
        print(f"error: tokens differ from autoregressive decoding in mode {', '.join(parted)}", file=sys.stderr)

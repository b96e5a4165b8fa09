"""`d3d doctor`: what is installed and what is missing, which devices there are, and whether a pair fits on them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from d3d_jax.cli.pair_options import positive

NAME = "doctor"
HELP = "devices, versions, what to install, and the memory that a pair of models needs"
EXTRAS = {  # extra -> (modules that it brings, what it is for)
    "train": (("tensorflow_datasets", "array_record", "grain"), "datasets on disk and their loading"),
    "cuda12": (("jax_cuda12_plugin",), "NVIDIA GPUs, CUDA 12"),
    "cuda13": (("jax_cuda13_plugin",), "NVIDIA GPUs, CUDA 13"),
    "tpu": (("libtpu",), "TPUs"),
    "test": (("pytest", "hypothesis"), "the tests"),
}
NEEDED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "tokenizers", "safetensors")
NEEDED += ("numpy", "pyyaml", "jinja2", "rich", "matplotlib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", metavar="DIR", help="a target: plan the memory it needs")
    parser.add_argument("--draft-model-path", metavar="DIR", help="its drafter")
    parser.add_argument("--max-len", type=positive, default=4096, metavar="S", help="cache slots a row (default: 4096)")
    parser.add_argument("--batch", type=positive, default=1, metavar="B", help="rows decoded together (default: 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "exit code 1 when something that is needed is missing or broken\n\n"
        "example:\n"
        "  d3d doctor --model-path Qwen3-8B --draft-model-path D3D-1.7B-8B --max-len 8192 --batch 4"
    )


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # looking takes no memory from others
    sections: list[tuple[str, Callable[[], bool]]] = [
        ("versions", report_versions),
        ("devices", report_devices),
        ("extras", report_extras),
        ("embedded pair", report_demo),
    ]
    if args.model_path or args.draft_model_path:
        sections.append(("memory", lambda: report_memory(args)))
    healthy = True
    for title, report in sections:
        print(title)
        try:
            healthy &= report()
        except Exception as error:  # whatever a broken installation throws is what is to be told
            healthy = False
            line("!!", f"{type(error).__name__}: {' '.join(str(error).split())}")
    print("all well" if healthy else "something is missing or broken: see the lines marked !!")
    return 0 if healthy else 1


def line(mark: str, text: str) -> None:
    print(f"  {mark:2}  {text}")


def report_versions() -> bool:
    """Python, this package and what it needs, against the bounds that it asks for."""
    from d3d_jax import __version__

    ok = sys.version_info >= (3, 11)
    line("ok" if ok else "!!", f"python {platform.python_version()}" + ("" if ok else "; 3.11 or newer is needed"))
    line("ok", f"d3d-jax {__version__}")
    bounds = requirements()
    for name in NEEDED:
        bound = bounds.get(name, "")
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            ok = False
            line("!!", f"{name} is not installed; pip install '{name}{bound}'")
            continue
        fits = satisfies(found, bound)
        ok &= fits
        line("ok" if fits else "!!", f"{name} {found}" + ("" if fits else f"; pip install '{name}{bound}'"))
    return ok


def requirements() -> dict[str, str]:
    """Version bounds by name, as this package's metadata has them; empty when it runs from a bare source tree."""
    try:
        from packaging.requirements import Requirement

        wanted = [Requirement(text) for text in metadata.requires("d3d-jax") or ()]
    except (ImportError, metadata.PackageNotFoundError):
        return {}
    return {one.name: str(one.specifier) for one in wanted if one.marker is None}


def satisfies(version: str, bound: str) -> bool:
    if not bound:
        return True
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(bound).contains(version, prereleases=True)


def report_devices() -> bool:
    """What JAX finds, kind by kind."""
    import jax

    devices = jax.devices()
    for kind in dict.fromkeys((device.platform, device.device_kind) for device in devices):
        alike = [device for device in devices if (device.platform, device.device_kind) == kind]
        line("ok", f"{len(alike)} x {kind[1]} ({kind[0]}){memory_words(alike[0])}")
    if devices[0].platform == "cpu":
        from d3d_jax.devices.host import processor

        line("ok", f"{os.cpu_count()} cores: {processor()}")
        line("--", "no accelerator: figures from here say nothing about one")
        if os.path.exists("/dev/nvidiactl"):
            line(
                "!!", "an NVIDIA GPU is there, but this JAX cannot use it; pip install 'd3d-jax[cuda12]' (or [cuda13])"
            )
            return False
    elif len(devices) == 1:
        line("--", "one device: target and drafter share it, so nothing overlaps")
    return True


def memory_words(device: Any) -> str:
    stats = device.memory_stats() or {}
    return f", {stats['bytes_limit'] / 1e9:.0f} GB for JAX" if stats.get("bytes_limit") else ""


def report_extras() -> bool:
    """Extras are nobody's duty: a missing one is no fault."""
    for extra, (modules, purpose) in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            line("--", f"{extra}: not installed ({purpose}); pip install 'd3d-jax[{extra}]'")
        else:
            line("ok", f"{extra}: installed ({purpose})")
    return True


def report_demo() -> bool:
    from d3d_jax import demo
    from d3d_jax.decoding.loading import open_pair

    pair = open_pair(demo.target_folder(), demo.drafter_folder())
    demo.prompts_file()
    line("ok", f"{pair.tensor_count()} tensors, blocks of {pair.block_size}; run d3d demo")
    return True


def report_memory(args: argparse.Namespace) -> bool:
    """Weights, cache and logits of each model, from config.json alone."""
    from d3d_jax.benchmarks.memory_plan import plan
    from d3d_jax.checkpoints.hf_config import read_drafter_config, read_model_config

    drafter = read_drafter_config(args.draft_model_path) if args.draft_model_path else None
    block_size = drafter.block_size if drafter else 1
    line("--", f"{args.dtype}, batch {args.batch}, {args.max_len} slots a row, blocks of {block_size}; in GB:")
    line("", f"{'':8} {'weights':>9} {'cache':>9} {'logits':>9} {'total':>9}")
    total = 0
    for name, path, block in (("target", args.model_path, None), ("drafter", args.draft_model_path, drafter)):
        if path is None:
            continue
        needs = plan(
            read_model_config(path), block, block_size=block_size, max_len=args.max_len, batch=args.batch,
            dtype=args.dtype,
        )  # fmt: skip
        parts = (needs.weights, needs.cache, needs.logits, needs.total)
        line("", f"{name:8} " + " ".join(f"{part / 1e9:9.2f}" for part in parts))
        total += needs.total
    line("", f"together {total / 1e9:.2f} GB, on one device or on two; what the compiler needs in between comes on top")
    return True

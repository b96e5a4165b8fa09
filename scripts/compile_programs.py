"""Compile the programs of decoding for H200, v5e and v6e without the devices; write what they do to memory as a table.

    python scripts/compile_programs.py                                       # every case; results are kept
    python scripts/compile_programs.py v5e:8B:verify --layers 2 --results -  # one, quickly; its JSON goes to stdout

Needs `libtpu` (TPU) or `jax-cuda13-plugin`, `jax-cuda13-pjrt` and `nvidia-cuda-nvcc` 13.0 (GPU); see kernels/README.md.
Exit code 1 when a program breaks a limit, 3 when a compiler is not there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- programs: begin -->", "<!-- programs: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="device:model:program; all when none is named")
    parser.add_argument("--layers", type=int, help="so many layers instead of the model's own")
    parser.add_argument("--results", default="compiled_programs.json", metavar="F", help="JSON file, or - for stdout")
    parser.add_argument("--document", type=Path, metavar="F.md", help="put the table between its two marks")
    options = parser.parse_args()

    from d3d_kernels import ahead_of_time

    ahead_of_time.prepare(None)

    from d3d_jax.benchmarks.compiled_programs import CASES, Case, as_table, compile_case
    from d3d_jax.config import ModelConfig, load

    cases = [Case.parse(text) for text in options.cases] or list(CASES)
    file = None if options.results == "-" else Path(options.results)
    results = json.loads(file.read_text()) if file is not None and file.exists() else {}
    for case in cases:
        if str(case) not in results:
            name = case.model.lower().replace(".", "_")
            config = load(ModelConfig, ROOT / "configs" / "model" / f"qwen3_{name}.yaml")
            try:
                results[str(case)] = compile_case(case, config, options.layers)
            except ahead_of_time.Unavailable as reason:
                print(f"{case}: {reason}", file=sys.stderr)
                return 3
            if file is not None:
                file.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{case}: {'; '.join(results[str(case)]['faults']) or 'within its limits'}", file=sys.stderr, flush=True)
    found = [results[str(case)] for case in cases]
    if file is None:
        print(json.dumps(found))
    if options.document is not None:
        before, rest = options.document.read_text().split(BEGIN)
        options.document.write_text(f"{before}{BEGIN}\n{as_table(found)}\n{END}{rest.split(END)[1]}")
    return int(any(one["faults"] for one in found))


if __name__ == "__main__":
    sys.exit(main())

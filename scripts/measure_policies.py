"""Acceptance length and hit rate of the policies of mode `async`, on the embedded pair: prints a table in Markdown.

    python scripts/measure_policies.py [--num-prompts 32] [--new-tokens 192]

Neither depends on the machine; `d3d demo` measures the time of a policy.
"""

from __future__ import annotations

import argparse

from d3d_jax import demo
from d3d_jax.config import SamplingParams
from d3d_jax.data.chat import encode_prompt
from d3d_jax.data.prompts import load_prompts
from d3d_jax.decoding.branches import num_branches
from d3d_jax.decoding.engine import Engine
from d3d_jax.devices.host import device_pair, prepare_cpu

MAX_LEN, ROWS = 512, 8
POLICIES = (
    {},
    {"outcomes": 3},
    {"bonus": "both", "candidates": 1},
    {"bonus": "both", "candidates": 3},
    {"bonus": "both", "candidates": 3, "outcomes": 3, "row_budget": 48},
    {"bonus": "anchored", "candidates": 3, "row_budget": 64},
    {"bonus": "anchored", "candidates": 3},
    {"miss": "keep"},
    {"miss": "keep", "bonus": "both", "candidates": 3},
    {"miss": "keep", "bonus": "both", "candidates": 3, "outcomes": 3, "row_budget": 64},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=192)
    args = parser.parse_args()
    prepare_cpu(1)
    device, _ = device_pair(None)
    questions = load_prompts(demo.prompts_file())[: args.num_prompts]
    print("| policy | rows of a pass | tau | hit rate |\n|---|---|---|---|")
    for policy in ({"mode": "sync"}, *POLICIES):
        settings = {"mode": "async", **policy}
        engine = Engine.from_pretrained(
            demo.target_folder(),
            demo.drafter_folder(),
            devices=(device, device),
            max_batch=ROWS,
            max_len=MAX_LEN,
            **settings,
        )
        prompts = [encode_prompt(engine.tokenizer, question.messages()) for question in questions]
        done = engine.generate(prompts, SamplingParams(max_tokens=args.new_tokens))
        rounds = [verified for one in done for verified in one.rounds]
        tau = sum(r.accepted + 1 for r in rounds) / len(rounds)
        hits = [r.hit for r in rounds if r.hit is not None]
        size = engine.decode.block_size
        blocks = 2 if settings["mode"] == "sync" else 1 + num_branches(engine.decode)
        words = ", ".join(f"{name} {value}" for name, value in settings.items())
        rate = f"{sum(hits) / len(hits):.2f}" if hits else ""
        print(f"| {words} | {size * blocks} | {tau:.2f} | {rate} |", flush=True)


if __name__ == "__main__":
    main()

"""Tokens a second of the embedded pair, by mode and number of rows: prints a table in Markdown.

    python scripts/measure_batches.py [--num-prompts 32] [--rows 1 8]

Every engine decodes the same prompts, all submitted at once, after its programs are compiled; prefill is inside.
Break-even is the tau from which on a mode is faster than the target alone with as many rows.
"""

from __future__ import annotations

import argparse
import time

from d3d_jax import demo
from d3d_jax.benchmarks.provenance import versions
from d3d_jax.config import SamplingParams
from d3d_jax.data.chat import encode_prompt
from d3d_jax.data.prompts import load_prompts
from d3d_jax.decoding.engine import Engine
from d3d_jax.decoding.policies import break_even_tau
from d3d_jax.devices.host import describe, device_pair, prepare_cpu

MAX_LEN, NEW_TOKENS = 512, 192
MODES = {
    "ar": {"mode": "ar"},
    "sync": {"mode": "sync"},
    "async": {"mode": "async"},
    "async, anchored": {"mode": "async", "bonus": "anchored", "candidates": 3, "row_budget": 64},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    prepare_cpu(2)
    devices, params = device_pair(None), SamplingParams(max_tokens=NEW_TOKENS)
    questions = load_prompts(demo.prompts_file())[: args.num_prompts]
    expected, base = None, {}
    print(f"{describe(devices)}; jax {versions()['jax']}; {len(questions)} GSM8K questions, greedy, float32\n")
    print(
        "| mode | rows | tok/s | over one row | over AR, same rows | tau | break-even |\n|---|---|---|---|---|---|---|"
    )
    for name, settings in MODES.items():
        for rows in args.rows:
            drafter = None if name == "ar" else demo.drafter_folder()
            on = devices if settings["mode"] == "async" else (devices[0], devices[0])
            engine = Engine.from_pretrained(
                demo.target_folder(), drafter, devices=on, max_batch=rows, max_len=MAX_LEN, **settings
            )
            prompts = [encode_prompt(engine.tokenizer, question.messages()) for question in questions]
            engine.warm_up([len(prompt) for prompt in prompts], [params])
            begin = time.perf_counter()
            found = engine.generate(prompts, params)
            rate = sum(len(one.ids) for one in found) / (time.perf_counter() - begin)
            base[name, rows] = rate
            expected = expected or [one.ids for one in found]
            assert [one.ids for one in found] == expected, f"{name} with {rows} rows gives other tokens"
            rounds = [verified for one in found for verified in one.rounds]
            tau = sum(r.accepted + 1 for r in rounds) / len(rounds) if rounds else 0.0
            shown = f"{tau:.2f} | {break_even_tau(tau, rate, base['ar', rows]):.2f}" if rounds else "|"
            over_one, over_ar = rate / base[name, args.rows[0]], rate / base["ar", rows]
            print(f"| {name} | {rows} | {rate:.0f} | {over_one:.2f}x | {over_ar:.2f}x | {shown} |", flush=True)


if __name__ == "__main__":
    main()

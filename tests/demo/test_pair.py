"""The embedded pair as it is shipped: exact in every mode, drafting well, small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import d3d_jax.demo as demo
from d3d_jax.acceptance.metrics import Sample, measure
from d3d_jax.acceptance.oracle import draft_everywhere
from d3d_jax.acceptance.walk import samples
from d3d_jax.config import DecodeConfig, SamplingParams
from d3d_jax.data.chat import encode_prompt
from d3d_jax.data.packing import Document, pack
from d3d_jax.data.prompts import load_prompts
from d3d_jax.decoding.engine import Engine
from d3d_jax.decoding.loading import load_pair

LANES = {
    "ar": (DecodeConfig(mode="ar"), 1),
    "sync": (DecodeConfig(mode="sync", block_size=8), 1),
    "sync-two-devices": (DecodeConfig(mode="sync", block_size=8), 2),
    "async-redraft": (DecodeConfig(mode="async", block_size=8), 2),
    "async-keep": (DecodeConfig(mode="async", block_size=8, miss="keep"), 2),
    "async-one-device": (DecodeConfig(mode="async", block_size=8, outcomes=3), 1),
}
everywhere = jax.jit(draft_everywhere, static_argnums=(2, 3, 4))
SETTINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, seed=3)}


def settings_of(lane: str) -> dict[str, SamplingParams]:
    """Sampling is another program each: it is shown where the modes differ most."""
    return SETTINGS if lane in ("ar", "sync", "async-redraft") else {"greedy": SETTINGS["greedy"]}


@pytest.fixture(scope="module")
def completions():
    """Of every lane and setting, the completions of four GSM8K test questions."""
    pair = load_pair(demo.target_folder(), demo.drafter_folder())
    prompts = [encode_prompt(pair.tokenizer, prompt.messages()) for prompt in load_prompts(demo.prompts_file())[:4]]
    found = {}
    for name, (decode, devices) in LANES.items():
        places = (jax.devices()[0], jax.devices()[devices - 1])
        engine = Engine(
            pair.target,
            pair.drafter,
            decode,
            devices=places,
            max_len=384,
            num_token_ids=pair.num_token_ids,
            stop_ids=pair.stop_ids,
        )
        for setting, sampling in settings_of(name).items():
            found[name, setting] = [engine.generate([p], replace(sampling, max_tokens=128))[0] for p in prompts]
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("lane", "setting"), [(name, setting) for name in LANES if name != "ar" for setting in settings_of(name)]
)
def test_every_mode_gives_the_targets_own_tokens(completions, lane, setting):
    assert [c.ids for c in completions[lane, setting]] == [c.ids for c in completions["ar", setting]]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_drafts_are_as_good_as_the_model_card_says(completions):
    """Right output can hide a starved drafter: acceptance has a floor of its own."""
    rounds = [r for c in completions["sync", "greedy"] for r in c.rounds]
    assert sum(r.accepted + 1 for r in rounds) / len(rounds) > 3.5
    rounds = [r for c in completions["async-redraft", "greedy"] for r in c.rounds]
    assert sum(r.accepted + 1 for r in rounds) / len(rounds) > 2.9
    assert sum(r.hit is True for r in rounds) / len(rounds) > 0.7


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_synchronous_rounds_do_not_depend_on_the_number_of_programs(completions):
    one, two = (completions[lane, "greedy"] for lane in ("sync", "sync-two-devices"))
    assert [c.rounds for c in one] == [c.rounds for c in two]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("lane", "setting"), [(name, setting) for name in LANES if name != "ar" for setting in settings_of(name)]
)
def test_the_rounds_follow_from_the_text_alone(completions, lane, setting):
    """The acceptance that training reports (`acceptance.oracle`) is that of decoding, round for round."""
    pair, done = load_pair(demo.target_folder(), demo.drafter_folder()), completions["ar", setting]
    assert pair.drafter is not None and pair.drafter.drafter is not None
    ids = [np.array([*c.prompt_ids, *c.ids], np.int32) for c in done]
    rows = [pack([Document(i, len(c.prompt_ids))], 384, 0)[0].arrays() for i, c in zip(ids, done, strict=True)]
    batch = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    found = everywhere(pair.drafter.params, batch, pair.drafter.config, pair.drafter.drafter, pair.num_token_ids)
    told = samples(jax.device_get(found), LANES[lane][0])
    real = [Sample(c.rounds, len(c.ids)) for c in completions[lane, setting]]
    assert [sample.rounds for sample in told] == [sample.whole_rounds() for sample in real]
    assert measure(told, 8) == measure(real, 8)


def test_the_pair_is_small():
    files = [path for path in Path(demo.__file__).parent.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) < 30e6

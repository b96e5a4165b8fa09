"""Configurations: YAML and overrides into dataclasses, and nothing unknown, missing or mistyped gets through."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from d3d_jax.config import (
    DecodeConfig,
    DrafterConfig,
    ModelConfig,
    RopeConfig,
    SamplingParams,
    TrainConfig,
    from_mapping,
    load,
    to_mapping,
)
from d3d_jax.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"
KINDS = {"model": ModelConfig, "drafter": DrafterConfig, "train": TrainConfig, "decode": DecodeConfig}
FILES = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))

MODEL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope": {"theta": 1e6},
}
TRAIN = {"objective": "ar", "train_data": "a.jsonl", "output_dir": "out", "steps": 3, "batch_size": 2, "model": MODEL}


@pytest.fixture
def file(tmp_path: Path):
    def write(values: object) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
        return path

    return write


def test_there_are_example_configs():
    assert FILES


@pytest.mark.parametrize("name", FILES)
def test_every_example_config_loads(name: str):
    kind = KINDS.get(name.split("/")[0])
    assert kind is not None, f"configs/{name}: say in KINDS which dataclass this folder holds"
    load(kind, CONFIGS / name)


def test_groups_become_dataclasses_and_what_is_left_out_its_default(file):
    config = load(TrainConfig, file(TRAIN))
    assert config.model == ModelConfig(64, 32, 48, 2, 4, 2, 16, RopeConfig(1e6))
    assert (config.row_length, config.loss.chunk, config.init_layers) == (512, 128, None)


def test_overrides_reach_into_groups_that_are_and_are_not_in_the_file(file):
    overrides = [
        "optimizer.learning_rate=2e-5",
        "model.rope.theta=5e6",
        "init_layers=[0, 3]",
        "seed=7",
        "dtype=bfloat16",
    ]
    config = load(TrainConfig, file(TRAIN), overrides)
    assert config.optimizer.learning_rate == 2e-5  # YAML 1.1 reads 2e-5 as a string
    assert config.model is not None and config.model.rope.theta == 5e6
    assert (config.init_layers, config.seed) == ((0, 3), 7)
    assert load(TrainConfig, file({**TRAIN, "seed": 3}), ["seed=4", "seed=5"]).seed == 5


def test_a_config_written_out_reads_back_the_same(file):
    config = from_mapping(TrainConfig, {**TRAIN, "init_layers": [1, 2], "loss": {"gamma": 3}})
    assert load(TrainConfig, file(to_mapping(config))) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_sise": 4}, "unknown key 'batch_sise' for TrainConfig; did you mean 'batch_size'?"),
        ({"optimizer": {"learningrate": 1}}, "unknown key 'optimizer.learningrate' .*'learning_rate'"),
        ({"model": {**MODEL, "rope": {"theta": 1e6, "beta": 1}}}, r"unknown key 'model.rope.beta'"),
        ({"loss": {"zzz": 1}}, "unknown key 'loss.zzz' .*known: ar_weight, chunk, gamma, kd_weight, prompt_weight"),
        ({"objective": "dflash"}, "objective='dflash': expected 'ar' or 'd3d'"),
        ({"steps": "many"}, "steps='many': expected int"),
        ({"steps": 2.5}, "steps=2.5: expected int"),
        ({"steps": True}, "steps=True: expected int"),
        ({"remat": 1}, "remat=1: expected bool"),
        ({"optimizer": {"b1": "x"}}, "optimizer.b1='x': expected float"),
        ({"optimizer": {"b1": True}}, "optimizer.b1=True: expected float"),
        ({"optimizer": 3}, "optimizer=3: expected OptimizerConfig"),
        ({"train_data": 3}, "train_data=3: expected str | tuple"),
        ({"init_layers": ["a"]}, "init_layers=.*expected tuple"),
        (
            {"model": {k: v for k, v in MODEL.items() if k != "head_dim"}},
            "missing model.head_dim; they have no default",
        ),
        ({"model": {**MODEL, "rope": {}}}, "missing model.rope.theta"),
        ({"model": {**MODEL, "num_key_value_heads": 3}}, "num_attention_heads=4 is not a multiple of"),
        ({"model": {**MODEL, "head_dim": 7}}, "head_dim=7 is odd"),
        ({"steps": 0}, "steps=0: expected at least 1"),
        ({"log_every": 0, "save_every": -1}, "save_every=-1, log_every=0: expected at least 1"),
        ({"blocks": {"block_size": 1}}, "blocks.block_size=1: a block is one anchor and at least one draft"),
        ({"blocks": {"blocks_per_row": 0}}, "blocks_per_row=0"),
        ({"blocks": {"visible_none": 0.9, "visible_one": 0.2}}, r"visible_none=0.9 and visible_one=0.2"),
        ({"blocks": {"visible_decay": 0.0}}, "visible_decay=0.0"),
    ],
)
def test_what_is_unknown_missing_or_of_another_type_is_refused_by_its_path(changes, said):
    with pytest.raises(ConfigError, match=said):
        from_mapping(TrainConfig, {**TRAIN, **changes})


def test_everything_that_is_missing_is_named_at_once():
    with pytest.raises(ConfigError, match="missing objective, train_data, output_dir, steps, batch_size"):
        from_mapping(TrainConfig, {})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps", "'steps' is not of the form key=value"),
        ("=3", "'=3' is not of the form key=value"),
        ("steps.first=3", "'steps' holds a value, not a group"),
        ("stepz=3", "unknown key 'stepz'.*'steps'"),
        ("optimizer.nme=muon", "unknown key 'optimizer.nme'.*'name'"),
    ],
)
def test_an_override_that_says_nothing_is_refused(file, override: str, said: str):
    with pytest.raises(ConfigError, match=said):
        load(TrainConfig, file(TRAIN), [override])


@pytest.mark.parametrize(
    ("text", "said"), [("a: [", "not valid YAML"), ("- 1", "holds list"), ("", "missing objective")]
)
def test_a_file_that_is_no_config_is_refused(file, text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        load(TrainConfig, file(text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none.yaml' does not exist; see configs/"):
        load(TrainConfig, tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("factor", 4.0),
        ("original_max_position_embeddings", 128),
        ("mscale", 1.0),
        ("beta_slow", 2.0),
        ("truncate", False),
    ],
)
def test_a_yarn_field_without_yarn_is_refused_rather_than_ignored(field: str, value: object):
    with pytest.raises(ConfigError, match=f"rope_type 'default' takes no {field}; did you mean rope_type 'yarn'"):
        dataclasses.replace(RopeConfig(1e6), **{field: value})


def test_yarn_needs_the_context_that_it_stretches():
    assert RopeConfig(1e6, "yarn", 4.0, 32768).factor == 4
    with pytest.raises(ConfigError, match="needs original_max_position_embeddings"):
        RopeConfig(1e6, "yarn", 4.0)


def test_rope_needs_a_theta_above_zero():
    with pytest.raises(ConfigError, match=r"rope.theta=0 must be above 0"):
        RopeConfig(0)


@pytest.mark.parametrize(
    "fault", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.0}, {"seed": 2**32}]
)
def test_sampling_out_of_range_is_refused(fault):
    with pytest.raises(ConfigError, match=next(iter(fault))):
        SamplingParams(**{"temperature": 1.0, **fault})


@pytest.mark.parametrize("ignored", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filters_that_greedy_decoding_would_ignore_are_refused(ignored):
    with pytest.raises(ConfigError, match="temperature=0 is greedy and ignores"):
        SamplingParams(**ignored)


@pytest.mark.parametrize("fault", [{"block_size": 1}, {"outcomes": 0}, {"outcomes": 17}, {"lookahead": 0}])
def test_a_way_of_decoding_that_cannot_be_is_refused(fault):
    with pytest.raises(ConfigError, match=next(iter(fault))):
        DecodeConfig(**fault)


def test_a_block_of_one_is_no_drafter():
    with pytest.raises(ConfigError, match="block_size=1"):
        DrafterConfig(1, 0)

from __future__ import annotations

import pytest

from d3d_jax.checkpoints.ledger import leaves, slots
from d3d_jax.checkpoints.names import PREFIXES, Slot, check_prefix, name_of, slot_of
from d3d_jax.config import ModelConfig, RopeConfig
from d3d_jax.errors import CheckpointError

CONFIG = ModelConfig(64, 32, 48, 12, 4, 2, 16, rope=RopeConfig(1e6))


def all_slots() -> list[Slot]:
    return [slot for path, param in leaves(CONFIG).items() for slot in slots(path, param)]


def test_every_parameter_has_one_name_and_every_name_leads_back():
    names = [name_of(slot) for slot in all_slots()]
    assert len(set(names)) == len(names) == 12 * 11 + 3
    assert [slot_of(name) for name in names] == all_slots()


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_three_prefixes_lead_to_the_same_place(prefix: str):
    for slot in all_slots():
        rest = name_of(slot).removeprefix("model.")
        assert slot_of(rest if slot.path == ("lm_head",) else prefix + rest) == slot


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.0.attn.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.01.self_attn.q_proj.weight",
        "model.layers.self_attn.q_proj.weight",
        "model.model.norm.weight",
        "model.visual.norm.weight",
        "",
    ],
)
def test_other_names_lead_nowhere(name: str):
    assert slot_of(name) is None


def test_an_unknown_prefix_is_refused_with_three_names_and_the_expected_pattern():
    names = [f"transformer.h.{i}.attn.weight" for i in range(5)]
    with pytest.raises(CheckpointError) as error:
        check_prefix(names, "x/model.safetensors")
    text = str(error.value)
    assert all(name in text for name in names[:3]) and names[3] not in text
    assert "model.layers.N.self_attn.q_proj.weight" in text and "x/model.safetensors" in text


def test_a_place_outside_the_tree_has_no_name():
    for slot in (Slot(("norm",), 0), Slot(("layers", "q_proj")), Slot(("layers", "bias"), 1)):
        with pytest.raises(CheckpointError, match="no Hugging Face name"):
            name_of(slot)

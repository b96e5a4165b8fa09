"""One table, used in both directions: Hugging Face tensor names <-> places in our parameter tree.

A *slot* is a place that exactly one tensor on disk fills: the path of a leaf in the tree, and the layer
index inside that leaf where leaves are stacked ``[L, ...]`` (``None`` elsewhere). Weights keep Hugging
Face's ``[out, in]`` orientation, so a conversion renames and stacks and never transposes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from d3d_jax.errors import CheckpointError


class Slot(NamedTuple):
    """A leaf's path in the parameter tree and the layer inside it; `layer` is None for unstacked leaves."""

    path: tuple[str, ...]
    layer: int | None = None


_ROOT = {"embed_tokens": "embed_tokens.weight", "norm": "norm.weight", "lm_head": "lm_head.weight"}
_LAYER = {
    "input_layernorm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}
_ROOT_KEYS = {name: key for key, name in _ROOT.items()}
_LAYER_KEYS = {name: key for key, name in _LAYER.items()}

PREFIXES = ("model.", "model.language_model.", "")
"""Prefixes accepted on reading; writing always uses the first."""

_PARTS = re.compile(r"(?:model\.(?:language_model\.)?)?(?:layers\.(0|[1-9]\d*)\.)?(.+)")

LM_HEAD = Slot(("lm_head",))
EMBED_TOKENS = Slot(("embed_tokens",))


def name_of(slot: Slot) -> str:
    """The name under which `slot` is written, such as ``model.layers.3.self_attn.q_proj.weight``.

    Raises:
        CheckpointError: when the tree has no such place.
    """
    match slot:
        case Slot(("lm_head",), None):
            return _ROOT["lm_head"]  # beside the trunk, not inside it
        case Slot((key,), None) if key in _ROOT:
            return f"model.{_ROOT[key]}"
        case Slot(("layers", key), int(layer)) if key in _LAYER:
            return f"model.layers.{layer}.{_LAYER[key]}"
    raise CheckpointError(
        f"parameter {'.'.join(slot.path)} (layer {slot.layer}) has no Hugging Face name; "
        f"known: {', '.join(_ROOT)}, layers.{{{', '.join(_LAYER)}}}"
    )


def slot_of(name: str) -> Slot | None:
    """The slot that the tensor `name` fills under any of :data:`PREFIXES`; None when there is none."""
    match = _PARTS.fullmatch(name)
    if match is None:
        return None
    layer, rest = match.groups()
    if layer is None:
        return Slot((_ROOT_KEYS[rest],)) if rest in _ROOT_KEYS else None
    return Slot(("layers", _LAYER_KEYS[rest]), int(layer)) if rest in _LAYER_KEYS else None


def check_prefix(names: Iterable[str], source: str) -> None:
    """Refuse a checkpoint none of whose `names` is ours, `source` being the file or folder they stand in.

    Raises:
        CheckpointError: showing three of the names and the pattern that is expected.
    """
    names = sorted(names)
    if any(slot_of(name) for name in names):
        return
    sample = ", ".join(names[:3]) if names else "no tensors at all"
    patterns = " or ".join(f"{prefix}layers.N.self_attn.q_proj.weight" for prefix in PREFIXES)
    raise CheckpointError(f"{source}: no tensor name is a Qwen3 one; found {sample}; expected names like {patterns}")

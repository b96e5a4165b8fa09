"""The proof that a checkpoint and a model fit: every tensor used once, every parameter filled once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from d3d_jax.checkpoints.names import EMBED_TOKENS, LM_HEAD, Slot, check_prefix, name_of, slot_of
from d3d_jax.checkpoints.safetensors_io import StoredTensor
from d3d_jax.config import ModelConfig
from d3d_jax.errors import CheckpointError
from d3d_jax.models.layers import Param
from d3d_jax.models.qwen3 import parameter_table

LmHead = Literal["strict", "ignore", "untie"]
"""What to do with a stored output matrix when config.json says that it is tied to the embedding.

`strict`: drop it when it equals the embedding, refuse it when it does not. `ignore`: drop it. `untie`: keep it;
the model is then untied.
"""

_SHOWN = 6  # faults of one kind that a message lists


@dataclass(frozen=True)
class Ledger:
    """Which stored tensor fills which slot, in the order of the tree. `str()` gives it in one line."""

    sources: Mapping[Slot, str]
    equal_to_embedding: str | None = None
    ignored: str | None = None

    def __str__(self) -> str:
        dropped = [name for name in (self.equal_to_embedding, self.ignored) if name]
        line = f"{len(self.sources) + len(dropped)} tensors read, {len(self.sources)} used"
        if self.equal_to_embedding:
            line += f"; {self.equal_to_embedding} equals the embedding it is tied to"
        if self.ignored:
            line += f"; {self.ignored} ignored as told"
        return line


def leaves(config: ModelConfig) -> dict[tuple[str, ...], Param]:
    """The record of every leaf of the parameter tree, by path."""
    return flatten(parameter_table(config))


def slots(path: tuple[str, ...], param: Param) -> list[Slot]:
    """The slots of one leaf: one for each layer where it is stacked."""
    if param.axes[0] != "layers":
        return [Slot(path)]
    return [Slot(path, layer) for layer in range(param.shape[0])]


def flatten(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The leaves of nested mappings by path."""
    flat: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, (*path, key)) if isinstance(value, Mapping) else {(*path, key): value})
    return flat


def nest(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The inverse of :func:`flatten`."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def check_tree(shapes: Mapping[tuple[str, ...], tuple[int, ...]], config: ModelConfig, source: str) -> None:
    """Refuse a stacked tree, given by its leaves' shapes, that is not the one of `config`.

    Raises:
        CheckpointError: with every leaf that is missing, left over or of another shape.
    """
    table = leaves(config)
    faults = [f"{'.'.join(path)} is missing" for path in table if path not in shapes]
    faults += [f"{'.'.join(path)} is left over" for path in shapes if path not in table]
    faults += [
        f"{'.'.join(path)} is {list(shapes[path])}, expected {list(param.shape)}"
        for path, param in table.items()
        if path in shapes and tuple(shapes[path]) != param.shape
    ]
    if faults:
        raise CheckpointError(f"{source} does not fit the model config: " + "; ".join(faults))


def make_ledger(
    stored: Mapping[str, StoredTensor],
    config: ModelConfig,
    *,
    source: str,
    lm_head: LmHead = "strict",
    equal: Callable[[str, str], bool],
) -> tuple[Ledger, ModelConfig]:
    """Match the tensors of a checkpoint with the parameters of the model that `config` describes.

    Args:
        stored: tensors by name; only names and shapes are looked at.
        source: the file that lists the tensors, for messages.
        equal: whether two stored tensors hold the same values; asked only about a tied output matrix.

    Returns:
        The ledger, and `config` with `tie_word_embeddings` as it came out.

    Raises:
        CheckpointError: with every missing, left-over, doubled and misshapen tensor at once.
    """
    check_prefix(stored, source)
    by_slot: dict[Slot, list[str]] = {}
    left_over: list[str] = []
    for name in sorted(stored):
        slot = slot_of(name)
        if slot is None or (slot.layer or 0) >= config.num_hidden_layers:
            left_over.append(name)
        else:
            by_slot.setdefault(slot, []).append(name)

    config, dropped = _settle_lm_head(by_slot, config, source, lm_head, equal)
    wanted = {
        slot: param.shape if slot.layer is None else param.shape[1:]
        for path, param in leaves(config).items()
        for slot in slots(path, param)
    }
    missing = [slot for slot in wanted if not by_slot.get(slot)]
    faults = [_missing(missing, left_over, config, source)] if missing else []
    if left_over:
        faults.append(_listed(left_over, "left over") + _depth_hint(left_over, config))
    doubled = [" and ".join(names) for names in by_slot.values() if len(names) > 1]
    if doubled:
        faults.append(_listed(doubled, "for one parameter"))
    misshapen = [
        f"{by_slot[slot][0]} is {list(stored[by_slot[slot][0]].shape)}, expected {list(shape)}"
        for slot, shape in wanted.items()
        if by_slot.get(slot) and stored[by_slot[slot][0]].shape != shape
    ]
    if misshapen:
        faults.append(_listed(misshapen, "of another shape than config.json says"))
    if faults:
        raise CheckpointError(f"{source} does not fit its config.json: " + "; ".join(faults))
    return Ledger({slot: by_slot[slot][0] for slot in wanted}, **dropped), config


def _settle_lm_head(
    by_slot: dict[Slot, list[str]],
    config: ModelConfig,
    source: str,
    choice: LmHead,
    equal: Callable[[str, str], bool],
) -> tuple[ModelConfig, dict[str, str]]:
    """Decide about a tied model's stored output matrix: the config, and under which heading it is dropped."""
    if not config.tie_word_embeddings:
        return config, {}
    head, *_ = by_slot.get(LM_HEAD, [""])
    if choice == "untie":
        if not head:
            raise CheckpointError(f"{source}: lm_head='untie', but there is no {name_of(LM_HEAD)} to use")
        return dataclasses.replace(config, tie_word_embeddings=False), {}
    if not head:
        return config, {}
    embedding, *_ = by_slot.get(EMBED_TOKENS, [head])
    if choice != "ignore" and not equal(embedding, head):
        raise CheckpointError(
            f"{source}: config.json ties the output matrix to the embedding, yet {head} differs from "
            f"{embedding}; choose lm_head='untie' to use it or 'ignore' to drop it"
        )
    by_slot[LM_HEAD].remove(head)
    return config, {"ignored" if choice == "ignore" else "equal_to_embedding": head}


def _listed(entries: list[str], what: str) -> str:
    more = f", and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return f"{len(entries)} {what}: {', '.join(entries[:_SHOWN])}{more}"


def _missing(missing: list[Slot], left_over: list[str], config: ModelConfig, source: str) -> str:
    entries = []
    for slot in missing:
        name = name_of(slot)
        close = get_close_matches(name, left_over, n=1, cutoff=0.8) if len(entries) < _SHOWN else []
        entries.append(name + (f" (is it {close[0]}?)" if close else ""))
    text = _listed(entries, "missing")
    if LM_HEAD in missing:
        text += f"; {source} has no {name_of(LM_HEAD)} while config.json says tie_word_embeddings=false"
    return text


def _depth_hint(left_over: list[str], config: ModelConfig) -> str:
    depths = [slot.layer for name in left_over if (slot := slot_of(name)) and slot.layer is not None]
    if not depths:
        return ""
    return f"; config.json says num_hidden_layers={config.num_hidden_layers}, the tensors go up to layer {max(depths)}"

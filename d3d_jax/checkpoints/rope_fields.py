"""The rope keys of config.json, in the spellings of transformers 4 and 5.

transformers 4 writes `rope_theta` flat and YaRN's fields under `rope_scaling`; transformers 5 puts all of
them under `rope_parameters`. A reader of the other spelling falls back to theta 10000 without an error and
pays with quality, so nothing is defaulted here and a contradiction is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from d3d_jax.config import RopeConfig
from d3d_jax.errors import ConfigError, nearest

_YARN = tuple(f.name for f in dataclasses.fields(RopeConfig) if f.name not in ("theta", "rope_type"))
_YARN_DEFAULTS = {f.name: f.default for f in dataclasses.fields(RopeConfig) if f.name in _YARN}


def parse_rope(config: Mapping[str, Any], where: str) -> RopeConfig:
    """Read `rope_theta`, `rope_scaling` and `rope_parameters` from a config.json mapping.

    Args:
        where: the file, for messages.

    Raises:
        ConfigError: when theta is absent, the spellings contradict each other, the rope type is not
            `default` or `yarn`, or a field is unknown or missing.
    """
    groups = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    for key, group in groups.items():
        if not isinstance(group, Mapping):
            raise ConfigError(f"{where}: {key}={group!r}; expected a mapping")
    thetas = {f"{key}.rope_theta": group["rope_theta"] for key, group in groups.items() if "rope_theta" in group}
    if config.get("rope_theta") is not None:
        thetas["rope_theta"] = config["rope_theta"]
    if not thetas:
        raise ConfigError(
            f"{where}: no rope_theta, neither flat nor in rope_parameters; a guessed one would be wrong without "
            "an error, so add the value the model was trained with (Qwen3: 1000000)"
        )
    theta = _number(*_agreed(thetas, where), where)
    scalings = {key: _scaling(group, f"{where}: {key}") for key, group in groups.items()}
    _, scaling = _agreed(scalings, where) if scalings else ("", {})
    return RopeConfig(theta=theta, **scaling)


def rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """The config.json keys for `rope`, in both spellings, so that transformers 4 and 5 read the same."""
    theta: float = int(rope.theta) if rope.theta.is_integer() else rope.theta
    fields = {name: getattr(rope, name) for name in _YARN if getattr(rope, name) != _YARN_DEFAULTS[name]}
    scaling = {"rope_type": rope.rope_type, **fields}
    if rope.rope_type == "yarn":
        scaling["factor"] = rope.factor
        _scaling(scaling, "rope")
    return {
        "rope_theta": theta,
        "rope_scaling": scaling if rope.rope_type == "yarn" else None,
        "rope_parameters": {**scaling, "rope_theta": theta},
    }


def _scaling(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`group` as keyword arguments of RopeConfig, theta left out and defaults filled in."""
    given = {key: value for key, value in group.items() if key not in ("rope_theta", "rope_type", "type")}
    if given.get("partial_rotary_factor") in (1, None):
        given.pop("partial_rotary_factor", None)
    types = {key: group[key] for key in ("type", "rope_type") if group.get(key) is not None}
    rope_type = _agreed(types, where)[1] if types else "default"
    if rope_type not in ("default", "yarn"):
        raise ConfigError(f"{where}: rope_type={rope_type!r} is not supported; known: default, yarn")
    if rope_type == "default":
        if given:
            raise ConfigError(f"{where}: rope_type='default' takes no {', '.join(given)}; which rope_type is meant?")
        return {"rope_type": "default", **_YARN_DEFAULTS}
    for key in given:
        if key not in _YARN:
            raise ConfigError(f"{where}: unknown rope field {key!r}{nearest(key, _YARN)}")
    for key in ("factor", "original_max_position_embeddings"):
        if given.get(key) is None:
            raise ConfigError(f"{where}: rope_type='yarn' needs {key}, which is absent")
    values = {**_YARN_DEFAULTS, **{key: value for key, value in given.items() if value is not None}}
    for key, value in values.items():
        if key == "truncate":
            if not isinstance(value, bool):
                raise ConfigError(f"{where}: truncate={value!r}; expected true or false")
        elif value is not None:
            values[key] = _number(key, value, where)
    length = values["original_max_position_embeddings"]
    if not length.is_integer():
        raise ConfigError(f"{where}: original_max_position_embeddings={length!r}; expected a whole number")
    return {"rope_type": "yarn", **values, "original_max_position_embeddings": int(length)}


def _agreed(values: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """One (key, value) of `values`, which must all be equal."""
    (first, value), *rest = values.items()
    for key, other in rest:
        if other != value:
            raise ConfigError(f"{where}: {first}={value!r} contradicts {key}={other!r}; keep the true one")
    return first, value


def _number(key: str, value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(f"{where}: {key}={value!r}; expected a number above 0")
    return float(value)

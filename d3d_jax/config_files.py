"""Configuration files: YAML and `a.b=c` overrides into frozen dataclasses.

A file holds one mapping whose keys are the fields of one dataclass; nested dataclasses are nested
mappings. Unknown keys and values of the wrong type are refused with the path of the key, so a typing
error never turns into a silent default.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from d3d_jax.errors import ConfigError, nearest

T = TypeVar("T")


def from_mapping(cls: type[T], values: Mapping[str, Any], *, where: str = "") -> T:
    """Build the dataclass `cls` from plain `values`, refusing unknown keys and wrong types.

    Raises:
        ConfigError: with the dotted path of the key at fault.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for key in values:
        if key not in fields:
            raise ConfigError(f"unknown key {prefix + key!r} for {cls.__name__}{nearest(key, fields)}")
    built = {k: _coerce(hints[k], v, prefix + k) for k, v in values.items()}
    missing = [
        name
        for name, f in fields.items()
        if name not in built and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{cls.__name__}: missing {', '.join(prefix + m for m in missing)}; they have no default")
    return cls(**built)


def load(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read the YAML file at `path` into `cls`, then apply `a.b=c` overrides (values are YAML)."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {str(path)!r} does not exist; see configs/ for examples")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file {str(path)!r} holds {type(values).__name__}; expected a mapping of keys")
    for override in overrides:
        _set(values, override)
    return from_mapping(cls, values)


def to_mapping(config: Any) -> dict[str, Any]:
    """The plain nested mapping of a config dataclass (tuples become lists), for JSON and YAML."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return value

    return plain(dataclasses.asdict(config))


def _set(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"override {override!r} is not of the form key=value, such as optimizer.name=muon")
    *parents, leaf = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override {override!r}: {parent!r} holds a value, not a group of keys")
    values[leaf] = yaml.safe_load(text)


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint`, or ConfigError. YAML's ints pass for floats, lists for tuples."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in args:
            try:
                return _coerce(option, value, where)
            except ConfigError as error:
                if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
                    raise error
    elif origin is Literal:
        if value in args:
            return value
    elif dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return from_mapping(typing.cast(type, hint), value, where=where)
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_coerce(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):  # YAML 1.1 reads 2e-5 as a string
            try:
                return float(value)
            except ValueError:
                pass
    elif hint is type(None):
        if value is None:
            return None
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    expected = " or ".join(map(repr, args)) if origin is Literal else getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{where}={value!r}: expected {expected}")

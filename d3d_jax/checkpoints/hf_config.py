"""config.json of a Hugging Face folder <-> our ModelConfig and DrafterConfig.

Reading refuses whatever the model here does not compute, rather than ignoring it: another architecture,
another activation, biases, a sliding window that is really used, quantised weights. Writing gives a file
that transformers 4 and 5 read alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from d3d_jax.checkpoints.rope_fields import parse_rope, rope_keys
from d3d_jax.checkpoints.special_tokens import check_mask_id, read_eos_ids, read_json, read_pad_ids
from d3d_jax.config import DrafterConfig, ModelConfig, from_mapping, to_mapping
from d3d_jax.errors import CheckpointError, ConfigError

DRAFTER_VERSION = 1
"""Version of the `d3d_config` group that this code reads and writes."""

_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_CARRIED = ("bos_token_id", "pad_token_id", "initializer_range", "attention_dropout", "use_cache")


def read_config_mapping(folder: str | Path) -> dict[str, Any]:
    """config.json of `folder` as it stands.

    Raises:
        CheckpointError: when the folder or the file is not there or not JSON.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; expected a Hugging Face model folder on this disk")
    return read_json(path)


def read_model_config(folder: str | Path) -> ModelConfig:
    """The shape of the Qwen3 model in `folder`.

    Raises:
        CheckpointError: when there is no readable config.json.
        ConfigError: when a needed key is absent or of the wrong type, when rope is absent or contradictory
            (see `rope_fields.parse_rope`), or when the model needs something that is not computed here.
    """
    config, where = read_config_mapping(folder), str(Path(folder) / "config.json")
    _refuse_other_models(config, where)
    for key in _INTEGERS:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            why = " (hidden_size / num_attention_heads is not it; Qwen3: 128)" if key == "head_dim" else ""
            raise ConfigError(f"{where}: {key} {_found(config, key)}; expected a whole number above 0{why}")
    eps = config.get("rms_norm_eps")
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or eps <= 0:
        raise ConfigError(f"{where}: rms_norm_eps {_found(config, 'rms_norm_eps')}; expected a number above 0")
    _refuse_sliding_window(config, where)
    try:
        return ModelConfig(
            **{key: config[key] for key in _INTEGERS},
            rope=parse_rope(config, where),
            rms_norm_eps=float(eps),
            # Absent means untied to transformers' Qwen3; a wrong guess is caught when lm_head is looked for.
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except ConfigError as error:
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from error


def has_drafter_config(folder: str | Path) -> bool:
    """Whether config.json of `folder` carries a `d3d_config` group."""
    return "d3d_config" in read_config_mapping(folder)


def read_drafter_config(folder: str | Path) -> DrafterConfig:
    """The `d3d_config` group of config.json. Every field must stand there; only the last two may be null.

    Raises:
        ConfigError: naming the field that is missing or wrong, or when the mask id has no embedding row or
            is also a padding or end-of-sequence id.
    """
    config, where = read_config_mapping(folder), str(Path(folder) / "config.json")
    group = config.get("d3d_config")
    if not isinstance(group, Mapping):
        hint = "; this is a DFlash drafter" if "dflash_config" in config else ""
        raise ConfigError(f"{where}: no d3d_config, so this is not a block-diffusion drafter of this project{hint}")
    values = dict(group)
    version = values.pop("version", None)
    if version != DRAFTER_VERSION:
        found = "missing" if version is None else repr(version)
        raise ConfigError(f"{where}: d3d_config.version is {found}; this release reads version {DRAFTER_VERSION}")
    for field in ("block_size", "mask_token_id", "block_attention", "kept_layers", "target_model"):
        if field not in values:
            raise ConfigError(f"{where}: d3d_config.{field} is missing; it has no default")
    try:
        drafter = from_mapping(DrafterConfig, values, where="d3d_config")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    try:
        _check_drafter(drafter, config.get("vocab_size"), config.get("num_hidden_layers"))
        check_mask_id(drafter.mask_token_id, config["vocab_size"], read_eos_ids(folder), read_pad_ids(folder))
    except ConfigError as error:
        raise ConfigError(f"{where}: d3d_config: {error}") from error
    return drafter


def config_mapping(
    model: ModelConfig,
    dtype: str,
    drafter: DrafterConfig | None = None,
    *,
    eos_ids: Sequence[int] = (),
    extras: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The config.json of `model`, readable by transformers 4 and 5 alike.

    Args:
        dtype: of the tensors beside it, such as "bfloat16".
        eos_ids: the ids that end a sequence.
        extras: further keys, such as `bos_token_id` (see :func:`carried_keys`).

    Raises:
        ConfigError: when `extras` holds a key that is written here, or the drafter does not fit the model.
    """
    written: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **{key: getattr(model, key) for key in _INTEGERS},
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": model.num_hidden_layers,
        **rope_keys(model.rope),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if eos_ids:
        written["eos_token_id"] = eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)
    if drafter is not None:
        pad = (extras or {}).get("pad_token_id")
        _check_drafter(drafter, model.vocab_size, model.num_hidden_layers)
        check_mask_id(drafter.mask_token_id, model.vocab_size, eos_ids, () if pad is None else (pad,))
        written["d3d_config"] = {"version": DRAFTER_VERSION, **to_mapping(drafter)}
    for key in extras or {}:
        if key in written:
            raise ConfigError(f"extras: {key!r} is written from the model itself; leave it out")
    return dict(sorted({**(extras or {}), **written}.items()))


def write_config(
    folder: str | Path,
    model: ModelConfig,
    dtype: str,
    drafter: DrafterConfig | None = None,
    *,
    eos_ids: Sequence[int] = (),
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json into the existing `folder`; see :func:`config_mapping` for the arguments."""
    values = config_mapping(model, dtype, drafter, eos_ids=eos_ids, extras=extras)
    (Path(folder) / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def carried_keys(folder: str | Path) -> dict[str, Any]:
    """Keys of config.json that mean nothing to us and are handed on when the model is written again."""
    config = read_config_mapping(folder)
    return {key: config[key] for key in _CARRIED if config.get(key) is not None}


def _found(config: Mapping[str, Any], key: str) -> str:
    return f"is {config[key]!r}" if key in config else "is absent"


def _refuse_other_models(config: Mapping[str, Any], where: str) -> None:
    if config.get("model_type") != "qwen3":
        raise ConfigError(f"{where}: model_type {_found(config, 'model_type')}; only the dense 'qwen3' is computed")
    if config.get("hidden_act") != "silu":
        raise ConfigError(f"{where}: hidden_act {_found(config, 'hidden_act')}; Qwen3 here computes 'silu'")
    if config.get("attention_bias", False):
        raise ConfigError(f"{where}: attention_bias is true; Qwen3 here has no biases")
    if config.get("quantization_config"):
        raise ConfigError(f"{where}: quantization_config is set; use the unquantised checkpoint")


def _refuse_sliding_window(config: Mapping[str, Any], where: str) -> None:
    """Whatever says "off" passes; a window that some layer would use does not."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise ConfigError(f"{where}: layer_types has {len(kinds)} entries for num_hidden_layers={layers}")
        if other := sorted(set(kinds) - {"full_attention"}):
            raise ConfigError(f"{where}: layer_types holds {', '.join(other)}; only full_attention is computed here")
    elif config.get("use_sliding_window") and config.get("sliding_window") is not None:
        first = config.get("max_window_layers", 28)  # transformers' default
        if first < layers:
            raise ConfigError(
                f"{where}: use_sliding_window=true with sliding_window={config['sliding_window']} applies from layer "
                f"{first} of {layers}; only full attention is computed here"
            )


def _check_drafter(drafter: DrafterConfig, vocab_size: Any, num_layers: Any) -> None:
    if not isinstance(vocab_size, int):
        raise ConfigError(f"vocab_size is {vocab_size!r}; expected the rows of the embedding")
    kept = drafter.kept_layers
    if kept is None:
        return
    if len(kept) != num_layers:
        raise ConfigError(f"kept_layers names {len(kept)} layers, but the model has num_hidden_layers={num_layers}")
    if any(a >= b for a, b in pairwise(kept)) or kept[0] < 0:
        raise ConfigError(f"kept_layers={list(kept)} is not a rising list of layer indices")

"""The ids in a model folder that are no ordinary text: end of sequence, padding, and a drafter's mask."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from d3d_jax.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in the JSON file at `path`; empty when there is no such file.

    Raises:
        CheckpointError: when the file is not JSON or does not hold a mapping.
    """
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; copy the folder again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}; expected a mapping of keys")
    return values


def read_eos_ids(folder: str | Path) -> tuple[int, ...]:
    """The ids that end a sequence; generation stops at any of them.

    `eos_token_id` of ``generation_config.json`` wins, because Qwen3 lists both of its ids only there; then
    that of ``config.json``; then the tokenizer's `eos_token`. The first two may be one id or a list. Empty when
    none of them names one. A warning is logged when the tokenizer ends its turns with a token that is not
    among the ids, as base models do.

    Raises:
        ConfigError: when `eos_token_id` is neither an id nor a list of ids.
    """
    folder = Path(folder)
    ids: tuple[int, ...] = ()
    for file in ("generation_config.json", "config.json"):
        ids = _ids(read_json(folder / file).get("eos_token_id"), folder / file, "eos_token_id")
        if ids:
            break
    spoken = _tokenizer_id(folder, "eos_token")
    if spoken is None:
        return ids
    if not ids:
        return (spoken,)
    if spoken not in ids:
        _log.warning(
            "%s: the tokenizer's eos_token is id %d, which is not among the end ids %s; generation will not stop at it",
            folder, spoken, list(ids),
        )  # fmt: skip
    return ids


def read_pad_ids(folder: str | Path) -> tuple[int, ...]:
    """Every id that ``config.json``, ``generation_config.json`` or the tokenizer uses for padding."""
    folder = Path(folder)
    ids: list[int] = []
    for file in ("config.json", "generation_config.json"):
        ids.extend(_ids(read_json(folder / file).get("pad_token_id"), folder / file, "pad_token_id"))
    spoken = _tokenizer_id(folder, "pad_token")
    return tuple(dict.fromkeys(ids if spoken is None else [*ids, spoken]))


def check_mask_id(mask_token_id: int, vocab_size: int, eos_ids: Iterable[int], pad_ids: Iterable[int] = ()) -> None:
    """Refuse a mask id that has no embedding row or that already means something else.

    A mask that is also padding or an end trains without an error and drafts badly.

    Args:
        vocab_size: rows V of the embedding.

    Raises:
        ConfigError: naming the id it collides with.
    """
    if not 0 <= mask_token_id < vocab_size:
        raise ConfigError(
            f"mask_token_id={mask_token_id} has no row in an embedding of {vocab_size} rows; "
            f"choose an unused id from 0..{vocab_size - 1} (Qwen3: 151669)"
        )
    for kind, ids in (("an end-of-sequence", eos_ids), ("a padding", pad_ids)):
        if mask_token_id in ids:
            raise ConfigError(
                f"mask_token_id={mask_token_id} is also {kind} id; choose an id that no text uses (Qwen3: 151669)"
            )


def _ids(value: Any, path: Path, key: str) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(v, int) or isinstance(v, bool) for v in values):
        raise ConfigError(f"{path}: {key}={value!r}; expected an id or a list of ids")
    return tuple(dict.fromkeys(values))


def _tokenizer_id(folder: Path, key: str) -> int | None:
    """The id of the tokenizer's token for `key`, such as `eos_token`; None where the folder does not say."""
    settings = read_json(folder / "tokenizer_config.json")
    token = settings.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return None
    for id_text, entry in (settings.get("added_tokens_decoder") or {}).items():
        if entry.get("content") == text:
            return int(id_text)
    for entry in read_json(folder / "tokenizer.json").get("added_tokens") or ():
        if entry.get("content") == text:
            return int(entry["id"])
    return None

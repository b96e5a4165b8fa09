"""Where the embedded pair lies: a small target, its drafter, and questions to decode.

The files are made by the recipe in `scripts/` with the project's own commands, never by hand.
"""

from __future__ import annotations

from pathlib import Path

from d3d_jax.errors import CheckpointError

_FOLDER = Path(__file__).parent


def target_folder() -> Path:
    """The Hugging Face folder of the embedded target, with its tokenizer.

    Raises:
        CheckpointError: when this installation came without the embedded pair.
    """
    return _found("target", "config.json")


def drafter_folder() -> Path:
    """The Hugging Face folder of the embedded drafter. Raises as :func:`target_folder`."""
    return _found("drafter", "config.json")


def prompts_file() -> Path:
    """JSONL of GSM8K test questions (see `data.prompts.load_prompts`). Raises as :func:`target_folder`."""
    return _found("gsm8k_prompts.jsonl")


def _found(name: str, inside: str = "") -> Path:
    path = _FOLDER / name
    if not (path / inside).is_file():
        raise CheckpointError(
            f"{path / inside} is missing: this installation came without the embedded pair; install the package "
            "anew, make the pair with scripts/ (see the README), or name your own models"
        )
    return path

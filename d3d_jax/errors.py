"""Every exception that d3d_jax raises on purpose.

The message of each says what was found, what was expected and what to do. The command line
prints it as one line and exits with :attr:`D3DError.exit_code`; nothing has been changed by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class D3DError(Exception):
    """Base class: a mistake that the user can mend."""

    exit_code = 2


class ConfigError(D3DError):
    """A configuration key or value that cannot be used."""


class CheckpointError(D3DError):
    """A checkpoint that is missing, incomplete or of another model."""


class DataError(D3DError):
    """Prompts, conversations or token files that cannot be used."""


class DeviceError(D3DError):
    """A device that is not there, or too few of them."""


class CapacityError(D3DError):
    """A request that does not fit the cache or the model's context."""


class CompatibilityError(D3DError):
    """Target, drafter and options that do not go together."""


class TrainingError(D3DError):
    """A training run that cannot go on."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown `name`: ``"; did you mean 'x'?"``, or the known names."""
    known = sorted(known)
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}"

"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


@contextmanager
def stop_signal() -> Iterator[list[int]]:
    """A list that becomes non-empty on the first SIGTERM or SIGINT; the second one acts as usual."""
    received: list[int] = []
    previous = {}

    def note(number: int, _: Any) -> None:
        received.append(number)
        for which, handler in previous.items():
            signal.signal(which, handler)

    try:
        for which in (signal.SIGTERM, signal.SIGINT):
            previous[which] = signal.signal(which, note)
    except ValueError:  # not the main thread: the caller handles signals
        previous.clear()
    try:
        yield received
    finally:
        for which, handler in previous.items():
            signal.signal(which, handler)


def asked_to_stop(received: list[int]) -> bool:
    """Whether any process has received a signal; the processes of a run must all ask, and at the same step."""
    if jax.process_count() == 1:
        return bool(received)
    return bool(multihost_utils.process_allgather(np.asarray(bool(received))).any())

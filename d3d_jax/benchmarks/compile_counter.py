"""Counting compilations, so that a result can say that none happened while it was measured."""

from __future__ import annotations

from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"  # one event for each program that XLA is asked for


class CompileCounter:
    """Counts the programs compiled inside its `with` block, by any thread.

    count: programs. seconds: wall-clock time that XLA took for them, tracing not included.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def __enter__(self) -> CompileCounter:
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration: float, **_: Any) -> None:
        if event == _COMPILED:
            self.count += 1
            self.seconds += duration

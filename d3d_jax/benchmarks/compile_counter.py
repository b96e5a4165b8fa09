"""Counting compilations, so that a result can say that none happened while it was measured."""

from __future__ import annotations

from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"  # one event for each program that XLA is asked for
_FOUND = "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Counts the programs compiled inside its `with` block, by any thread.

    count: programs that were not at hand in this process. from_cache: those of them that JAX's cache on disk had.
    seconds: wall-clock time for all of them, tracing not included.
    """

    def __init__(self) -> None:
        self.count = 0
        self.from_cache = 0
        self.seconds = 0.0

    def __enter__(self) -> CompileCounter:
        jax.monitoring.register_event_duration_secs_listener(self._took)
        jax.monitoring.register_event_listener(self._happened)
        return self

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._took)
        jax.monitoring.unregister_event_listener(self._happened)

    def _took(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            self.count += 1
            self.seconds += duration_secs

    def _happened(self, event: str, **_: Any) -> None:
        self.from_cache += event == _FOUND

"""Counts compilations: how many a start took, and how often a run recompiled after warm-up."""

from __future__ import annotations

import threading

import jax

from agentr1_jax.kept import LOAD_EVENT

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Of a program that was compiled, or found in JAX's cache."""
FOUND_EVENT = "/jax/compilation_cache/cache_retrieval_time_sec"
"""Comes before it, in the same thread, where it was found."""


class CompileCounter:
    """Programs that this process asked for since it was made.

    Attributes:
      count: all of them.
      found: those that had been kept; see `agentr1_jax/kept.py`.
      seconds: that compiling the others took.
    """

    def __init__(self) -> None:
        self.count = self.found = 0
        self.seconds = 0.0
        self._of_thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def __str__(self) -> str:
        return f"{self.found} from the cache, {self.count - self.found} compiled in {self.seconds:.1f} s"

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == FOUND_EVENT:
            self._of_thread.found = True
        elif event in (COMPILE_EVENT, LOAD_EVENT):
            found = event == LOAD_EVENT or getattr(self._of_thread, "found", False)
            self._of_thread.found = False
            self.count += 1
            self.found += found
            self.seconds += 0.0 if found else duration_secs

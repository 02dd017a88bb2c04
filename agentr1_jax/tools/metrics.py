"""Metrics of tool calls, over all trajectories of a rollout."""

from __future__ import annotations

import collections
import threading

import numpy as np

from agentr1_jax.tools.base import ToolResult
from agentr1_jax.tools.threads import abandoned_threads

MAX_DURATIONS = 10_000  # the latest, for percentiles


class ToolMetrics:
    """Counts of calls since the last `reset`. Calls may end in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget every call so far."""
        with self._lock:
            self._calls = self._cancelled = self._failures = self._retries = 0
            self._sum = self._max = 0.0
            self._seconds: collections.deque[float] = collections.deque(maxlen=MAX_DURATIONS)
            self._errors: collections.Counter[str] = collections.Counter()

    def record_call(self, result: ToolResult, seconds: float) -> None:
        """Count a call that came back after `seconds`."""
        with self._lock:
            self._calls += 1
            self._record_seconds(seconds)
            self._failures += not result.ok
            self._count_error(result)

    def record_cancellation(self, seconds: float) -> None:
        """Count a call that was cancelled after `seconds`."""
        with self._lock:
            self._calls += 1
            self._record_seconds(seconds)
            self._cancelled += 1

    def record_retry(self, result: ToolResult) -> None:
        """Count a failed attempt that is repeated."""
        with self._lock:
            self._retries += 1
            self._count_error(result)

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last reset.

        Returns:
          `tools/calls`; of them `tools/cancelled` (the trajectory ended first) and `tools/failures` (came back with an
          error); `tools/retries`; `tools/error/<kind>`, failed attempts, those that were repeated included;
          `time/tool_mean`, `_max`, `_p50` and `_p95` of what a trajectory waited for a call (only where there were
          calls; percentiles over the latest 10,000); `tools/abandoned_threads`, at this moment.
        """
        with self._lock:
            out = {
                "tools/calls": float(self._calls),
                "tools/cancelled": float(self._cancelled),
                "tools/failures": float(self._failures),
                "tools/retries": float(self._retries),
                "tools/abandoned_threads": float(abandoned_threads()),
            }
            if self._calls:
                p50, p95 = np.percentile(self._seconds, [50, 95])
                out["time/tool_mean"] = self._sum / self._calls
                out["time/tool_max"] = self._max
                out["time/tool_p50"] = float(p50)
                out["time/tool_p95"] = float(p95)
            return out | {f"tools/error/{kind}": float(count) for kind, count in sorted(self._errors.items())}

    def _record_seconds(self, seconds: float) -> None:
        self._sum += seconds
        self._max = max(self._max, seconds)
        self._seconds.append(seconds)

    def _count_error(self, result: ToolResult) -> None:
        if result.error is not None:
            self._errors[result.error.kind] += 1

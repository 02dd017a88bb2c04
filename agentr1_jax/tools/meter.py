"""What tool calls cost and how they went, over all trajectories of a rollout."""

from __future__ import annotations

import collections
import threading

import numpy as np

from agentr1_jax.tools.base import ToolResult
from agentr1_jax.tools.threads import left_behind

MOST_SECONDS = 10_000  # latest durations kept for percentiles


class Meter:
    """Counts of calls since the last `reset`. Calls may end in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forgets every call so far."""
        with self._lock:
            self._calls = self._cancelled = self._failures = self._retries = 0
            self._sum = self._max = 0.0
            self._seconds: collections.deque[float] = collections.deque(maxlen=MOST_SECONDS)
            self._errors: collections.Counter[str] = collections.Counter()

    def finished(self, result: ToolResult, seconds: float) -> None:
        """Counts a call that came back."""
        with self._lock:
            self._calls += 1
            self._took(seconds)
            self._failures += not result.ok
            self._count_error(result)

    def cancelled(self, seconds: float) -> None:
        """Counts a call whose trajectory did not wait for it."""
        with self._lock:
            self._calls += 1
            self._took(seconds)
            self._cancelled += 1

    def retried(self, result: ToolResult) -> None:
        """Counts a failed attempt that is made again."""
        with self._lock:
            self._retries += 1
            self._count_error(result)

    def metrics(self) -> dict[str, float]:
        """Figures since the last reset.

        Returns:
          `tools/calls`; of them `tools/cancelled` (the trajectory ended first) and `tools/failures` (came back with an
          error); `tools/retries`; `tools/error/<kind>`, failed attempts, those that were made again included;
          `time/tool_mean`, `_max`, `_p50` and `_p95` of what a trajectory waited for a call (only where there were
          calls; percentiles over the latest 10,000); `tools/threads_left_behind`, at this moment.
        """
        with self._lock:
            out = {
                "tools/calls": float(self._calls),
                "tools/cancelled": float(self._cancelled),
                "tools/failures": float(self._failures),
                "tools/retries": float(self._retries),
                "tools/threads_left_behind": float(left_behind()),
            }
            if self._calls:
                p50, p95 = np.percentile(self._seconds, [50, 95])
                out["time/tool_mean"] = self._sum / self._calls
                out["time/tool_max"] = self._max
                out["time/tool_p50"] = float(p50)
                out["time/tool_p95"] = float(p95)
            return out | {f"tools/error/{kind}": float(count) for kind, count in sorted(self._errors.items())}

    def _took(self, seconds: float) -> None:
        self._sum += seconds
        self._max = max(self._max, seconds)
        self._seconds.append(seconds)

    def _count_error(self, result: ToolResult) -> None:
        if result.error is not None:
            self._errors[result.error.kind] += 1

"""Wrappers around a tool, each a Tool itself: time limit, retries, concurrency limit, truncation, measurement.

They take valid arguments (`base.call` validates once, outside of them) and hand on results, never exceptions.
`batching.Batched` is one more, and `wrap_tool` nests them in the order that makes sense.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from pydantic.dataclasses import dataclass

from agentr1_jax.tools import base
from agentr1_jax.tools.base import Fault, PerLoop, Tool, ToolError, ToolResult, Wrapper, abandoned_threads
from agentr1_jax.tools.batching import Batched
from agentr1_jax.validation import STRICT, Count, NonNegative, Whole

MAX_DURATIONS = 10_000  # the latest, for percentiles


@dataclass(frozen=True, config=STRICT)
class ToolsConfig:
    """Limits of every tool call; 0 leaves a limit out.

    A call ends within max_attempts · timeout_seconds plus its pauses, not counting the time that it queues while
    `max_concurrent` others run.

    Attributes:
      timeout_seconds: time limit of one attempt.
      max_attempts: attempts at a call that fails by a fault of the infrastructure.
      backoff_seconds: pause before the second attempt, doubled for each further one (with jitter, at most 30 s).
      max_concurrent: calls of one tool that run at once, in each process.
      max_batch: calls in one batch of a tool that has `execute_batch` (no more than `max_concurrent` come together).
      batch_milliseconds: time for which calls are collected for a batch.
      max_characters: length of a result's content; the rest is truncated.
      lenient: repair calls whose JSON is broken; see docs/context.md.
    """

    timeout_seconds: NonNegative = 30.0
    max_attempts: Count = 3
    backoff_seconds: NonNegative = 0.5
    max_concurrent: Whole = 64
    max_batch: Whole = 32
    batch_milliseconds: NonNegative = 2.0
    max_characters: Whole = 20_000
    lenient: bool = False


def wrap_tool(tool: Tool, config: ToolsConfig, metrics: ToolMetrics) -> Tool:
    """Return the tool within its limits, measured.

    From the inside: batches, time limit, concurrency limit (queueing is not timed), retries (a pause holds no place),
    truncation, metrics.
    """
    inner = tool
    if config.max_batch and hasattr(tool, "execute_batch"):
        inner = Batched(inner, config.batch_milliseconds, config.max_batch)
    if config.timeout_seconds:
        inner = TimeLimited(inner, config.timeout_seconds)
    if config.max_concurrent:
        inner = ConcurrencyLimited(inner, config.max_concurrent)
    if config.max_attempts > 1:
        inner = Retried(inner, config.max_attempts, config.backoff_seconds, on_retry=metrics.record_retry)
    if config.max_characters:
        inner = Truncated(inner, config.max_characters)
    return Measured(inner, metrics)


@dataclasses.dataclass(frozen=True)
class TimeLimited(Wrapper):
    """A call that takes longer than `seconds` fails with `timeout`; nobody waits for what is left of it."""

    seconds: float
    fault: Fault = "infrastructure"

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        # A task of its own: a tool that ignores its cancellation must not be waited for.
        call = asyncio.ensure_future(base.execute(self.tool, arguments))
        try:
            await asyncio.wait([call], timeout=self.seconds)
            if call.done():
                return call.result()
        finally:
            call.cancel()
        return base.failure("timeout", f"Error: {self.name} took more than {self.seconds:g} s.", self.fault)


@dataclasses.dataclass(frozen=True)
class Retried(Wrapper):
    """Repeat a call that fails by a fault of the infrastructure, up to `max_attempts` attempts in all.

    The pause before retry n = 1, 2, ... is u · min(backoff_seconds · 2ⁿ⁻¹, max_pause) seconds with ½ <= u < 1 keyed by
    tool, arguments and n, so that calls that failed together do not come back together.

    Attributes:
      on_retry: gets each failed result that is not the last.
    """

    max_attempts: int
    backoff_seconds: float
    max_pause: float = 30.0
    on_retry: Callable[[ToolResult], None] = lambda result: None

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        attempt = 1
        result = await base.execute(self.tool, arguments)
        while result.error is not None and result.error.fault == "infrastructure" and attempt < self.max_attempts:
            self.on_retry(result)
            await asyncio.sleep(self.pause(arguments, attempt))
            result = await base.execute(self.tool, arguments)
            attempt += 1
        return result

    def pause(self, arguments: Mapping[str, Any], retry: int) -> float:
        """Return the seconds before retry number `retry`, counted from 1."""
        jitter = 0.5 + keyed_uniform("retry", self.name, canonical_json(arguments), retry) / 2
        return jitter * min(self.backoff_seconds * 2.0 ** (retry - 1), self.max_pause)


@dataclasses.dataclass(frozen=True)
class ConcurrencyLimited(Wrapper):
    """Run at most `max_concurrent` calls at once in each event loop; the others queue in order of arrival."""

    max_concurrent: int
    _semaphores: PerLoop[asyncio.Semaphore] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_semaphores", PerLoop(lambda: asyncio.Semaphore(self.max_concurrent)))

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        async with self._semaphores.get():
            return await base.execute(self.tool, arguments)


@dataclasses.dataclass(frozen=True)
class Truncated(Wrapper):
    """Truncate content beyond `max_characters` and say so; the fault is the model's, kind `oversized`.

    Data and reward stay, and so does the error of a call that had failed anyway.
    """

    max_characters: int

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        result = await base.execute(self.tool, arguments)
        total = len(result.content)
        if total <= self.max_characters:
            return result
        content = f"{result.content[: self.max_characters]}\n[Error: result too long, {total - self.max_characters} of "
        content += f"{total} characters cut.]"
        return dataclasses.replace(
            result, content=content, ok=False, error=result.error or ToolError("oversized", "model")
        )


@dataclasses.dataclass(frozen=True)
class Measured(Wrapper):
    """Record how each call went and how long it took, waiting and retries included."""

    metrics: ToolMetrics

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        start = time.perf_counter()
        try:
            result = await base.execute(self.tool, arguments)
        except asyncio.CancelledError:
            self.metrics.record_cancellation(time.perf_counter() - start)
            raise
        self.metrics.record_call(result, time.perf_counter() - start)
        return result


def canonical_json(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON text, equal for equal arguments."""
    return json.dumps(dict(arguments), sort_keys=True, default=repr)


def keyed_uniform(*key: str | int) -> float:
    """Return u with 0 <= u < 1, uniform over keys; equal keys have equal numbers in every process."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


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

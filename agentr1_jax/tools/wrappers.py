"""Wrappers around a tool, each a Tool itself: batches, time limit, concurrency limit, retries, truncation, metrics.

They take valid arguments (`base.call` validates once, outside of them) and hand on results, never exceptions.
`wrap_tool` nests them in the order that makes sense.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic.dataclasses import dataclass

from agentr1_jax.http import retry_pause
from agentr1_jax.tools import base
from agentr1_jax.tools.base import Tool, ToolError, ToolResult, abandoned_threads
from agentr1_jax.validation import STRICT, Count, NonNegative, Whole

T = TypeVar("T")


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
      lenient: repair calls whose JSON is broken; see docs/call_formats.md.
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
class Wrapper:
    """Base of all wrappers: name, description and parameters are those of the tool inside."""

    tool: Tool

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def description(self) -> str:
        return self.tool.description

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self.tool.parameters


class PerLoop(Generic[T]):
    """A value for each running event loop: each rollout has its own, and asyncio's locks and futures do not travel.

    `make` makes the value where it is first asked for; values of closed loops are dropped.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[asyncio.AbstractEventLoop, T] = {}

    def get(self) -> T:
        """Return the running loop's value."""
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            for other in [loop for loop in list(self._values) if loop.is_closed()]:
                self._values.pop(other, None)
            self._values[loop] = self._make()
        return self._values[loop]


@dataclasses.dataclass(eq=False)
class _Call:
    arguments: Mapping[str, Any]
    result: asyncio.Future[ToolResult]


@dataclasses.dataclass
class _Queue:
    """Calls that wait to be sent, the timer that will send them, and the batches that run."""

    calls: list[_Call] = dataclasses.field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    batches: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Batched(Wrapper):
    """Run calls by the tool's `execute_batch(sequence of arguments) -> sequence of ToolResult`, sync or async.

    A batch is sent when it holds `max_batch` calls, or `milliseconds` after its first one. A cancelled waiter takes
    back only its own call; a batch that nobody waits for any more is cancelled. An exception of `execute_batch` fails
    every call of its batch (`exception`), as does a wrong number of results (`bad_result`).
    """

    milliseconds: float
    max_batch: int
    _queues: PerLoop[_Queue] = dataclasses.field(
        default_factory=lambda: PerLoop(_Queue), init=False, repr=False, compare=False
    )

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Join the next batch and wait for the result of this call."""
        loop, queue = asyncio.get_running_loop(), self._queues.get()
        call = _Call(arguments, loop.create_future())
        queue.calls.append(call)
        if len(queue.calls) >= self.max_batch:
            self._send(queue)
        elif queue.timer is None:
            queue.timer = loop.call_later(self.milliseconds / 1000, self._send, queue)
        try:
            return await call.result
        finally:
            if call in queue.calls:  # Cancelled before it was sent: it shall not count towards `max_batch`.
                queue.calls.remove(call)

    def _send(self, queue: _Queue) -> None:
        if queue.timer is not None:
            queue.timer.cancel()
        calls, queue.calls, queue.timer = queue.calls, [], None
        if not calls:
            return
        batch = asyncio.get_running_loop().create_task(self._run(calls))
        queue.batches.add(batch)  # The loop itself keeps no task alive.
        batch.add_done_callback(queue.batches.discard)

        def cancel_without_waiters(_: asyncio.Future[ToolResult]) -> None:
            if all(call.result.done() for call in calls):
                batch.cancel()

        for call in calls:
            call.result.add_done_callback(cancel_without_waiters)

    async def _run(self, calls: Sequence[_Call]) -> None:
        try:
            results = await _execute_batch(self.tool, [call.arguments for call in calls])
            for call, result in zip(calls, results, strict=True):
                if not call.result.done():
                    call.result.set_result(result)
        finally:
            for call in calls:  # Nobody may wait for a batch that is gone.
                call.result.cancel()


async def _execute_batch(tool: Any, arguments: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return one result per call, whatever the tool does; each call checks its own."""
    results, failure = await base.run_safely(tool, tool.execute_batch, arguments)
    if failure is None and not (isinstance(results, Sequence) and len(results) == len(arguments)):
        count = len(results) if isinstance(results, Sequence) else f"a {type(results).__name__} of"
        content = f"Error: {tool.name} returned {count} results for a batch of {len(arguments)}"
        failure = base.failure("bad_result", content, "infrastructure")
    return [failure] * len(arguments) if failure else list(results)


@dataclasses.dataclass(frozen=True)
class TimeLimited(Wrapper):
    """A call that takes longer than `seconds` fails with `timeout`; nobody waits for what is left of it."""

    seconds: float

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        # A task of its own: a tool that ignores its cancellation must not be waited for.
        call = asyncio.ensure_future(base.execute(self.tool, arguments))
        try:
            await asyncio.wait([call], timeout=self.seconds)
            if call.done():
                return call.result()
        finally:
            call.cancel()
        return base.failure("timeout", f"Error: {self.name} took more than {self.seconds:g} s.", "infrastructure")


@dataclasses.dataclass(frozen=True)
class Retried(Wrapper):
    """Repeat a call that fails by a fault of the infrastructure, up to `max_attempts` attempts in all.

    The pause before each is that of `http.retry_pause`.

    Attributes:
      on_retry: gets each failed result that is not the last.
    """

    max_attempts: int
    backoff_seconds: float
    on_retry: Callable[[ToolResult], None] = lambda result: None

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        attempt = 1
        result = await base.execute(self.tool, arguments)
        while result.error is not None and result.error.fault == "infrastructure" and attempt < self.max_attempts:
            self.on_retry(result)
            await asyncio.sleep(retry_pause(self.backoff_seconds, attempt))
            result = await base.execute(self.tool, arguments)
            attempt += 1
        return result


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
            self.metrics.record_call(None, time.perf_counter() - start)
            raise
        self.metrics.record_call(result, time.perf_counter() - start)
        return result


class ToolMetrics:
    """Counts and durations of calls since the last `reset`. Calls may end in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget every call so far."""
        with self._lock:
            self._counts = collections.Counter(calls=0, cancelled=0, failures=0, retries=0)
            self._errors: collections.Counter[str] = collections.Counter()
            self._seconds: list[float] = []

    def record_call(self, result: ToolResult | None, seconds: float) -> None:
        """Count a call that ended after `seconds`; its result is None where it was cancelled."""
        with self._lock:
            self._counts["calls"] += 1
            self._counts["cancelled"] += result is None
            self._counts["failures"] += result is not None and not result.ok
            self._seconds.append(seconds)
            self._count_error(result)

    def record_retry(self, result: ToolResult) -> None:
        """Count a failed attempt that is repeated."""
        with self._lock:
            self._counts["retries"] += 1
            self._count_error(result)

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last reset.

        Returns:
          `tools/calls`; of them `tools/cancelled` (the trajectory ended first) and `tools/failures` (came back with an
          error); `tools/retries`; `tools/error/<kind>`, failed attempts, those that were repeated included;
          `time/tool_mean`, `_max`, `_p50` and `_p95` of what a trajectory waited for a call (only where there were
          calls); `tools/abandoned_threads`, at this moment.
        """
        with self._lock:
            out = {f"tools/{name}": float(count) for name, count in self._counts.items()}
            out["tools/abandoned_threads"] = float(abandoned_threads())
            if self._seconds:
                p50, p95 = np.percentile(self._seconds, [50, 95])
                out["time/tool_mean"] = sum(self._seconds) / len(self._seconds)
                out["time/tool_max"] = max(self._seconds)
                out["time/tool_p50"] = float(p50)
                out["time/tool_p95"] = float(p95)
            return out | {f"tools/error/{kind}": float(count) for kind, count in sorted(self._errors.items())}

    def _count_error(self, result: ToolResult | None) -> None:
        if result is not None and result.error is not None:
            self._errors[result.error.kind] += 1

"""Wrappers around a tool, each a Tool itself: time limit, retries, concurrency limit, truncation, measurement.

They take valid arguments (`base.call` validates once, outside of them) and hand on results, never exceptions.
`batching.Batched` is one more, and `config.wrap_tool` nests them in the order that makes sense.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from agentr1_jax.tools import base
from agentr1_jax.tools.base import Fault, Tool, ToolError, ToolResult
from agentr1_jax.tools.metrics import ToolMetrics

T = TypeVar("T")


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

    Args:
      make: makes the value where it is first asked for; values of closed loops are dropped.
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

"""Wrappers around a tool, each a Tool itself: time limit, retries, a cap on concurrent calls, a cut, a meter.

They take valid arguments (`base.call` validates once, outside of them) and hand on results, never exceptions.
`batched.Batched` is one more, and `limits.wrapped` puts them in the order that makes sense.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from agentr1_jax.tools import base
from agentr1_jax.tools.base import Fault, Tool, ToolError, ToolResult
from agentr1_jax.tools.keyed import canonical, uniform
from agentr1_jax.tools.meter import Meter
from agentr1_jax.tools.per_loop import PerLoop


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """What all wrappers share: the tool inside lends its name, description and parameters."""

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

    @property
    def scope(self) -> str:
        """What tells tools of one name apart where their calls are recorded; `""` for those that do not say."""
        return getattr(self.tool, "scope", "")


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
        return base.failed("timeout", f"Error: {self.name} took more than {self.seconds:g} s.", self.fault)


@dataclasses.dataclass(frozen=True)
class Retried(Wrapper):
    """Makes a call that fails by a fault of the infrastructure again, at most `attempts` times in all.

    The pause before retry n = 1, 2, ... is u · min(backoff · 2ⁿ⁻¹, most_backoff) seconds with ½ <= u < 1 keyed by tool,
    arguments and n, so that calls that failed together do not come back together.

    Attributes:
      on_retry: gets each failed result that is not the last.
    """

    attempts: int
    backoff: float
    most_backoff: float = 30.0
    on_retry: Callable[[ToolResult], None] = lambda result: None

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        attempt = 1
        result = await base.execute(self.tool, arguments)
        while result.error is not None and result.error.fault == "infrastructure" and attempt < self.attempts:
            self.on_retry(result)
            await asyncio.sleep(self.pause(arguments, attempt))
            result = await base.execute(self.tool, arguments)
            attempt += 1
        return result

    def pause(self, arguments: Mapping[str, Any], retry: int) -> float:
        """Seconds before retry number `retry`, counted from 1."""
        jitter = 0.5 + uniform("retry", self.name, canonical(arguments), retry) / 2
        return jitter * min(self.backoff * 2.0 ** (retry - 1), self.most_backoff)


@dataclasses.dataclass(frozen=True)
class Capped(Wrapper):
    """Lets at most `calls` calls run at once in each event loop; the others queue in order of arrival."""

    calls: int
    _places: PerLoop[asyncio.Semaphore] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_places", PerLoop(lambda: asyncio.Semaphore(self.calls)))

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        async with self._places.get():
            return await base.execute(self.tool, arguments)


@dataclasses.dataclass(frozen=True)
class Shortened(Wrapper):
    """Cuts content beyond `characters` and says so; what is cut is the model's fault, kind `oversized`.

    Data and reward stay, and so does the error of a call that had failed anyway.
    """

    characters: int

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        result = await base.execute(self.tool, arguments)
        total = len(result.content)
        if total <= self.characters:
            return result
        content = f"{result.content[: self.characters]}\n[Error: result too long, {total - self.characters} of "
        content += f"{total} characters cut.]"
        return dataclasses.replace(
            result, content=content, ok=False, error=result.error or ToolError("oversized", "model")
        )


@dataclasses.dataclass(frozen=True)
class Measured(Wrapper):
    """Tells a meter how each call went and how long it took, waiting and retries included."""

    meter: Meter

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        start = time.perf_counter()
        try:
            result = await base.execute(self.tool, arguments)
        except asyncio.CancelledError:
            self.meter.cancelled(time.perf_counter() - start)
            raise
        self.meter.finished(result, time.perf_counter() - start)
        return result

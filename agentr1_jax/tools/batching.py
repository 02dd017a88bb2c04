"""Micro-batches: calls of many trajectories, collected over a few milliseconds, run as one `execute_batch`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_jax.tools import base
from agentr1_jax.tools.base import PerLoop, ToolResult, Wrapper


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

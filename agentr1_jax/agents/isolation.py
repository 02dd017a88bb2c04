"""Run agents so that whatever one of them does ends its own trajectory only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from agentr1_jax.agents.base import Agent, Row
from agentr1_jax.agents.session import RecordedSession

CANCEL_SECONDS = 1.0
"""Time that a cancelled agent has to end."""
CANCELLATIONS = 3
"""Cancellations of an agent that goes on regardless, before its coroutine is closed."""


class AgentTimeout(Exception):
    """An agent did not end within its time."""


class Isolation:
    """The agents that run in one event loop, each in the task of its trajectory.

    An environment may raise anything, cancel the task that it runs in, or ignore a cancellation.
    """

    def __init__(self) -> None:
        self._closing = False
        self._running: set[Coroutine[Any, Any, None]] = set()

    async def run(
        self, agent: Agent, session: RecordedSession, row: Row | Exception, seconds: float | None
    ) -> BaseException | None:
        """Run an agent in the current task and return what it raised.

        Args:
          agent: workflow.
          session: session of the trajectory.
          row: task row, or what making it raised.
          seconds: time limit; None for no limit.

        Returns:
          None; what the agent raised; `AgentTimeout` at the time limit.

        Raises:
          asyncio.CancelledError: `close` was called.
          KeyboardInterrupt: the user interrupts the run.
        """
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        error: BaseException | None = None
        limit = asyncio.timeout(seconds)
        coroutine = _run(agent, session, row)
        self._running.add(coroutine)
        insist = None if seconds is None else _Insistence(task, coroutine, seconds)
        try:
            async with limit:
                await coroutine
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            error = raised
        finally:
            self._running.discard(coroutine)
            if insist is not None:
                insist.stop()
        if self._closing:
            raise asyncio.CancelledError from error
        if task.cancelling() > before:  # The agent cancelled its own task, or went on after its time.
            await _absorb_cancellation(task, before)
        if limit.expired() and (
            error is None or isinstance(error, TimeoutError | RuntimeError | asyncio.CancelledError)
        ):
            return AgentTimeout(f"no end within {seconds} s")
        return error

    async def close(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Cancel the tasks in which agents run, and wait for their end."""
        self._closing = True
        left = set(tasks)
        for attempt in range(CANCELLATIONS + 1):
            if not left:
                break
            if attempt == CANCELLATIONS:
                for coroutine in tuple(self._running):
                    _close_coroutine(coroutine)
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=CANCEL_SECONDS)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # Retrieved, so that the event loop does not report it.


class _Insistence:
    """Cancels an agent again and again after its time limit, and closes its coroutine in the end."""

    def __init__(self, task: asyncio.Task[Any], coroutine: Coroutine[Any, Any, None], seconds: float) -> None:
        self._task, self._coroutine = task, coroutine
        self._left = CANCELLATIONS
        self._call_later: Callable[..., asyncio.TimerHandle] = asyncio.get_running_loop().call_later
        self._handle = self._call_later(seconds + CANCEL_SECONDS, self._cancel)

    def stop(self) -> None:
        self._handle.cancel()

    def _cancel(self) -> None:
        self._left -= 1
        if self._left == 0:
            _close_coroutine(self._coroutine)
        else:
            self._handle = self._call_later(CANCEL_SECONDS, self._cancel)
        self._task.cancel()


def _close_coroutine(coroutine: Coroutine[Any, Any, None]) -> None:
    """End a suspended coroutine by GeneratorExit, which handlers of CancelledError and Exception let pass."""
    with contextlib.suppress(Exception):  # RuntimeError where it catches even this.
        coroutine.close()


async def _absorb_cancellation(task: asyncio.Task[Any], before: int) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while task.cancelling() > before:
        task.uncancel()


async def _run(agent: Agent, session: RecordedSession, row: Row | Exception) -> None:
    if isinstance(row, Exception):
        raise row
    session.begin(row)
    await agent.run(session, row)

"""An engine that rolls out in a thread of its own, while the caller waits, trains or samples something else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.engine import Engine

T = TypeVar("T")

POLL_SECONDS = 0.2
"""Interval at which `wait` asks whether to stop."""


class BackgroundEngine(contextlib.AbstractContextManager["BackgroundEngine"]):
    """An open engine in a thread of its own, to which other threads give work.

    The parameters must not be donated elsewhere: the engine needs a copy of its own. Where the learner uses the same
    devices, its programs must go through `engine.dispatcher.call`.
    """

    def __init__(self, engine: Engine, params: Params, version: int) -> None:
        self.engine = engine
        self._unfinished: set[concurrent.futures.Future[Any]] = set()
        self._opened: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, args=(params, version), name="rollouts", daemon=True)
        self._thread.start()
        self._loop = self._opened.result()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the loop of the engine.

        The future of its result raises the exception of the coroutine, or of the engine beneath it.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        async def run() -> None:
            try:
                result = await work
            except Exception as error:
                self._unfinished.discard(future)
                future.set_exception(error)
            else:
                self._unfinished.discard(future)
                future.set_result(result)

        self._unfinished.add(future)
        try:
            self._loop.call_soon_threadsafe(lambda: self._tasks.create_task(run()))
        except RuntimeError as error:
            work.close()
            raise RuntimeError("the engine is closed; see the error of its earlier work") from error
        return future

    def adopt(self, params: Params, version: int) -> None:
        """Sample with other parameters as soon as no response is in progress; see `Engine.adopt`."""
        self._loop.call_soon_threadsafe(self.engine.adopt, params, version)

    def close(self) -> None:
        """Abort the work in progress, and free the cache."""
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self, params: Params, version: int) -> None:
        ended: BaseException = concurrent.futures.CancelledError("the engine was closed")
        try:
            asyncio.run(self._run(params, version))
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            ended = error
        if not self._opened.done():
            self._opened.set_exception(ended)
        for future in self._unfinished:
            future.set_exception(ended)

    async def _run(self, params: Params, version: int) -> None:
        self._stop = asyncio.Event()
        async with self.engine.open(params, version), asyncio.TaskGroup() as self._tasks:
            self._opened.set_result(asyncio.get_running_loop())
            await self._stop.wait()
            raise asyncio.CancelledError  # Aborts the tasks of the group.


def wait(future: concurrent.futures.Future[T], stop: Callable[[], bool]) -> T | None:
    """Wait for the result of work in another thread; return None if `stop` returned True first."""
    while not stop():
        if concurrent.futures.wait([future], POLL_SECONDS).done:
            return future.result()
    return None

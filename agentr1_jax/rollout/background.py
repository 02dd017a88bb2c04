"""An engine that rolls out in a thread of its own, while the caller waits, trains or samples something else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.engine import Engine

T = TypeVar("T")

POLL_SECONDS = 0.2
"""Interval at which `wait` asks whether to stop."""


class BackgroundEngine:
    """One long stream of an engine in a thread of its own, to which other threads give work.

    The parameters must not be donated elsewhere: the engine needs a copy of its own. Where the learner uses the same
    devices, its programs must go through `engine.dispatcher.call`.

    Args:
      engine: must have no stream open.
      params: decoder parameters on the engine's mesh.
      version: version of the policy.

    Attributes:
      engine: the engine.
    """

    def __init__(self, engine: Engine, params: Params, version: int) -> None:
        self.engine = engine
        self._unfinished: set[concurrent.futures.Future[Any]] = set()
        self._opened: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, args=(params, version), name="rollouts", daemon=True)
        self._thread.start()
        self._loop = self._opened.result()

    def start(self, generator: Callable[[], AsyncIterator[T]]) -> concurrent.futures.Future[list[T]]:
        """Run an async generator, such as `sample_groups`, in the loop of the engine.

        Args:
          generator: function that makes it; called in the loop.

        Returns:
          future of the list of its items. It raises the exception of the generator, or of the engine beneath it.
        """

        async def collect() -> list[T]:
            return [item async for item in generator()]

        return self._submit(collect())

    def adopt(self, params: Params, version: int) -> None:
        """Sample with other parameters as soon as no response is in progress; see `Engine.adopt`."""

        async def adopt() -> None:
            self.engine.adopt(params, version)

        self._submit(adopt())

    def close(self) -> None:
        """Abort the work in progress, and free the cache."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> BackgroundEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the engine's stream has ended; see the error of its earlier work")
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._unfinished.add(future)

        def finish(inner: concurrent.futures.Future[T]) -> None:
            if inner.cancelled():
                return  # By the end of the whole stream, where `_serve` sets the exception.
            self._unfinished.discard(future)
            error = inner.exception()
            future.set_exception(error) if error else future.set_result(inner.result())

        asyncio.run_coroutine_threadsafe(work, self._loop).add_done_callback(finish)
        return future

    def _serve(self, params: Params, version: int) -> None:
        async def serve() -> AsyncIterator[None]:
            self._stop = asyncio.Event()
            self._opened.set_result(asyncio.get_running_loop())
            await self._stop.wait()
            yield

        try:
            for _ in self.engine.stream(params, serve, version):
                pass
            ended: BaseException = concurrent.futures.CancelledError("the engine was closed")
        except BaseException as error:
            ended = error
        if not self._opened.done():
            self._opened.set_exception(ended)
        for future in self._unfinished:
            future.set_exception(ended)


def wait(future: concurrent.futures.Future[T], stop: Callable[[], bool]) -> T | None:
    """Wait for the result of work in another thread.

    Args:
      future: the work.
      stop: asked every `POLL_SECONDS` whether to stop waiting.

    Returns:
      the result, or None if `stop` returned True first.
    """
    while not stop():
        if concurrent.futures.wait([future], POLL_SECONDS).done:
            return future.result()
    return None

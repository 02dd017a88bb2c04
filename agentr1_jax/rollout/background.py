"""An engine that rolls out in a thread of its own, while the learner updates."""

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


class Background:
    """One long stream of an engine, in a thread of its own, that other threads give work to.

    The parameters must not be donated elsewhere: the engine needs a copy of its own. Where the learner uses the same
    devices, its programs must go through `engine.in_turn`.

    Args:
      engine: must have no stream open.
      params: decoder parameters on its mesh.
      version: of the policy.
    """

    def __init__(self, engine: Engine, params: Params, version: int) -> None:
        self._engine = engine
        self._given: set[concurrent.futures.Future[Any]] = set()
        self._opened: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, args=(params, version), name="rollouts", daemon=True)
        self._thread.start()
        self._loop = self._opened.result()

    def start(self, make: Callable[[], AsyncIterator[T]]) -> concurrent.futures.Future[list[T]]:
        """Runs an async generator, such as `sample_groups` makes, in the engine's loop; gives what it yields.

        The future raises what the generator, or the engine beneath it, raised.
        """

        async def gathered() -> list[T]:
            return [item async for item in make()]

        return self._give(gathered())

    def adopt(self, params: Params, version: int) -> None:
        """Samples with other parameters as soon as no response is under way; see `Engine.adopt`."""

        async def adopted() -> None:
            self._engine.adopt(params, version)

        self._give(adopted())

    def close(self) -> None:
        """Breaks off what is under way, and frees the cache."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _give(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the engine's stream has ended; see the error of the work it was given before")
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._given.add(future)

        def ended(inner: concurrent.futures.Future[T]) -> None:
            if inner.cancelled():
                return  # With the whole stream, whose end says why.
            self._given.discard(future)
            error = inner.exception()
            future.set_exception(error) if error else future.set_result(inner.result())

        asyncio.run_coroutine_threadsafe(work, self._loop).add_done_callback(ended)
        return future

    def _serve(self, params: Params, version: int) -> None:
        async def serve() -> AsyncIterator[None]:
            self._stop = asyncio.Event()
            self._opened.set_result(asyncio.get_running_loop())
            await self._stop.wait()
            yield

        try:
            for _ in self._engine.stream(params, serve, version):
                pass
            ended: BaseException = concurrent.futures.CancelledError("the engine was closed")
        except BaseException as error:
            ended = error
        if not self._opened.done():
            self._opened.set_exception(ended)
        for future in self._given:
            future.set_exception(ended)

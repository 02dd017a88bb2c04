"""Event loop of agents, environments and tools: whatever they do to it, it goes on, and it ends in bounded time.

`asyncio.run` will not do: SystemExit in any task, or `loop.stop()`, ends its loop for everybody. At its end it waits
for every task and every thread of `asyncio.to_thread`, however long they ignore their cancellation.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

from absl import logging

P = ParamSpec("P")
T = TypeVar("T")

CANCEL_SECONDS = 1.0
"""Time that a cancelled task has to end."""
CANCELLATIONS = 3
"""Cancellations of a task that goes on regardless, before its coroutine is closed."""
ASYNCIO = os.path.dirname(asyncio.__file__)


class DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """Executor of `asyncio.to_thread` that gives each call a daemon thread of its own.

    The threads of a pool are joined when the program ends, and calls that hang take the places of others.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        """See `Executor.submit`."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except StopIteration:  # A coroutine can neither raise nor receive it.
                    future.set_exception(RuntimeError(f"{fn} raised StopIteration"))
                except BaseException as error:  # It belongs to the waiter, whatever it is.
                    future.set_exception(error)

        threading.Thread(target=work, daemon=True, name="to_thread").start()
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of its own, as `asyncio.run` does; return or raise what it does.

    Tasks that are left at its end are ended by `end_task`.
    """
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        loop.set_default_executor(DaemonThreads())
        task = loop.create_task(main)
        _run_to_end(loop, task)
        return task.result()
    finally:
        _run_to_end(loop, loop.create_task(_end_all()))
        asyncio.set_event_loop(None)
        loop.close()


def start(main: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Run a coroutine as `run` does, in a daemon thread of its own."""
    return DaemonThreads().submit(run, main)


def _run_to_end(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    """Run a loop until a task is done, also where user code stops the loop before."""
    task.add_done_callback(lambda _: loop.stop())
    while not task.done():
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:  # Of a task, which has it as its exception, too.
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C.
            logging.warning("a task of an environment, tool or agent raised %s", type(error).__name__)


async def _end_all() -> None:
    """End all other tasks of the loop, and its asynchronous generators."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*map(end_task, others))
    generators = asyncio.create_task(asyncio.get_running_loop().shutdown_asyncgens(), name="generators")
    await asyncio.wait([generators], timeout=CANCEL_SECONDS)
    await end_task(generators)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        _keep_for_ever(task, *_chain(task.get_coro()))


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it ends; close the coroutine of one that goes on regardless, and wait no longer for it.

    It takes at most (`CANCELLATIONS` + 1) · `CANCEL_SECONDS`.
    """
    for _ in range(CANCELLATIONS):
        if task.done():
            break
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_SECONDS)
    if not task.done():
        chain = _chain(task.get_coro())
        place = _place(chain)
        with contextlib.suppress(BaseException):  # RuntimeError where it catches even GeneratorExit.
            chain[0].close()
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_SECONDS)
        logging.warning(
            "%s ignored %d cancellations, at %s: it is %s",
            *(task.get_name(), CANCELLATIONS, place, "closed" if task.done() else "left behind"),
        )
        if not task.done() or any(getattr(part, "cr_frame", None) for part in chain):
            _keep_for_ever(task, *chain)
    if task.done() and not task.cancelled():
        task.exception()  # Retrieved, so that the event loop does not report it.


def _chain(coroutine: Any) -> list[Any]:
    """Return a coroutine, what it awaits, what that awaits, and so on."""
    chain = []
    while coroutine is not None:
        chain.append(coroutine)
        coroutine = getattr(coroutine, "cr_await", None)
    return chain


def _place(chain: Sequence[Any]) -> str:
    """Return function, file and line where a chain of coroutines waits: the innermost one outside of asyncio."""
    place = "an unknown place"
    for frame in (part.cr_frame for part in chain if getattr(part, "cr_frame", None)):
        if os.path.dirname(frame.f_code.co_filename) != ASYNCIO:
            place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
    return place


def _keep_for_ever(*objects: Any) -> None:
    """Keep what ignores even that it is closed from the garbage collector and from the end of the interpreter.

    These would close it once more, in any thread: without its event loop it may never come back from that.
    """
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

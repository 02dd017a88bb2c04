"""Blocking calls in threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_abandoned: set[threading.Thread] = set()
_lock = threading.Lock()


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a daemon thread of its own; return or raise what it does.

    A thread pool will not do: its threads are joined at exit, and calls that hang would take its places from others.
    Where the waiter is cancelled the call is not, for Python cannot stop a thread: it ends by itself, its result is
    dropped, and until then `abandoned_threads` counts it. The event loop may be closed before that.
    """
    loop = asyncio.get_running_loop()
    # A pair, since a future refuses some exceptions (StopIteration) and treats others (CancelledError) as its own.
    outcome: asyncio.Future[tuple[list[T], BaseException | None]] = loop.create_future()

    def deliver(values: list[T], error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((values, error))

    def work() -> None:
        values: list[T] = []
        raised: BaseException | None = None
        try:
            values.append(function(*args, **kwargs))
        except BaseException as error:  # It belongs to the waiter, whatever it is.
            raised = error
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(deliver, values, raised)

    context = contextvars.copy_context()
    name = f"run_in_thread:{getattr(function, '__qualname__', 'call')}"
    thread = threading.Thread(target=context.run, args=(work,), daemon=True, name=name)
    thread.start()
    try:
        values, error = await outcome
    except BaseException:
        _abandon(thread)
        raise
    if error is not None:
        raise error
    return values[0]


def abandoned_threads() -> int:
    """Return the number of threads that still run a call whose waiter was cancelled."""
    with _lock:
        _forget_ended()
        return len(_abandoned)


def _abandon(thread: threading.Thread) -> None:
    with _lock:
        _forget_ended()
        _abandoned.add(thread)


def _forget_ended() -> None:
    _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])

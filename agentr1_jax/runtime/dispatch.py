"""Order of device programs among threads.

A device runs programs in the order in which they were enqueued, and a program over several devices waits for all of
them. Two threads could enqueue two such programs in different orders on two devices, and both would wait for ever. So
while an engine rolls out in a thread of its own, all other code enqueues its programs through that engine's dispatcher.
Enqueueing is quick; callers wait for results in their own threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
Dispatch = Callable[[Callable[[], Any]], Any]


def _call(program: Callable[[], Any]) -> Any:
    return program()


_dispatch: Dispatch = _call


def enqueue(program: Callable[..., T], *args: Any) -> T:
    """Call a function that runs device programs, through the current dispatcher."""
    return _dispatch(lambda: program(*args))


@contextlib.contextmanager
def use_dispatcher(dispatch: Dispatch) -> Iterator[None]:
    """Enqueue programs through `dispatch`, e.g. `Engine.dispatch_from_thread`, while this context lasts."""
    global _dispatch
    previous, _dispatch = _dispatch, dispatch
    try:
        yield
    finally:
        _dispatch = previous

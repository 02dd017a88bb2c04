"""One order of programs for all devices, where several threads have programs for them.

A device runs programs in the order in which they were enqueued, and a program over several devices waits for all of
them. From two threads one device could get two programs in another order than the next, and both would wait for ever.
So while an engine rolls out in a thread of its own, whatever else runs programs on its devices has them enqueued by
that engine's dispatcher. To enqueue is quick; results are waited for outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
Dispatch = Callable[[Callable[[], Any]], Any]


def _directly(program: Callable[[], Any]) -> Any:
    return program()


_dispatch: Dispatch = _directly


def enqueue(program: Callable[..., T], *args: Any) -> T:
    """Calls compiled programs, or a function that does, by whoever `through` names."""
    return _dispatch(lambda: program(*args))


@contextlib.contextmanager
def through(dispatch: Dispatch) -> Iterator[None]:
    """Programs are enqueued by `dispatch` meanwhile, e.g. `Engine.in_turn`."""
    global _dispatch
    previous, _dispatch = _dispatch, dispatch
    try:
        yield
    finally:
        _dispatch = previous

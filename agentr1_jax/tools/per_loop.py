"""State that belongs to one event loop: each rollout has its own, and asyncio's locks and futures do not travel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """A value for each running event loop, made where it is first asked for; those of closed loops are dropped."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[asyncio.AbstractEventLoop, T] = {}

    def get(self) -> T:
        """The running loop's value."""
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            for other in [loop for loop in list(self._values) if loop.is_closed()]:
                self._values.pop(other, None)
            self._values[loop] = self._make()
        return self._values[loop]

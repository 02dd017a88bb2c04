"""Order of device programs among threads.

A device runs programs in the order in which they were enqueued, and a program over several devices waits for all of
them. Two threads could enqueue two such programs in different orders on two devices, and both would wait for ever. So
while an engine rolls out, all other code enqueues its programs on the thread of that engine's `Dispatcher`. Enqueueing
is quick; callers wait for results in their own threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Dispatcher:
    """One thread that enqueues device programs, between two cycles of the engine that it belongs to.

    A dispatcher is made before its engine, since tools that search on the devices get it first.
    """

    def __init__(self) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="dispatch")

    async def __call__(self, function: Callable[[], T]) -> T:
        """Run a function on the thread, from a coroutine. The engine's cycles wait for it, so it should be short."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def call(self, program: Callable[..., T], *arguments: Any) -> T:
        """Call a program on the thread, from another thread."""
        return self._executor.submit(program, *arguments).result()

"""The thread that enqueues device programs, and what goes through it while an engine rolls out."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agentr1_jax.runtime.dispatch import Dispatcher


def thread_name():
    return threading.current_thread().name.split("_")[0]


def test_coroutines_and_other_threads_get_the_same_thread():
    dispatcher = Dispatcher()

    async def both():
        return await dispatcher(thread_name), await dispatcher(lambda: threading.get_ident())

    name, first = asyncio.run(both())
    assert name == "dispatch" and dispatcher.call(threading.get_ident) == first != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        dispatcher.call(lambda x: 1 // x, 0)

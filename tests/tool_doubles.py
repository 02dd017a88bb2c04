"""Tools that do as a test tells them."""

from __future__ import annotations

import asyncio
import threading

from agentr1_jax.tools import base
from agentr1_jax.tools.base import ToolResult, abandoned_threads, failure

FINE = ToolResult("fine")
DOWN = failure("down", "Error: down.", "infrastructure")
FOREVER = 60.0


class Does:
    """A tool that does as a function does."""

    name, description = "does", "does as told"
    parameters = {"type": "object"}

    def __init__(self, execute, blocking=True):
        self.execute = execute
        self.blocking = blocking


def results_in_turn(*results):
    """A function that returns these results one after the other."""
    left = iter(results)
    return lambda arguments: next(left)


def run(tool, arguments=None):
    return asyncio.run(base.call(tool, arguments or {}))


def no_thread_is_left():
    for thread in threading.enumerate():
        if thread.name.startswith("run_in_thread"):
            thread.join(10)
    return abandoned_threads() == 0


def raising(error):
    def execute(arguments):
        raise error

    return execute


class Squares:
    """A tool for batches; keeps their sizes."""

    name, description = "squares", ""
    parameters = {"type": "object"}

    def __init__(self, execute_batch=None):
        self.sizes = []
        if execute_batch:
            self.execute_batch = execute_batch

    def execute(self, arguments):
        raise AssertionError("calls come in batches")

    def execute_batch(self, arguments):
        self.sizes.append(len(arguments))
        return [ToolResult(str(a["n"] ** 2)) for a in arguments]


async def in_a_coroutine(function, arguments):
    return function(arguments)


def ways(function):
    """A function as a tool: in a thread, on the loop, async, and in a thread that returns an awaitable."""
    yield Does(function)
    yield Does(function, blocking=False)
    yield Does(lambda arguments: in_a_coroutine(function, arguments), blocking=False)
    yield Does(lambda arguments: in_a_coroutine(function, arguments))

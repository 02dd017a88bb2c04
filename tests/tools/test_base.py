"""Threads of blocking calls, and calls of tools that do what they should not."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from tool_doubles import (
    FINE,
    FOREVER,
    Does,
    no_thread_is_left,
    raising,
    run,
    ways,
)

from agentr1_jax.tools import base
from agentr1_jax.tools.base import ToolError, ToolResult, abandoned_threads, run_in_thread


def test_a_thread_returns_and_raises_what_the_call_does():
    assert asyncio.run(run_in_thread(divmod, 7, 2)) == (3, 1)
    assert asyncio.run(run_in_thread(threading.current_thread)).daemon
    for error in (KeyError("k"), SystemExit(3), asyncio.CancelledError()):
        with pytest.raises(type(error)) as raised:
            asyncio.run(run_in_thread(raising(error), None))
        assert raised.value is error


def test_a_thread_that_nobody_waits_for_is_counted_until_it_ends():
    release = threading.Event()

    async def give_up():
        async with asyncio.timeout(0.01):
            await run_in_thread(release.wait, FOREVER)

    for _ in range(3):
        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
    assert abandoned_threads() == 3
    release.set()  # the loops they would report to are closed by now
    assert no_thread_is_left()


def test_hanging_calls_take_no_place_from_others():
    release = threading.Event()

    async def main():
        hung = [asyncio.create_task(run_in_thread(release.wait, FOREVER)) for _ in range(60)]
        await asyncio.sleep(0)
        assert await run_in_thread(abs, -1) == 1
        release.set()
        assert all(await asyncio.gather(*hung))

    asyncio.run(main())
    assert no_thread_is_left()


def test_a_sync_tool_runs_in_a_thread_unless_it_does_not_block():
    def where(arguments):
        return ToolResult(threading.current_thread().name)

    assert run(Does(where)).content.startswith("run_in_thread")
    assert run(Does(where, blocking=False)).content == threading.current_thread().name


class WithoutText(Exception):
    def __str__(self):
        raise ValueError


class WithTextThatExits(Exception):
    def __str__(self):
        raise SystemExit(3)


ERRORS = [
    RuntimeError("lost"),
    StopIteration(),
    MemoryError(),
    WithoutText(),
    WithTextThatExits(),
    SystemExit(1),
    GeneratorExit(),
    asyncio.CancelledError(),
    TimeoutError(),
]


@pytest.mark.parametrize("error", [*ERRORS, KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_whatever_a_tool_raises_is_a_fault_of_the_infrastructure(error):
    for tool in list(ways(raising(error)))[: 1 if isinstance(error, KeyboardInterrupt) else None]:
        result = run(tool)
        assert result.error == ToolError("exception", "infrastructure") and not result.ok
        assert "does raised" in result.content and len(result.content) < 1000


def test_a_long_message_of_an_exception_is_cut():
    assert len(run(Does(raising(ValueError("x" * 10**6)))).content) < 1000


def test_an_interrupt_of_the_main_thread_is_the_users():
    with pytest.raises(KeyboardInterrupt):
        run(Does(raising(KeyboardInterrupt()), blocking=False))


@pytest.mark.parametrize(
    "value",
    [
        None,
        ToolResult(b"x"),
        ToolResult("x", ok=False),
        ToolResult("x", error=ToolError("a", "model")),
        ToolResult("x", ok=False, error="broken"),
        ToolResult("x", reward="1"),
        ToolResult("x", reward=float("nan")),
        ToolResult("x", data=None),
    ],
    ids=repr,
)
def test_what_is_no_proper_result_is_typed(value):
    for tool in ways(lambda arguments: value):
        result = run(tool)
        assert result.error == ToolError("bad_result", "infrastructure")
        assert result.content.startswith("Error: does returned")


@pytest.mark.parametrize("content", ["", "\ud800 alone", "x" * 10**6])
def test_any_text_is_a_proper_content(content):
    given = ToolResult(content, reward=np.float32(1), data={"a": 1})
    assert run(Does(lambda arguments: given)) is given


def test_a_schema_that_is_none_is_the_tools_fault():
    tool = Does(lambda arguments: FINE)
    tool.parameters = {"type": 7}
    assert run(tool, {"a": 1}).error == ToolError("exception", "infrastructure")


@pytest.mark.parametrize("hides", [False, True])
def test_a_cancelled_task_stays_cancelled_whatever_the_tool_makes_of_it(hides):
    async def execute(arguments):
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            if not hides:
                raise
            return FINE

    async def main():
        task = asyncio.create_task(base.call(Does(execute), {}))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())

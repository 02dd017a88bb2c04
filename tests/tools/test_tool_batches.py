"""Calls of many trajectories in one batch."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_doubles import (
    DOWN,
    FINE,
    FOREVER,
    Squares,
    raising,
    run,
)

from agentr1_jax.tools import base
from agentr1_jax.tools.base import ToolResult
from agentr1_jax.tools.batching import Batched
from agentr1_jax.tools.wrappers import TimeLimited


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 6)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.booleans(),
)
def test_each_waiter_of_a_batch_gets_its_own_result(calls, most, is_async):
    """Calls arrive after some ticks of the loop; some are cancelled after some more."""
    tool = Squares()

    async def execute_batch(arguments):
        await asyncio.sleep(0)
        return tool.execute_batch(arguments)

    batched = Batched(Squares(execute_batch) if is_async else tool, 1, most)

    async def one(n, arrival, cancelled, patience):
        for _ in range(arrival):
            await asyncio.sleep(0)
        task = asyncio.create_task(base.call(batched, {"n": n}))
        for _ in range(patience if cancelled else 0):
            await asyncio.sleep(0)
        if cancelled:
            task.cancel()
        await asyncio.wait([task])
        return task.cancelled() or task.result() == ToolResult(str(n**2))

    async def main():
        assert all(await asyncio.gather(*(one(n, *call) for n, call in enumerate(calls))))
        await asyncio.sleep(0)
        assert not any(queue.calls for queue in batched._queues._values.values())

    asyncio.run(main())
    stay = sum(not cancelled for _, cancelled, _ in calls)
    assert stay <= sum(tool.sizes) <= len(calls) and all(1 <= size <= most for size in tool.sizes)


def test_calls_that_come_together_go_together():
    tool = Squares()
    batched = Batched(tool, 5, 4)

    async def main():
        return await asyncio.gather(*(base.call(batched, {"n": n}) for n in range(10)))

    for _ in range(2):  # each rollout has its own loop
        assert [r.content for r in asyncio.run(main())] == [str(n**2) for n in range(10)]
    assert sorted(tool.sizes) == [2, 2, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("batch", "kinds"),
    [
        (raising(RuntimeError("lost")), ["exception"] * 3),
        (raising(SystemExit()), ["exception"] * 3),
        (lambda arguments: [FINE] * 2, ["bad_result"] * 3),
        (lambda arguments: None, ["bad_result"] * 3),
        (lambda arguments: [FINE, "junk", DOWN], [None, "bad_result", "down"]),
    ],
)
def test_a_batch_that_fails_fails_its_calls(batch, kinds):
    async def main():
        tool = Batched(Squares(batch), 1, 3)
        return await asyncio.gather(*(base.call(tool, {}) for _ in kinds))

    results = asyncio.run(main())
    assert [r.error and r.error.kind for r in results] == kinds
    assert {r.error.fault for r in results if r.error} == {"infrastructure"}


def test_a_batch_that_hangs_is_cancelled_when_nobody_waits_any_more():
    async def hang(arguments):
        await asyncio.sleep(FOREVER)

    async def main():
        tool = TimeLimited(Batched(Squares(hang), 1, 3), 0.02)
        results = await asyncio.gather(*(base.call(tool, {}) for _ in range(5)))
        assert {r.error.kind for r in results} == {"timeout"}
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_batch_that_cancels_itself_leaves_nobody_waiting():
    async def cancel(arguments):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    assert run(Batched(Squares(cancel), 1, 3)).error.kind == "exception"

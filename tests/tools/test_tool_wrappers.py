"""Each wrapper by itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_doubles import (
    DOWN,
    FINE,
    FOREVER,
    Does,
    no_thread_is_left,
    raising,
    results_in_turn,
    run,
    ways,
)

from agentr1_jax.tools import base
from agentr1_jax.tools.base import Tool, ToolError, ToolResult, abandoned_threads, failure
from agentr1_jax.tools.wrappers import (
    ConcurrencyLimited,
    Retried,
    TimeLimited,
    ToolMetrics,
    ToolsConfig,
    Truncated,
    wrap_tool,
)


def test_a_wrapper_shows_the_tool_inside():
    inner = Does(lambda arguments: FINE)
    tool = wrap_tool(inner, ToolsConfig(), ToolMetrics())
    assert isinstance(tool, Tool)
    assert base.schema(tool) == base.schema(inner)


def test_a_quick_call_keeps_its_time_limit():
    for tool in ways(lambda arguments: FINE):
        assert run(TimeLimited(tool, 30)) is FINE
    assert run(TimeLimited(Does(raising(SystemExit())), 30)).error.kind == "exception"


@pytest.mark.parametrize("fault", ["infrastructure", "model"])
def test_a_blocking_hang_is_given_up(fault):
    release = threading.Event()
    result = run(TimeLimited(Does(lambda arguments: release.wait(FOREVER)), 0.01, fault))
    assert result.error == ToolError("timeout", fault) and "more than 0.01 s" in result.content
    assert abandoned_threads() == 1
    release.set()
    assert no_thread_is_left()


def test_an_async_hang_is_cancelled_and_one_that_hides_it_is_not_waited_for():
    seen = []

    async def execute(arguments):
        for _ in range(2):
            try:
                await asyncio.sleep(FOREVER)
            except asyncio.CancelledError:
                seen.append("cancelled")

    async def main():
        result = await base.call(TimeLimited(Does(execute), 0.01), {})
        await asyncio.sleep(0)
        return result, list(seen)

    result, before_the_end = asyncio.run(main())
    assert result.error.kind == "timeout" and before_the_end == ["cancelled"]


def test_a_cancelled_wait_cancels_the_call():
    ended = []

    async def execute(arguments):
        try:
            await asyncio.sleep(FOREVER)
        finally:
            ended.append(True)

    async def main():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await base.call(TimeLimited(Does(execute), FOREVER), {})
        await asyncio.sleep(0)
        assert ended and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_faults_of_the_infrastructure_are_retried_and_only_they():
    for outcomes, attempts, last in [
        ([DOWN, DOWN, FINE], 3, FINE),
        ([DOWN, DOWN, DOWN, FINE], 3, DOWN),
        ([failure("bad", "no"), FINE], 3, failure("bad", "no")),
        ([DOWN, FINE], 1, DOWN),
    ]:
        retried = []
        tool = Retried(Does(results_in_turn(*outcomes)), attempts, 0, on_retry=retried.append)
        assert run(tool) == last
        assert retried == [DOWN] * (min(attempts, outcomes.index(last) + 1) - 1 if last != DOWN else attempts - 1)


def test_pauses_double_up_to_the_most_and_are_spread(monkeypatch):
    slept, sleep = [], asyncio.sleep

    async def record(seconds):
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", record)
    tool = Retried(Does(lambda arguments: DOWN), 7, 0.5, max_pause=6)
    run(tool, {"n": 1})
    full = np.minimum(0.5 * 2.0 ** np.arange(6), 6)
    assert np.all(slept >= full / 2) and np.all(slept < full)
    assert slept == [tool.pause({"n": 1}, retry) for retry in range(1, 7)]
    assert len({tool.pause({"n": n}, 1) for n in range(50)}) == 50


class Crowd:
    """A tool that keeps count of how many calls run in it."""

    name, description = "crowd", ""
    parameters = {"type": "object"}

    def __init__(self):
        self.now = self.most = 0

    async def execute(self, arguments):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for _ in range(arguments["ticks"]):
                await asyncio.sleep(0)
        finally:
            self.now -= 1
        return FINE


CALLS = st.lists(st.tuples(st.integers(0, 8), st.none() | st.integers(0, 12)), min_size=4, max_size=12)


@settings(max_examples=60)
@given(CALLS, CALLS, st.integers(1, 3), st.booleans())
def test_no_more_run_at_once_than_the_cap_says(first, second, cap, limited):
    """Each call lasts some ticks of the loop; some are cancelled after some ticks. Two rollouts, two loops."""
    crowd = Crowd()
    tool = ConcurrencyLimited(TimeLimited(crowd, FOREVER) if limited else crowd, cap)

    async def one(ticks, cancel_after):
        task = asyncio.create_task(base.call(tool, {"ticks": ticks}))
        for _ in range(cancel_after or 0):
            await asyncio.sleep(0)
        if cancel_after is not None:
            task.cancel()
        await asyncio.wait([task])

    async def rollout(calls):
        crowd.most = 0
        await asyncio.gather(*(one(*call) for call in calls))
        assert crowd.now == 0 and crowd.most <= cap
        crowd.most = 0
        assert await asyncio.gather(*(base.call(tool, {"ticks": 9}) for _ in range(cap + 2))) == [FINE] * (cap + 2)
        assert crowd.most == cap  # no cancelled call has kept its place

    asyncio.run(rollout(first))
    asyncio.run(rollout(second))


def test_a_loop_that_ends_amid_its_calls_takes_no_place_from_the_next():
    crowd = Crowd()
    tool = ConcurrencyLimited(crowd, 1)

    async def leave():
        left = asyncio.gather(*(base.call(tool, {"ticks": 10**9}) for _ in range(3)))
        await asyncio.sleep(0.001)
        assert not left.done()

    asyncio.run(leave())
    assert run(tool, {"ticks": 1}) is FINE
    gc.collect()
    assert len(tool._semaphores._values) == 1  # the first loop and its state are forgotten


def test_a_cut_is_visible_typed_and_keeps_the_rest():
    long = ToolResult("abcdefghij", reward=0.5, data={"ids": [1]})
    result = run(Truncated(Does(lambda arguments: long), 4))
    assert result.content == "abcd\n[Error: result too long, 6 of 10 characters cut.]"
    assert result == ToolResult(result.content, False, ToolError("oversized", "model"), 0.5, {"ids": [1]})
    assert run(Truncated(Does(lambda arguments: long), 10)) is long
    broken = dataclasses.replace(DOWN, content="abcdefghij")
    assert run(Truncated(Does(lambda arguments: broken), 4)).error == DOWN.error

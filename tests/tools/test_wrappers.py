"""Each wrapper by itself, the wrappers together, and what the metrics tell of them."""

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
    Squares,
    no_thread_is_left,
    raising,
    results_in_turn,
    run,
    ways,
)

from agentr1_jax.envs.registry import TaskContext
from agentr1_jax.tasks import make_task
from agentr1_jax.tasks.hopworld.task import HopWorldConfig
from agentr1_jax.tools import base
from agentr1_jax.tools.base import Tool, ToolError, ToolResult, abandoned_threads, failure
from agentr1_jax.tools.wrappers import (
    Batched,
    ConcurrencyLimited,
    Measured,
    Retried,
    TimeLimited,
    ToolMetrics,
    ToolsConfig,
    Truncated,
    wrap_tool,
)


def test_a_quick_call_keeps_its_time_limit():
    for tool in ways(lambda arguments: FINE):
        assert run(TimeLimited(tool, 30)) is FINE
    assert run(TimeLimited(Does(raising(SystemExit())), 30)).error.kind == "exception"


def test_a_blocking_hang_is_given_up():
    release = threading.Event()
    result = run(TimeLimited(Does(lambda arguments: release.wait(FOREVER)), 0.01))
    assert result.error == ToolError("timeout", "infrastructure") and "more than 0.01 s" in result.content
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


def test_pauses_double_up_to_the_most(monkeypatch):
    slept, sleep = [], asyncio.sleep

    async def record(seconds):
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", record)
    run(Retried(Does(lambda arguments: DOWN), 7, 2))
    full = np.minimum(2 * 2.0 ** np.arange(6), 30)
    assert np.all(slept >= full / 2) and np.all(slept <= full)


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


@settings(max_examples=40)
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


def test_the_metrics_add_up():
    metrics = ToolMetrics()
    assert metrics.metrics()["tools/calls"] == 0 and "time/tool_mean" not in metrics.metrics()
    for n in range(1, 101):
        metrics.record_call(FINE if n % 10 else DOWN, n / 100)
    for _ in range(4):
        metrics.record_retry(failure("timeout", "", "infrastructure"))
    figures = metrics.metrics()
    assert figures == pytest.approx(
        {
            "tools/calls": 100,
            "tools/cancelled": 0,
            "tools/failures": 10,
            "tools/retries": 4,
            "tools/abandoned_threads": 0,
            "time/tool_mean": 0.505,
            "time/tool_max": 1.0,
            "time/tool_p50": np.percentile(np.arange(1, 101) / 100, 50),
            "time/tool_p95": np.percentile(np.arange(1, 101) / 100, 95),
            "tools/error/down": 10,
            "tools/error/timeout": 4,
        }
    )
    metrics.reset()
    assert sum(metrics.metrics().values()) == 0


def test_retries_and_cancelled_calls_are_counted():
    metrics = ToolMetrics()
    limits = ToolsConfig(timeout_seconds=30, max_attempts=3, backoff_seconds=0)
    assert run(wrap_tool(Does(results_in_turn(DOWN, None, FINE)), limits, metrics)) is FINE
    figures = metrics.metrics()
    assert (figures["tools/calls"], figures["tools/retries"], figures["tools/failures"]) == (1, 2, 0)
    assert (figures["tools/error/down"], figures["tools/error/bad_result"]) == (1, 1)

    async def hang(arguments):
        await asyncio.sleep(FOREVER)

    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(base.call(wrap_tool(Does(hang), limits, metrics), {}), 0.01))
    figures = metrics.metrics()
    assert figures["tools/calls"] == 2 and figures["tools/cancelled"] == 1 and figures["time/tool_max"] >= 0.009


def test_wrappers_come_in_the_order_that_makes_sense():
    def names(tool):
        return [type(tool).__name__, *names(tool.tool)] if hasattr(tool, "tool") else []

    every = ["Measured", "Truncated", "Retried", "ConcurrencyLimited", "TimeLimited"]
    assert names(wrap_tool(Squares(), ToolsConfig(), ToolMetrics())) == [*every, "Batched"]
    assert names(wrap_tool(Does(None), ToolsConfig(), ToolMetrics())) == every
    tool = wrap_tool(Squares(), ToolsConfig(), ToolMetrics())
    assert isinstance(tool, Tool) and base.schema(tool) == base.schema(Squares())
    none = ToolsConfig(timeout_seconds=0, max_attempts=1, max_concurrent=0, max_batch=0, max_characters=0)
    assert names(wrap_tool(Squares(), none, ToolMetrics())) == ["Measured"]


def test_waiting_for_a_place_is_not_timed():
    async def execute(arguments):
        await asyncio.sleep(0.05)
        return FINE

    async def main():
        tool = wrap_tool(
            Does(execute), ToolsConfig(timeout_seconds=0.3, max_attempts=1, max_concurrent=1), ToolMetrics()
        )
        return await asyncio.gather(*(base.call(tool, {}) for _ in range(8)))

    assert asyncio.run(main()) == [FINE] * 8


def test_a_pause_holds_no_place():
    async def main():
        tool = wrap_tool(
            Does(results_in_turn(DOWN, FINE)), ToolsConfig(backoff_seconds=FOREVER, max_concurrent=1), ToolMetrics()
        )
        pausing = asyncio.create_task(base.call(tool, {}))
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(base.call(tool, {}), 10) is FINE
        pausing.cancel()

    asyncio.run(main())


def test_the_episodes_of_a_world_share_one_wrapped_tool():
    made = []

    def wrap(tool):
        made.append(Measured(tool, ToolMetrics()))
        return made[-1]

    task = make_task("hopworld", TaskContext(wrap=wrap))
    rows = [task.row("train", n) for n in (0, 1, HopWorldConfig().questions_per_world)]
    offered = []
    for row in rows:
        env = task.env()
        asyncio.run(env.reset(row, 0))
        offered.append(env._tools["search"])
    assert offered == [made[0], made[0], made[1]] and len(made) == 2

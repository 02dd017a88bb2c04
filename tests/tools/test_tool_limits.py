"""The wrappers together, and what the metrics tells of them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tool_doubles import (
    DOWN,
    FINE,
    FOREVER,
    Does,
    Squares,
    results_in_turn,
    run,
)

from agentr1_jax.envs.registry import TaskContext
from agentr1_jax.errors import UserError
from agentr1_jax.tasks import make_task
from agentr1_jax.tools import base
from agentr1_jax.tools.base import failure
from agentr1_jax.tools.search import BM25, Passage, SearchTool
from agentr1_jax.tools.search.bm25 import SMALL
from agentr1_jax.tools.wrappers import Measured, ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.validation import from_section


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("timeout_seconds", -1), ("timeout_seconds", float("nan")), ("backoff_seconds", float("inf"))]
    + [("max_attempts", 0), ("max_attempts", 1.5), ("max_concurrent", -2), ("batch_milliseconds", -1)]
    + [("max_batch", True), ("max_characters", "10"), ("timeout_seconds", None)],
)
def test_limits_that_make_no_sense_are_refused(field, value):
    with pytest.raises(UserError, match=rf"tools\.{field} is "):
        from_section(ToolsConfig, "tools", {field: value})


def test_only_a_large_index_needs_threads():
    passages = [Passage(str(n), "Title", "text") for n in range(SMALL + 1)]
    assert SearchTool(BM25(passages), 1).blocking and not SearchTool(BM25(passages[:-1]), 1).blocking


def test_the_episodes_of_a_world_share_one_wrapped_tool():
    made = []

    def wrap(tool):
        made.append(Measured(tool, ToolMetrics()))
        return made[-1]

    task = make_task("hopworld", TaskContext(wrap=wrap))
    rows = [task.row("train", n) for n in (0, 1, task.config.questions_per_world)]
    offered = []
    for row in rows:
        env = task.env()
        asyncio.run(env.reset(row, 0))
        offered.append(env._tools["search"])
    assert offered == [made[0], made[0], made[1]] and len(made) == 2

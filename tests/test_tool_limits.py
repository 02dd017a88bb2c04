"""The wrappers together, and what the meter tells of them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from doing import (
    DOWN,
    FINE,
    FOREVER,
    Does,
    Squares,
    results_in_turn,
    run,
)

from agentr1_jax.tasks.hopworld.task import HopWorldTask
from agentr1_jax.tools import base
from agentr1_jax.tools.base import failed
from agentr1_jax.tools.limits import ToolLimits, wrapped
from agentr1_jax.tools.meter import Meter
from agentr1_jax.tools.search import BM25, Passage, SearchTool
from agentr1_jax.tools.search.bm25 import SMALL
from agentr1_jax.tools.wrappers import Measured


def test_the_meter_adds_up():
    meter = Meter()
    assert meter.metrics()["tools/calls"] == 0 and "time/tool_mean" not in meter.metrics()
    for n in range(1, 101):
        meter.finished(FINE if n % 10 else DOWN, n / 100)
    for _ in range(4):
        meter.retried(failed("timeout", "", "infrastructure"))
    figures = meter.metrics()
    assert figures == pytest.approx(
        {
            "tools/calls": 100,
            "tools/cancelled": 0,
            "tools/failures": 10,
            "tools/retries": 4,
            "tools/threads_left_behind": 0,
            "time/tool_mean": 0.505,
            "time/tool_max": 1.0,
            "time/tool_p50": np.percentile(np.arange(1, 101) / 100, 50),
            "time/tool_p95": np.percentile(np.arange(1, 101) / 100, 95),
            "tools/error/down": 10,
            "tools/error/timeout": 4,
        }
    )
    meter.reset()
    assert sum(meter.metrics().values()) == 0


def test_retries_and_cancelled_calls_are_metered():
    meter = Meter()
    limits = ToolLimits(seconds=30, attempts=3, backoff=0)
    assert run(wrapped(Does(results_in_turn(DOWN, None, FINE)), limits, meter)) is FINE
    figures = meter.metrics()
    assert (figures["tools/calls"], figures["tools/retries"], figures["tools/failures"]) == (1, 2, 0)
    assert (figures["tools/error/down"], figures["tools/error/bad_result"]) == (1, 1)

    async def hang(arguments):
        await asyncio.sleep(FOREVER)

    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(base.call(wrapped(Does(hang), limits, meter), {}), 0.01))
    figures = meter.metrics()
    assert figures["tools/calls"] == 2 and figures["tools/cancelled"] == 1 and figures["time/tool_max"] >= 0.009


def test_wrappers_come_in_the_order_that_makes_sense():
    def names(tool):
        return [type(tool).__name__, *names(tool.tool)] if hasattr(tool, "tool") else []

    every = ["Measured", "Shortened", "Retried", "Capped", "TimeLimited"]
    assert names(wrapped(Squares(), ToolLimits(), Meter())) == [*every, "Batched"]
    assert names(wrapped(Does(None), ToolLimits(), Meter())) == every
    none = ToolLimits(seconds=0, attempts=0, calls=0, batch=0, characters=0)
    assert names(wrapped(Squares(), none, Meter())) == ["Measured"]


def test_waiting_for_a_place_is_not_timed():
    async def execute(arguments):
        await asyncio.sleep(0.05)
        return FINE

    async def main():
        tool = wrapped(Does(execute), ToolLimits(seconds=0.3, attempts=1, calls=1), Meter())
        return await asyncio.gather(*(base.call(tool, {}) for _ in range(8)))

    assert asyncio.run(main()) == [FINE] * 8


def test_a_pause_holds_no_place():
    async def main():
        tool = wrapped(Does(results_in_turn(DOWN, FINE)), ToolLimits(backoff=FOREVER, calls=1), Meter())
        pausing = asyncio.create_task(base.call(tool, {}))
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(base.call(tool, {}), 10) is FINE
        pausing.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("field", "value"),
    [("seconds", -1), ("seconds", float("nan")), ("backoff", float("inf")), ("attempts", 1.5), ("calls", -2)]
    + [("batch_milliseconds", -1), ("batch", True), ("characters", "10"), ("seconds", None)],
)
def test_limits_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"tools\.{field} is "):
        ToolLimits(**{field: value})


def test_only_a_large_index_needs_threads():
    passages = [Passage(str(n), "Title", "text") for n in range(SMALL + 1)]
    assert SearchTool(BM25(passages), 1).blocking and not SearchTool(BM25(passages[:-1]), 1).blocking


def test_the_episodes_of_a_world_share_one_wrapped_tool():
    made = []

    def wrap(tool):
        made.append(Measured(tool, Meter()))
        return made[-1]

    task = HopWorldTask(wrap=wrap)
    rows = [task.row("train", n) for n in (0, 1, task.questions_per_world)]
    offered = []
    for row in rows:
        env = task.env()
        asyncio.run(env.reset(row, 0))
        offered.append(env._tools["search"])
    assert offered == [made[0], made[0], made[1]] and len(made) == 2

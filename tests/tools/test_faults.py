"""Fault injection: repeatable, counted, and survived by tools and environments as their contracts say."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import math
import random
import time

import numpy as np
import pytest
from faulty import ENV_KINDS, KINDS, FaultPlan, FaultyTool, InjectedError, faulty_env
from letters import ROW, ScriptedEnv
from tool_doubles import no_thread_is_left

from agentr1_jax.envs.base import Action
from agentr1_jax.tasks import qa
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.tools import base
from agentr1_jax.tools.base import ToolError, ToolResult
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.trajectory import Outcome

LIMITS = ToolsConfig(max_attempts=2, backoff_seconds=0.001, max_characters=100)
NAMES = {"exception": "exception", "crash": "exception", "hang": "timeout", "garbage": "bad_result"}


class Echo:
    name, description = "echo", ""
    parameters = {"type": "object"}
    blocking = False

    def execute(self, arguments):
        return ToolResult(f"echo {arguments['n']}")


def plan(kinds, rate=1.0, seed=0, **fields):
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    return FaultPlan(rate, kinds, seed, **{"hang_seconds": 0.3, "latency_seconds": 0.001} | fields)


def transient(kinds, **fields):
    """A plan by which the first attempt at `{"n": 0}` gets a fault and the second none."""
    plans = (plan(kinds, 0.5, seed, **fields) for seed in itertools.count())
    return next(p for p in plans if p.fault('{"n": 0}', 0) and not p.fault('{"n": 0}', 1))


def play(faults):
    """The first transition of an episode that calls the faulty tool once, what was injected, and the meter."""
    # Only what hangs gets a limit that a busy machine could exceed.
    limits = dataclasses.replace(LIMITS, timeout_seconds=0.06 if "hang" in faults.kinds else 30.0)
    injected, meter = collections.Counter(), ToolMetrics()
    tool = wrap_tool(FaultyTool(Echo(), faults, injected), limits, meter)

    async def run():
        env = qa.search_env([tool], {"answer": 1.0, "format": 0.1}, "")
        await env.reset({"id": "r", "question": "?", "answers": ["a"]}, 0)
        return await env.step(Action(np.zeros(0, np.int32), render_call("echo", {"n": 0})))

    transition = asyncio.run(run())
    assert no_thread_is_left()
    return transition, injected, meter.metrics()


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("kind", NAMES)
def test_a_fault_that_persists_ends_the_episode_and_each_attempt_is_counted(kind, blocking):
    transition, injected, metrics = play(plan(kind, blocking=blocking))
    assert transition.outcome is Outcome.TOOL_FAILURE and transition.truncated and transition.observation is None
    assert transition.info["errors"] == {NAMES[kind]: 1} and transition.tool_calls[0]["error"] == NAMES[kind]
    assert injected == {kind: 2}
    assert metrics[f"tools/error/{NAMES[kind]}"] == 2
    assert (metrics["tools/calls"], metrics["tools/failures"], metrics["tools/retries"]) == (1, 1, 1)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("kind", NAMES)
def test_a_fault_that_passes_is_not_seen_by_the_policy(kind, blocking):
    transition, injected, metrics = play(transient(kind, blocking=blocking))
    assert transition.observation.text == "echo 0" and transition.info["errors"] == {}
    assert injected == {kind: 1}
    assert metrics[f"tools/error/{NAMES[kind]}"] == metrics["tools/retries"] == 1 and metrics["tools/failures"] == 0


def test_a_huge_result_comes_back_cut():
    transition, injected, metrics = play(plan("huge"))
    assert transition.outcome is None and transition.info["errors"] == {"oversized": 1}
    assert (
        len(transition.observation.text) < 200 and "9999900 of 10000000 characters cut" in transition.observation.text
    )
    assert transition.reward_parts["format"] == -0.1
    assert injected == {"huge": 1} and metrics["tools/error/oversized"] == 1 and metrics["tools/retries"] == 0


@pytest.mark.parametrize("blocking", [False, True])
def test_a_late_result_is_a_result(blocking):
    transition, injected, metrics = play(plan("latency", blocking=blocking, latency_seconds=0.03))
    assert transition.observation.text == "echo 0" and injected == {"latency": 1}
    assert metrics["time/tool_max"] >= 0.03 and metrics["tools/failures"] == 0


def test_a_plan_keeps_its_rate_and_deals_its_kinds_evenly():
    p = FaultPlan(0.2, seed=3)
    counts = collections.Counter(p.fault(n, attempt) for n in range(3000) for attempt in range(2))
    for kind in KINDS:
        assert abs(counts[kind] - 200) < 4 * math.sqrt(200)
    assert {FaultPlan(0.0).fault(n) for n in range(100)} == {None}
    assert None not in {FaultPlan(1.0).fault(n) for n in range(100)}
    others = [FaultPlan(0.2, seed=4).fault(n, 0) for n in range(200)]
    assert others != [p.fault(n, 0) for n in range(200)] == [FaultPlan(0.2, seed=3).fault(n, 0) for n in range(200)]


def test_faults_of_a_tool_do_not_depend_on_the_order_of_calls():
    faults = plan(KINDS, 0.5, hang_seconds=0.01, huge_characters=1000)

    def rollout(order):
        injected = collections.Counter()
        tool = FaultyTool(Echo(), faults, injected)

        async def main():
            calls = [asyncio.ensure_future(base.call(tool, {"n": n})) for n in order]
            return await asyncio.gather(*calls)

        outcomes = collections.defaultdict(list)
        for n, result in zip(order, asyncio.run(main()), strict=True):
            outcomes[n].append(result)
        return outcomes, injected

    order = [n for n in range(20) for _ in range(3)]
    first = rollout(order)
    random.Random(0).shuffle(order)
    assert rollout(order) == first
    assert set(first[1]) == set(KINDS)


def test_equal_arguments_count_as_attempts_however_they_are_written():
    tool = FaultyTool(Echo(), FaultPlan(0.0), collections.Counter())
    for arguments in ({"n": 1, "m": [1, "é"]}, {"m": [1, "é"], "n": 1}):
        assert asyncio.run(base.call(tool, arguments)).ok
    assert list(tool.attempts.values()) == [2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": 1.5}, "rate is 1.5"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": 0.1, "kinds": ("explosion",)}, "'explosion'; choose among exception, hang"),
        ({"rate": 0.1, "kinds": ()}, "kinds is empty"),
        ({"rate": 0.1, "hang_seconds": float("inf")}, "hang_seconds is inf"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        FaultPlan(**fields)


def episode(make_env, seed=7, steps=3):
    """What each call of an episode came to: a type, in order; it ends at the first that is not as it should be."""

    async def run():
        env = make_env()
        seen = []
        try:
            observation = await env.reset(ROW, seed)
            seen.append(observation and "observation")
            while observation is not None and len(seen) <= steps:
                observation = await env.step(Action(np.zeros(0, np.int32), render_answer("me")))
                fine = observation is not None and observation.observation.messages is None
                seen.append("transition" if fine else observation and "messages")
        except (InjectedError, SystemExit) as error:
            seen.append(type(error).__name__)
        return seen, env.truncate()

    return asyncio.run(run())


def scripted():
    return ScriptedEnv(["so?"] * 3)


def faulty(faults):
    injected = collections.Counter()
    return faulty_env(scripted, faults, injected), injected


def test_an_environment_without_faults_is_as_it_was():
    make, injected = faulty(plan(ENV_KINDS, 0.0))
    assert episode(make) == (["observation", *["transition"] * 3], {"em": 0.0}) and not injected


@pytest.mark.parametrize(("kind", "seen"), [("exception", "InjectedError"), ("crash", "SystemExit"), ("garbage", None)])
def test_faults_strike_reset_and_every_step(kind, seen):
    make, injected = faulty(plan(kind))
    assert episode(make)[0] == [seen]
    make, _ = faulty(plan(kind, 0.4))
    ends = [episode(make, seed)[0] for seed in range(60)]
    assert {len(end) for end in ends} == {1, 2, 3, 4}
    struck = {end[-1] for end in ends} - {"transition"}
    assert struck == ({seen} if kind != "garbage" else {None, "messages"})
    assert injected == {kind: 1}


@pytest.mark.parametrize("blocking", [False, True])
def test_hangs_and_latencies_end(blocking):
    make, injected = faulty(plan(("hang", "latency"), hang_seconds=0.01, blocking=blocking))
    start = time.perf_counter()
    assert episode(make)[0] == ["observation", *["transition"] * 3]
    assert injected.total() == 4 and injected["hang"] >= 1
    assert time.perf_counter() - start >= 0.01 * injected["hang"]


def test_faults_of_an_environment_are_keyed_by_seed_and_attempt():
    faults = plan(("exception", "crash"), 0.3, seed=1)

    def history(order):
        make, injected = faulty(faults)
        seen = collections.defaultdict(list)
        for seed in order:
            seen[seed].append(episode(make, seed)[0])
        return seen, injected

    order = [seed for seed in range(30) for _ in range(3)]
    first = history(order)
    random.Random(0).shuffle(order)
    assert history(order) == first
    assert any(attempts[0] != attempts[1] for attempts in first[0].values())


def test_environments_have_no_huge_fault():
    with pytest.raises(ValueError, match="no fault of kind 'huge'"):
        faulty(FaultPlan(0.1))[0]()


def test_the_error_of_a_tool_inside_stays_typed():
    class Down(Echo):
        def execute(self, arguments):
            return base.failure("down", "Error: down.", "infrastructure")

    tool = FaultyTool(Down(), FaultPlan(0.0), collections.Counter())
    assert asyncio.run(base.call(tool, {})).error == ToolError("down", "infrastructure")

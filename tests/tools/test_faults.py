"""Rollouts in which a fifth of all calls goes wrong, in every way."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import gc
import threading
import time

import letters
import numpy as np
import pytest
from faulty import ENV_KINDS, KINDS, FaultPlan, FaultyTool, canonical_json, faulty_env
from schedules import Planned, all_ids, assert_exact, engine_of, planned
from tool_doubles import no_thread_is_left

from agentr1_jax.agents.session import Identity
from agentr1_jax.envs.rewards import Reward
from agentr1_jax.envs.tool_env import ToolEnv
from agentr1_jax.rollout.config import AttemptLimits, SamplingConfig
from agentr1_jax.rollout.runner import TaskGroup, run_groups
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.tools.base import ToolResult
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.trajectory import POLICIES, Outcome

SAMPLES, CALLS = 8, 3
SLOTS = 8
LIMITS = ToolsConfig(max_attempts=2, backoff_seconds=0.005, max_characters=100)
SECONDS = {"w": 0.05, "b": 0.25}
"""Time limits of two tools. One waits on the event loop, the other blocks a thread, which may come late.

Their names are short, because the prompt tells them and a context has 128 tokens."""
FAILS = {"exception": "exception", "crash": "exception", "hang": "timeout", "garbage": "bad_result"}
SLACK = 60.0
"""Seconds that a busy machine may take for what takes two; far less than the hangs, were anybody to wait for them."""


class Echo:
    description = ""
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    blocking = False

    def __init__(self, name):
        self.name = name

    def execute(self, arguments):
        return ToolResult(f"echo {arguments['n']}")


def call_of(seed, i):
    """Call `i` of an episode: a tool and arguments that no other call has."""
    n = seed * 10 + i
    return list(SECONDS)[n % 2], {"n": n}


class Calling(ToolEnv):
    """Takes whatever the policy says for the next call of the episode, and at last for an answer."""

    async def reset(self, row, seed):
        self._seed = seed
        return await super().reset(row, seed)

    async def step(self, action):
        n = len(self._turns)
        text = render_call(*call_of(self._seed, n)) if n < CALLS else render_answer("me")
        return await super().step(dataclasses.replace(action, text=text))


def calling(tools):
    return Calling(
        tools,
        opening=lambda row: [{"role": "user", "content": row["question"]}],
        reward=Reward({"step": lambda row, turns: 1.0}, {"step": 1.0}),
        metrics=lambda row, turns: {"em": 1.0},
        state_key=lambda row, turns: "s",
    )


def seed_of(group, sample):
    return group * SAMPLES + sample


def faulty_tools(plans, injected, meter):
    return [
        wrap_tool(
            FaultyTool(Echo(name), plan, injected), dataclasses.replace(LIMITS, timeout_seconds=SECONDS[name]), meter
        )
        for name, plan in plans.items()
    ]


def expected_of(plans, seed):
    """The outcome, the steps and the faults of an episode, by the plans alone."""
    injected, errors = collections.Counter(), collections.Counter()
    for i in range(CALLS):
        tool, arguments = call_of(seed, i)
        failed = True
        for attempt in range(LIMITS.max_attempts):
            kind = plans[tool].fault(canonical_json(arguments), attempt)
            injected.update([kind] if kind else [])
            failed = kind in FAILS
            errors.update([FAILS[kind]] if failed else ["oversized"] if kind == "huge" else [])
            if not failed:
                break
        if failed:
            return Outcome.TOOL_FAILURE, i + 1, injected, errors
    return Outcome.ANSWERED, CALLS + 1, injected, errors


class Watcher(Planned):
    """A trajectory more, which looks round when all others are over."""

    def __init__(self, agent, engine):
        self.agent, self.engine = agent, engine
        self.over = False
        self.seen = None

    async def run(self, session, row):
        if not row.get("watches"):
            await self.agent.run(session, row)
            return
        while not self.over:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)  # What was cancelled ends.
        tasks = sorted(task.get_coro().__qualname__.split(".")[-1] for task in asyncio.all_tasks())
        leases = [owner for owner in self.engine._scheduler._leases if owner is not None]
        self.seen = tasks, dict(self.engine._decoding), self.engine._waiting, leases, self.engine._free_leases
        session.finish(Outcome.ENV_DONE)


def pending_tasks():
    """Ids of all tasks of asyncio that are not done; other tests in this process may have left some."""
    # By `type`: `isinstance` asks for `__class__`, and torch has objects that warn when asked for anything.
    return {id(x) for x in gc.get_objects() if issubclass(type(x), asyncio.Task) and not x.done()}


def rollout(agent, groups, **options):
    """Trajectories by group and sample, and what was left when all were over."""
    engine, params = engine_of(SLOTS)
    engine.reset_counters()
    watcher = Watcher(agent, engine)
    watch = TaskGroup({"watches": True}, [Identity("watcher", 10**6, 0, "faults", 0)])
    threads, tasks_before = set(threading.enumerate()), pending_tasks()
    began = time.perf_counter()
    out = []
    usual = {"sampling": SamplingConfig(), "policy_version": 0}
    for group in run_groups(engine, params, watcher, [watch, *groups], **usual, **options):
        out.append(group)
        watcher.over = len(out) == len(groups)
    seconds = time.perf_counter() - began
    tasks, open_slots, waiting, leases, room = watcher.seen
    own = ["_episode", "_run", "run", "run", "run_cycles", "sample_group"]
    assert tasks == own  # Those that the watcher itself needs.
    assert not open_slots and not waiting and not leases and room == 2 * SLOTS - 1
    assert no_thread_is_left()
    assert {t for t in threading.enumerate() if not t.name.startswith("dispatch")} <= threads
    assert pending_tasks() <= tasks_before
    assert seconds < SLACK
    return sorted((t for g in out for t in g if t.uid != "watcher"), key=lambda t: (t.group, t.sample))


def groups_of(groups, samples):
    return [
        TaskGroup(letters.ROW, [Identity(f"f/{g}/{k}", g, k, "faults", seed_of(g, k)) for k in range(samples)])
        for g in range(groups)
    ]


def loop(make_env, **budget):
    usual = {"max_steps": CALLS + 1, "response_tokens": 4, "observation_tokens": 8, "context_tokens": 128}
    usual |= {"on_truncated_response": "continue"}
    return letters.loop(make_env, **usual | budget)


@pytest.mark.parametrize("groups", [6, pytest.param(32, marks=pytest.mark.slow)])
def test_fault_9_all_trajectories_return_with_typed_outcomes(groups):
    """A fifth of all attempts at tool calls fails; retries save most; nothing is dropped, scored 0 or left behind."""
    usual = {"seed": 1, "latency_seconds": 0.004, "huge_characters": 100_000}
    plans = {
        "w": FaultPlan(0.2, hang_seconds=10 * SLACK, blocking=False, **usual),
        "b": FaultPlan(0.2, hang_seconds=1.0, blocking=True, **usual),
    }
    injected, meter = collections.Counter(), ToolMetrics()
    tools = faulty_tools(plans, injected, meter)
    out = rollout(loop(lambda: calling(tools)), groups_of(groups, SAMPLES))

    assert [(t.group, t.sample) for t in out] == [(g, k) for g in range(groups) for k in range(SAMPLES)]
    expected = [expected_of(plans, t.seed) for t in out]
    assert [(t.outcome, len(t.steps)) for t in out] == [(outcome, steps) for outcome, steps, _, _ in expected]
    assert 1 <= sum(t.outcome is Outcome.TOOL_FAILURE for t in out) <= len(out) // 6
    for t in out:
        assert POLICIES[t.outcome].training == ("drop" if t.outcome is Outcome.TOOL_FAILURE else "train")
        assert t.outcome is Outcome.TOOL_FAILURE or t.total_reward == CALLS + 1
    assert_exact(out[::8])

    assert injected == sum((e[2] for e in expected), collections.Counter()) and set(injected) == set(KINDS)
    errors = sum((e[3] for e in expected), collections.Counter())
    figures = meter.metrics()
    assert {kind: figures[f"tools/error/{kind}"] for kind in errors} == errors
    calls = sum(len(s.tool_calls) for t in out for s in t.steps)
    failures = sum(not call["ok"] for t in out for s in t.steps for call in s.tool_calls)
    assert figures["tools/calls"] == calls and figures["tools/failures"] == failures
    assert failures == errors["oversized"] + sum(t.outcome is Outcome.TOOL_FAILURE for t in out)
    assert figures["tools/retries"] == errors.total() - failures
    assert figures["tools/cancelled"] == figures["tools/abandoned_threads"] == 0
    assert figures["tools/error/exception"] == injected["exception"] + injected["crash"]
    assert figures["tools/error/timeout"] == injected["hang"]


def test_faults_of_tools_change_no_token_of_those_they_spare():
    runs = []
    for rate in (0, 0.3):
        plan = FaultPlan(rate, ("exception", "crash", "garbage", "latency"), latency_seconds=0.004)
        tools = faulty_tools(dict.fromkeys(SECONDS, plan), collections.Counter(), ToolMetrics())
        runs.append(rollout(loop(lambda tools=tools: calling(tools)), groups_of(8, 4)))
    assert {t.outcome for t in runs[0]} == {Outcome.ANSWERED}
    for fine, struck in zip(*runs, strict=True):
        assert all_ids([struck])[0] == all_ids([fine])[0][: len(struck.steps)]
        assert len(struck.steps) == len(fine.steps) or struck.outcome is Outcome.TOOL_FAILURE
    assert any(t.outcome is Outcome.TOOL_FAILURE for t in runs[1])


STEP_SECONDS, TRAJECTORY_SECONDS, ATTEMPTS, STEPS = 0.8, 1.6, 2, 3


def expected_of_env(faults, seed):
    """The outcome, the steps and the failed attempts of an episode whose environment has the faults of a plan."""
    for attempt in range(ATTEMPTS):
        kinds = [faults.fault(seed, attempt, call) for call in range(STEPS + 1)]
        bad = next((call for call, kind in enumerate(kinds) if kind not in (None, "latency")), None)
        if bad is None:
            return Outcome.MAX_STEPS, STEPS, attempt
        if kinds[bad] == "hang" and bad >= 2:
            return Outcome.TIME_LIMIT, bad - 1, attempt
    return Outcome.ENV_FAILURE, 0, ATTEMPTS


def test_fault_9_environments_that_fail_end_their_own_attempt_only():
    faults = FaultPlan(0.2, ENV_KINDS, seed=2, hang_seconds=10 * SLACK, latency_seconds=0.004)
    injected = collections.Counter()
    make = faulty_env(lambda: letters.ScriptedEnv(["abc"] * STEPS), faults, injected)
    agent = loop(make, max_steps=STEPS, step_seconds=STEP_SECONDS, trajectory_seconds=TRAJECTORY_SECONDS)
    out = rollout(agent, groups_of(12, 4), limits=AttemptLimits(attempts=ATTEMPTS))
    assert len(out) == 48
    for t in out:
        outcome, steps, failures = expected_of_env(faults, t.seed)
        assert t.outcome is outcome, t.info
        assert outcome is Outcome.ENV_FAILURE or len(t.steps) == steps
        assert len(t.info.get("failures", [])) == failures
    assert_exact([t for t in out if t.steps][::4])
    assert len({t.outcome for t in out}) == 3 and set(injected) == set(ENV_KINDS)


def test_a_whole_group_may_fail():
    class Down(Planned):
        async def run(self, session, row):
            await session.generate(np.int32(row["opening"]), 4)
            raise ConnectionError("no route")

    row = planned([1, 2, 3], {})
    out = rollout(Down(), [TaskGroup(row, [Identity(f"f/{k}", 0, k, "faults", k) for k in range(8)])])
    assert [t.outcome for t in out] == [Outcome.ENV_FAILURE] * 8
    assert {t.info["error"] for t in out} == {"ConnectionError: no route"}

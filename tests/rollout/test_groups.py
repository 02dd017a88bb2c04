"""Groups of trajectories: what comes when, what is started in whose place, what ends them, and what is tried again."""

from __future__ import annotations

import asyncio
import collections
import dataclasses

import numpy as np
import pytest
from schedules import MANY, Planned, all_ids, assert_exact, engine_of, planned, run_work, sampled

from agentr1_jax.agents.session import Identity
from agentr1_jax.rollout.config import AttemptLimits, SamplingConfig
from agentr1_jax.rollout.runner import (
    BackgroundEngine,
    GroupBatch,
    TaskGroup,
    is_zero_variance,
    run_groups,
    start_batch,
    wait,
)
from agentr1_jax.trajectory import POLICIES, Outcome, Step, Trajectory


class Watched(Planned):
    """Does what is planned, keeps count of who began and ended, and holds the groups that it is told to hold.

    The reward of a sample is its number in groups of odd number, and 0 in the others.
    """

    def __init__(self, held=()):
        self.held = set(held)
        self.began = collections.Counter()
        self.ended = collections.Counter()
        self.tasks = []

    async def run(self, session, row):
        group, sample = session.identity.group, session.identity.sample
        self.tasks.append(asyncio.current_task())
        self.began[group] += 1
        await session.generate(np.int32(row["opening"]), 3 + group % 4)
        await asyncio.sleep(0.001 * (group % 3))
        session.record(float(sample * (group % 2)))
        while group in self.held:
            await asyncio.sleep(0.001)
        session.finish(Outcome.ENV_DONE)
        self.ended[group] += 1

    def nobody_is_left(self):
        return bool(self.tasks) and all(task.done() for task in self.tasks)


def groups_of(numbers, samples=2):
    return [
        TaskGroup(
            planned([1 + g, 2, 3], {}), [Identity(f"g/{g}/{k}", g, k, "t", 500 + 10 * g + k) for k in range(samples)]
        )
        for g in numbers
    ]


def stream(agent, groups, **options):
    engine, params = engine_of(3)
    return run_groups(engine, params, agent, groups, sampling=SamplingConfig(), policy_version=6, **options)


def test_a_group_comes_as_soon_as_it_is_complete_with_its_samples_in_order():
    agent = Watched(held=[0])
    out = stream(agent, groups_of(range(3)))
    early = [next(out), next(out)]
    assert {group[0].group for group in early} == {1, 2}
    assert agent.began[0] == 2 and agent.ended == {1: 2, 2: 2}
    agent.held.clear()
    (late,) = out
    for group in (*early, late):
        assert [(t.group, t.sample) for t in group] == [(group[0].group, 0), (group[0].group, 1)]
        assert {s.policy_version for t in group for s in t.steps} == {6}
        assert all_ids(group)[0] != all_ids(group)[1]
        assert_exact(group)
    assert list(stream(agent, [])) == []


def test_groups_of_equal_returns_have_zero_variance():
    def group(*rewards, outcome=Outcome.ENV_DONE):
        steps = [Step(np.int32([1]), np.int32([2]), np.float32([0]), reward=r) for r in rewards]
        return [Trajectory(f"t/{i}", 0, i, "test", 0, [s], outcome) for i, s in enumerate(steps)]

    assert not is_zero_variance(group(1.0, 0.0))
    assert all(map(is_zero_variance, (group(1.0, 1.0), group(0.0), [])))
    dropped = group(5.0, outcome=Outcome.TOOL_FAILURE)
    assert is_zero_variance([*group(1.0, 1.0), *dropped]) and not is_zero_variance([*group(1.0, 0.0), *dropped])


@pytest.mark.parametrize("held", [(), (0, 1)])
def test_zero_variance_groups_are_replaced_and_nobody_is_broken_off(held):
    """Never more are under way or accepted than wanted, and whoever was started comes."""
    engine, params = engine_of(3)
    agent = Watched(held)
    batch = GroupBatch(3, groups_of(range(20)), dynamic_sampling=True)

    def look(_):
        accepted = sum(map(batch.accept, batch.complete))
        assert accepted + len(agent.began) - len(batch.complete) <= 3
        if len(batch.complete) >= 1:
            agent.held.clear()

    with BackgroundEngine(engine, params, version=0) as background:
        start_batch(background, agent, batch, sampling=SamplingConfig(), on_complete=look).result(60)
    numbers = sorted(group[0].group for group in batch.complete)
    accepted, zero_variance = batch.trajectories()
    assert numbers == list(range(len(numbers))) and agent.began == agent.ended == dict.fromkeys(numbers, 2)
    assert len(accepted) == 6 and all(t.group % 2 == 1 for t in accepted)
    assert all(t.group % 2 == 0 for t in zero_variance)
    assert accepted == sorted(accepted, key=lambda t: (t.group, t.sample))
    assert_exact([*accepted, *zero_variance])


def test_a_batch_keeps_complete_groups_and_its_tasks_may_run_dry():
    engine, params = engine_of(3)
    first, agent = GroupBatch(1, groups_of([1])), Watched()
    with BackgroundEngine(engine, params, version=0) as background:
        start_batch(background, agent, first, sampling=SamplingConfig()).result(60)
        batch = GroupBatch(3, groups_of([0, 2, 3, 4]), dynamic_sampling=True, complete=list(first.complete))
        start_batch(background, agent, batch, sampling=SamplingConfig()).result(60)
        assert sorted(group[0].group for group in batch.complete) == [0, 1, 2, 3, 4] and agent.began[1] == 2
        stopped = GroupBatch(3, groups_of([1, 2, 3]))
        agent.held.add(2)
        work = start_batch(background, agent, stopped, sampling=SamplingConfig())
        assert wait(work, lambda: len(stopped.complete) == 2) is None and not work.done()
    assert {group[0].group for group in stopped.complete} == {1, 3} and agent.nobody_is_left()


def test_a_consumer_may_stop_early_and_the_engine_does_one_thing_at_a_time():
    agent = Watched(held=[1])
    out = stream(agent, groups_of(range(12)))
    assert next(out)[0].group != 1 and not agent.nobody_is_left()
    with pytest.raises(RuntimeError, match="rolling out already"):
        next(stream(Watched(), groups_of([0])))
    out.close()
    assert agent.nobody_is_left() and agent.ended[1] == 0
    assert list(out) == []
    unread = Watched()
    stream(unread, groups_of([0])).close()
    assert not unread.tasks

    def consume():
        for _ in stream(agent, groups_of(range(9))):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        consume()
    assert agent.nobody_is_left()
    assert_exact(sampled(MANY))


def test_what_is_no_agents_fault_is_raised_and_the_engine_stays_usable():
    engine, params = engine_of(3)

    async def broken():
        await engine.acquire()
        raise SystemError("of the caller")

    with pytest.raises(SystemError, match="of the caller"):
        run_work(engine, params, [broken(), asyncio.sleep(60)])
    assert_exact(sampled(MANY[:4]))


class Unreliable(Planned):
    """Fails as its row says, anywhere in an episode; else does what is planned."""

    async def run(self, session, row):
        fault = row.get("fault")
        if fault == "at once":
            raise OSError("no environment")
        if fault == "bad prompt":
            await session.generate(np.asarray([1, 99], np.int32), 4)
        if fault == "after a step":
            await session.generate(np.asarray(row["opening"], np.int32), 4)
            session.record(1.0)
            await asyncio.sleep(0.001)
            await session.generate(np.asarray(row["opening"], np.int32), 4)
            raise KeyError("tool")
        if fault == "impatient":
            async with asyncio.timeout(0):
                await session.generate(np.asarray([60, 61, 62], np.int32), 12)
        if fault == "impatient, then again":
            try:
                async with asyncio.timeout(0.002):
                    await session.generate(np.asarray(row["opening"] * 9, np.int32), 12)
            except TimeoutError:
                pass
            else:
                session.record(0.0)
        if fault != "unfinished":
            await super().run(session, row)


FAULTS = {
    "at once": "OSError: no environment",
    "bad prompt": "RequestError: prompt ids must lie in",
    "after a step": "KeyError: 'tool'",
    "impatient": "TimeoutError",
    "unfinished": "RuntimeError: t/4: the agent returned without finish",
}


@pytest.mark.parametrize("slots", [1, 3])
def test_fault_9_an_exception_ends_its_own_trajectory_only(slots, caplog):
    rows = list(MANY)
    for i, fault in enumerate(FAULTS):
        rows[i] = {**rows[i], "fault": fault}
    out = sampled(rows, slots, agent=Unreliable())
    healthy = sampled(MANY, slots)
    for t, fault in zip(out, FAULTS, strict=False):
        blamed = Outcome.ENGINE_FAILURE if fault == "bad prompt" else Outcome.ENV_FAILURE
        assert t.outcome is blamed and POLICIES[t.outcome].training == "drop"
        assert t.info["error"].startswith(FAULTS[fault]) and t.uid in caplog.text
        assert [s.reward for s in t.steps] == [1.0, None] * (fault == "after a step")
    assert all_ids(out[5:]) == all_ids(healthy[5:])
    assert_exact([t for t in out if t.steps])


@pytest.mark.parametrize("slots", [1, 3])
def test_a_request_nobody_waits_for_leaves_no_trace(slots):
    rows = [{**row, "fault": "impatient, then again"} if i % 2 else row for i, row in enumerate(MANY)]
    out = sampled(rows, slots, agent=Unreliable())
    assert all(t.outcome is Outcome.ENV_DONE for t in out)
    assert_exact(out)
    # The forgotten prompt is the shorter one, so that it would be written over the other.
    rows = [planned(list(range(12)), {}, {}) | ({"fault": "impatient"} if i % 2 == 0 else {}) for i in range(6)]
    out = sampled(rows, slots, agent=Unreliable())
    assert [t.outcome for t in out] == [Outcome.ENV_FAILURE, Outcome.ENV_DONE] * 3
    assert_exact(out[1::2])


class Recovering(Planned):
    """Fails as its row says at the first attempts, and does better then."""

    def __init__(self):
        self.attempts = collections.Counter()

    async def run(self, session, row):
        attempt = self.attempts[session.identity.uid]
        self.attempts[session.identity.uid] += 1
        if attempt < row["bad"]:
            done = await session.generate(np.int32([40, 41, 42 + attempt]), 6)
            if row["how"] == "agent":
                raise OSError(f"attempt {attempt}")
            if row["how"] == "cancelled":
                raise asyncio.CancelledError
            session.record(0.0, observation=f"{len(done.ids)}")
            if row["how"] == "bad prompt":
                await session.generate(np.int32([]), 6)
            session.finish(Outcome.TOOL_FAILURE)
            return
        await super().run(session, row)


@pytest.mark.parametrize(
    ("how", "slots", "failure"),
    [
        ("agent", 3, "env_failure: OSError: attempt 1"),
        ("cancelled", 3, "env_failure: CancelledError: "),
        ("tool", 1, "tool_failure: no details"),
    ],
)
def test_a_failure_of_the_infrastructure_is_tried_again_with_the_same_seed_and_lease(how, slots, failure):
    rows = [row | {"bad": i % 3, "how": how} for i, row in enumerate(MANY)]
    agent = Recovering()
    out = sampled(rows, slots, agent=agent, limits=AttemptLimits(attempts=3))
    assert all_ids(out) == all_ids(sampled(MANY))
    assert_exact(out)
    for t, row in zip(out, rows, strict=True):
        assert t.outcome is Outcome.ENV_DONE and agent.attempts[t.uid] == row["bad"] + 1
        assert len(t.info.get("failures", [])) == row["bad"]
    assert out[2].info["failures"][1] == failure


def test_the_last_attempt_stands_and_a_request_that_cannot_be_served_is_not_made_again():
    agent = Recovering()
    rows = [MANY[0] | {"bad": 2, "how": "agent"}, MANY[1] | {"bad": 1, "how": "bad prompt"}]
    failing, refused = sampled(rows, agent=agent, limits=AttemptLimits(attempts=2))
    assert failing.outcome is Outcome.ENV_FAILURE and failing.info["error"] == "OSError: attempt 1"
    assert failing.info["failures"] == ["env_failure: OSError: attempt 0", "env_failure: OSError: attempt 1"]
    assert refused.outcome is Outcome.ENGINE_FAILURE and len(refused.steps) == 1
    assert agent.attempts == {"t/0": 2, "t/1": 1}
    assert refused.info["failures"] == [f"engine_failure: {refused.info['error']}"]


def test_a_failure_may_count_as_zero_where_it_came_after_a_step():
    """It then makes a difference within its group; what no action did, and what has no step, is dropped as before."""
    bad = [("agent", 2), ("tool", 2), ("agent", 1), ("bad prompt", 1)]
    rows = [row | {"bad": n, "how": how} for row, (how, n) in zip(MANY, bad, strict=False)]
    limits = AttemptLimits(attempts=2, failures="zero")
    agent, tool, recovered, refused = sampled(rows, agent=Recovering(), limits=limits)
    assert agent.outcome is tool.outcome is Outcome.FAILURE_AS_ZERO
    assert agent.info["failures"] == ["env_failure: OSError: attempt 0", "env_failure: OSError: attempt 1"]
    assert tool.final_prompt_ids is None and [s.reward for s in (*agent.steps, *tool.steps)] == [None, 0.0]
    assert recovered.outcome is Outcome.ENV_DONE and refused.outcome is Outcome.ENGINE_FAILURE
    (early,) = sampled([MANY[0] | {"fault": "at once"}], agent=Unreliable(), limits=limits)
    assert early.outcome is Outcome.ENV_FAILURE and not early.steps
    won = dataclasses.replace(recovered, steps=[dataclasses.replace(recovered.steps[0], reward=1.0)])
    assert not is_zero_variance([won, agent]) and is_zero_variance([won, early])

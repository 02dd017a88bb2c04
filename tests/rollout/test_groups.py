"""Groups of trajectories as a stream: what comes when, what is started in whose place, and what is tried again."""

from __future__ import annotations

import asyncio
import collections

import numpy as np
import pytest
from schedules import MANY, Planned, all_ids, assert_exact, engine_of, planned, sampled

from agentr1_jax.agents.session import Identity
from agentr1_jax.rollout.config import AttemptLimits, SamplingConfig
from agentr1_jax.rollout.runner import TaskGroup, is_zero_variance, run_groups
from agentr1_jax.trajectory import Outcome, Step, Trajectory

FOREVER = 60.0


class Watched(Planned):
    """Does what is planned, keeps count of who began and ended, and holds the groups that it is told to hold."""

    def __init__(self, held=()):
        self.held = set(held)
        self.began = collections.Counter()
        self.ended = collections.Counter()
        self.tasks = []

    async def run(self, session, row):
        self.tasks.append(asyncio.current_task())
        self.began[session.identity.group] += 1
        await super().run(session, row)
        while session.identity.group in self.held:
            await asyncio.sleep(0.001)
        self.ended[session.identity.group] += 1

    def nobody_is_left(self):
        return bool(self.tasks) and all(task.done() for task in self.tasks)


def groups_of(count, samples=2, taken=None):
    for i in range(count):
        if taken is not None:
            taken.append(i)
        row = planned([1 + i % 50, 2, 3], {"max_tokens": 3 + i % 4, "delay": 0.001 * (i % 3)}, {"max_tokens": 4})
        yield TaskGroup(row, [Identity(f"g/{i}/{k}", i, k, "planned", 500 + 10 * i + k) for k in range(samples)])


def stream(agent, groups, **options):
    engine, params = engine_of(3)
    return run_groups(engine, params, agent, groups, sampling=SamplingConfig(), policy_version=0, **options)


def test_a_group_comes_as_soon_as_it_is_complete():
    agent = Watched(held=[0])
    out = stream(agent, groups_of(3))
    early = [next(out), next(out)]
    assert {group[0].group for group in early} == {1, 2}
    assert agent.began[0] == 2 and agent.ended == {1: 2, 2: 2}
    agent.held.clear()
    (late,) = out
    assert [(t.group, t.sample) for t in late] == [(0, 0), (0, 1)]
    for group in (*early, late):
        assert len({t.group for t in group}) == 1
        assert_exact(group)


def test_samples_come_in_order_however_they_end():
    class Backwards(Planned):
        """The last sample ends first."""

        over = 0

        async def run(self, session, row):
            await super().run(session, row)
            while self.over < 3 - session.identity.sample:
                await asyncio.sleep(0.001)
            self.over += 1

    ended = []
    (group,) = stream(Backwards(), groups_of(1, samples=4), on_finish=lambda t: ended.append(t.sample))
    assert [t.sample for t in group] == [0, 1, 2, 3] and ended == [3, 2, 1, 0]


@pytest.mark.parametrize("held", [(), (0, 1)])
def test_refused_groups_are_made_up_for_and_nobody_is_broken_off(held):
    """Never more are under way or kept than wanted, and whoever was started is yielded."""
    wanted, taken, kept, complete, out = 4, [], [], [], []
    agent = Watched(held)

    def keep(group):
        assert [t.sample for t in group] == [0, 1]
        complete.append(group[0].group)
        kept.extend([group[0].group] * (group[0].group % 3 != 1))
        return group[0].group % 3 != 1

    def source():
        for group in groups_of(30, taken=taken):
            under_way = len(taken) - len(complete)
            assert len(kept) + under_way <= wanted
            yield group

    for group in stream(agent, source(), count=wanted, accept=keep):
        out.append(group[0].group)
        if len(out) >= 2:
            agent.held.clear()
        assert all(t.outcome is Outcome.ENV_DONE and len(t.steps) == 2 for t in group)
        assert_exact(group)
    assert sorted(out) == taken == list(range(len(out)))
    assert len(kept) == wanted and len(taken) == wanted + sum(i % 3 == 1 for i in taken) > wanted
    assert agent.began == agent.ended == dict.fromkeys(taken, 2)


def test_groups_that_end_together_are_made_up_for_once():
    """All of them end between two looks of the consumer."""
    taken = []
    out = stream(Planned(), groups_of(40, taken=taken), count=3, accept=lambda group: group[0].group >= 6)
    assert sorted(group[0].group for group in out) == taken == list(range(9))


def test_a_source_may_run_dry():
    refused = list(stream(Planned(), groups_of(5), count=2, accept=lambda group: False))
    assert sorted(group[0].group for group in refused) == [0, 1, 2, 3, 4]
    assert len(list(stream(Planned(), groups_of(2), count=5))) == 2
    assert list(stream(Planned(), groups_of(0), count=5)) == list(stream(Planned(), groups_of(4), count=0)) == []


def test_no_more_is_taken_from_the_source_than_is_started():
    taken = []
    out = stream(Planned(), groups_of(50, taken=taken), count=2)
    assert taken == []
    assert len(list(out)) == 2 and taken == [0, 1]


def test_groups_of_equal_returns_have_zero_variance():
    def group(*rewards, outcome=Outcome.ENV_DONE):
        steps = [Step(np.int32([1]), np.int32([2]), np.float32([0]), reward=r) for r in rewards]
        return [Trajectory(f"t/{i}", 0, i, "test", 0, [s], outcome) for i, s in enumerate(steps)]

    assert not is_zero_variance(group(1.0, 0.0))
    assert all(map(is_zero_variance, (group(1.0, 1.0), group(0.0), [])))
    dropped = group(5.0, outcome=Outcome.TOOL_FAILURE)
    assert is_zero_variance([*group(1.0, 1.0), *dropped]) and not is_zero_variance([*group(1.0, 0.0), *dropped])


def test_dynamic_sampling_goes_on_until_enough_groups_have_variance():
    class Scored(Planned):
        """Half the groups earn the same whatever they do."""

        async def run(self, session, row):
            done = await session.generate(np.int32(row["opening"]), 4)
            i, k = session.identity.group, session.identity.sample
            session.record(float(len(done.ids) * 0 + k * (i % 2)))
            session.finish(Outcome.ENV_DONE)

    out = list(stream(Scored(), groups_of(20), count=3, accept=lambda group: not is_zero_variance(group)))
    assert sum(not is_zero_variance(group) for group in out) == 3
    assert {group[0].group for group in out} == set(range(len(out))) and len(out) >= 5


def test_a_consumer_may_stop_early():
    agent = Watched(held=[1])
    out = stream(agent, groups_of(12))
    first = next(out)
    assert first[0].group != 1 and not agent.nobody_is_left()
    out.close()
    assert agent.nobody_is_left() and agent.ended[1] == 0
    assert list(out) == []
    assert_exact(sampled(MANY))


def test_an_engine_rolls_out_one_thing_at_a_time():
    first = stream(Watched(), groups_of(2))
    next(first)
    with pytest.raises(RuntimeError, match="rolling out already"):
        next(stream(Watched(), groups_of(1)))
    assert len(list(first)) == 1
    assert len(list(stream(Watched(), groups_of(1)))) == 1


def test_a_stream_that_is_never_read_starts_nothing():
    taken, agent = [], Watched()
    stream(agent, groups_of(3, taken=taken)).close()
    assert not agent.tasks and not taken
    assert_exact(sampled(MANY[:3]))


def test_an_error_of_the_consumer_ends_the_rollout():
    agent = Watched(held=[0])

    def consume():
        for _ in stream(agent, groups_of(9)):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        consume()
    assert agent.nobody_is_left()
    assert_exact(sampled(MANY))


@pytest.mark.parametrize("where", ["accept", "on_finish", "groups"])
def test_an_error_of_the_callers_own_functions_is_raised(where):
    agent = Watched()

    def fails(*_):
        raise OSError(where)

    def source():
        yield from groups_of(3)
        fails()

    options = {where: fails} if where != "groups" else {}
    with pytest.raises(OSError, match=where):
        list(stream(agent, source() if where == "groups" else groups_of(3), **options))
    assert all(task.done() for task in agent.tasks)
    assert_exact(sampled(MANY[:3]))


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
            if row["how"] == "bad prompt":
                session.record(0.0)
                await session.generate(np.int32([]), 6)
            session.record(0.0, observation=f"{len(done.ids)}")
            session.finish(Outcome.TOOL_FAILURE)
            return
        await super().run(session, row)


@pytest.mark.parametrize("how", ["agent", "cancelled", "tool"])
def test_a_failure_of_the_infrastructure_is_tried_again_with_the_same_seed(how):
    rows = [row | {"bad": i % 3, "how": how} for i, row in enumerate(MANY)]
    agent = Recovering()
    out = sampled(rows, agent=agent, limits=AttemptLimits(attempts=3))
    fine = sampled(MANY)
    assert all_ids(out) == all_ids(fine)
    assert_exact(out)
    for t, row in zip(out, rows, strict=True):
        assert t.outcome is Outcome.ENV_DONE and agent.attempts[t.uid] == row["bad"] + 1
        assert len(t.info.get("failures", [])) == row["bad"]
    said = {"agent": "env_failure: OSError: attempt 1", "cancelled": "env_failure: CancelledError: "}
    assert out[2].info["failures"][1] == said.get(how, "tool_failure: no details")


def test_the_last_attempt_stands():
    rows = [row | {"bad": 2, "how": "agent"} for row in MANY[:3]]
    ended = []
    engine, params = engine_of(3)
    groups = [TaskGroup(row, [Identity(f"t/{i}", i, 0, "planned", 1000 + i)]) for i, row in enumerate(rows)]
    usual = {"sampling": SamplingConfig(), "policy_version": 0, "limits": AttemptLimits(attempts=2)}
    out = list(run_groups(engine, params, Recovering(), groups, on_finish=ended.append, **usual))
    assert len(out) == len(ended) == 3
    for (t,) in out:
        assert t.outcome is Outcome.ENV_FAILURE and t.info["error"] == "OSError: attempt 1"
        assert t.info["failures"] == ["env_failure: OSError: attempt 0", "env_failure: OSError: attempt 1"]


def test_a_request_that_cannot_be_served_is_not_made_again():
    agent = Recovering()
    out = sampled([MANY[0] | {"bad": 1, "how": "bad prompt"}], agent=agent, limits=AttemptLimits(attempts=5))
    assert out[0].outcome is Outcome.ENGINE_FAILURE and agent.attempts.total() == 1 and len(out[0].steps) == 1
    assert out[0].info["failures"] == [f"engine_failure: {out[0].info['error']}"]


def test_attempts_share_one_lease():
    """Attempts reuse the lease of their trajectory."""
    rows = [row | {"bad": 2, "how": "tool"} for row in MANY]
    out = sampled(rows, slots=1, agent=Recovering(), limits=AttemptLimits(attempts=3))
    assert all_ids(out) == all_ids(sampled(MANY))

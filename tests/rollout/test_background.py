"""The engine in a thread of its own: work from other threads, a change of policy between responses, its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading

import jax
import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from schedules import MANY, POLICY, Planned, all_ids, assert_exact, engine_of, episodes, planned, sampled

from agentr1_jax.agents.session import Identity
from agentr1_jax.rollout.background import BackgroundEngine, wait
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.runner import GroupBatch, TaskGroup, sample_groups, start_batch
from agentr1_jax.trajectory import Outcome


def params_of(version: int):
    return jax.device_put(tiny.decoder_params(POLICY, version), NamedSharding(tiny.mesh(1), P()))


def begin(background, engine, rows, agent=None):
    """Starts a group of one trajectory for each row, named and seeded as `schedules.sampled` does."""
    groups = [TaskGroup(row, [Identity(f"t/{i}", i, 0, "planned", 1000 + i)]) for i, row in enumerate(rows)]
    return background.start(
        functools.partial(sample_groups, engine, agent or Planned(), groups, sampling=SamplingConfig(1.0))
    )


def trajectories(future):
    return sorted((t for group in future.result(60) for t in group), key=lambda t: t.group)


def test_it_samples_what_a_stream_in_the_foreground_samples():
    engine, params = engine_of(3)
    with BackgroundEngine(engine, params, version=4) as background:
        first = begin(background, engine, MANY)
        again = begin(background, engine, MANY[:2])
        out = trajectories(first)
        assert all_ids(trajectories(again)) == all_ids(out)[:2]
    assert {s.policy_version for t in out for s in t.steps} == {4}
    assert all_ids(out) == all_ids(sampled(MANY))
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]


def test_the_learner_calls_its_programs_on_the_engines_dispatch_thread():
    engine, params = engine_of(3)
    with BackgroundEngine(engine, params, version=0):
        total, thread = engine.dispatcher.call(lambda a, b: (a + b, threading.current_thread().name), 1, 2)
    assert total == 3 and thread.startswith("dispatch")


class Adopting(Planned):
    """Has the engine adopt the next policy in the middle of an episode whose row says so."""

    def __init__(self, background, versions):
        self.background, self.versions = background, iter(versions)

    async def run(self, session, row):
        if row.get("adopts"):
            version = next(self.versions, None)
            if version is not None:
                self.background.engine.adopt(params_of(version), version)
        await super().run(session, row)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(episodes([None, 0.0, 0.002]), st.booleans()), min_size=1, max_size=10))
def test_each_response_has_one_policy_the_one_that_its_step_names(rows):
    engine, params = engine_of(3)
    rows = [row | {"adopts": adopts} for row, adopts in rows]
    with BackgroundEngine(engine, params, version=0) as background:
        out = trajectories(begin(background, engine, rows, Adopting(background, (1, 2, 3))))
    versions = {s.policy_version for t in out for s in t.steps}
    assert versions <= {0, 1, 2, 3}
    for version in versions:
        assert_exact(out, version=version, seed=version)
    for t in out:
        seen = [s.policy_version for s in t.steps]
        assert seen == sorted(seen)


def test_a_new_policy_is_adopted_while_nothing_is_asked_for_too():
    engine, params = engine_of(3)
    with BackgroundEngine(engine, params, version=0) as background:
        assert {s.policy_version for t in trajectories(begin(background, engine, MANY[:2])) for s in t.steps} == {0}
        background.adopt(params_of(5), 5)
        out = trajectories(begin(background, engine, MANY[:2]))
    assert {s.policy_version for t in out for s in t.steps} == {5}
    assert_exact(out, version=5, seed=5)


def test_who_waits_at_its_end_is_told_and_the_engine_is_free():
    engine, params = engine_of(3)
    background = BackgroundEngine(engine, params, version=0)
    slow = begin(background, engine, [planned([1], {"delay": 60.0}, {})])
    background.close()
    with pytest.raises(concurrent.futures.CancelledError, match="the engine was closed"):
        slow.result(10)
    with pytest.raises(RuntimeError, match="stream has ended"):
        background.start(lambda: None)
    background.close()
    assert_exact(sampled(MANY[:3]))


def test_what_breaks_the_engine_is_raised_where_its_work_is_awaited(monkeypatch):
    engine, params = engine_of(3)

    def broken():
        raise MemoryError("no device memory")

    with BackgroundEngine(engine, params, version=0) as background:
        with monkeypatch.context() as patch:
            patch.setattr(engine.device, "decode", broken)
            with pytest.raises(MemoryError, match="no device memory"):
                begin(background, engine, MANY).result(60)
    assert_exact(sampled(MANY[:3]))


def test_an_engine_that_cannot_open_says_so_at_once(monkeypatch):
    engine, params = engine_of(3)

    def broken(_):
        raise MemoryError("no room for a cache")

    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "open", broken)
        with pytest.raises(MemoryError, match="no room"):
            BackgroundEngine(engine, params, version=0)
    assert np.isfinite(sampled(MANY[:1])[0].steps[0].logprobs).all()


def test_the_agents_own_errors_end_their_trajectory_only():
    engine, params = engine_of(3)

    class Failing(Planned):
        async def run(self, session, row):
            raise OSError("no environment")

    with BackgroundEngine(engine, params, version=0) as background:
        (failed,) = trajectories(begin(background, engine, MANY[:1], Failing()))
        assert failed.outcome == "env_failure"
        assert_exact(trajectories(begin(background, engine, MANY[:2])))


def test_what_ends_between_two_polls_is_no_error():
    """It must not be taken for work that ran out of time."""

    class Late(concurrent.futures.Future):
        def result(self, timeout=None):
            if timeout is not None and not self.done():
                self.set_result(5)
                raise TimeoutError
            return super().result(timeout)

    future, asked = Late(), []

    def stop():
        asked.append(True)
        if len(asked) == 2 and not future.done():
            future.set_result(5)
        return False

    assert wait(future, stop) == 5
    failed = concurrent.futures.Future()
    failed.set_exception(TimeoutError("of the work itself"))
    with pytest.raises(TimeoutError, match="itself"):
        wait(failed, bool)


class Scored(Planned):
    """Rewards differ within groups of odd number only; one group never ends."""

    def __init__(self, endless=None):
        self.endless = endless
        self.sampled = []

    async def run(self, session, row):
        group, sample = session.identity.group, session.identity.sample
        self.sampled.append((group, sample))
        await session.generate(np.int32(row["opening"]), 4)
        if group == self.endless:
            await asyncio.sleep(60.0)
        session.record(float(sample * (group % 2)))
        session.finish(Outcome.ENV_DONE)


def tasks_of(groups):
    return [
        TaskGroup(planned([1, 2 + g], {}), [Identity(f"b/{g}/{k}", g, k, "planned", 10 * g + k) for k in range(2)])
        for g in groups
    ]


def test_a_batch_replaces_zero_variance_groups_and_keeps_complete_ones():
    engine, params = engine_of(3)
    first, agent = GroupBatch(1, tasks_of([1])), Scored()
    with BackgroundEngine(engine, params, version=0) as background:
        start_batch(background, agent, first, sampling=SamplingConfig()).result(60)
        batch = GroupBatch(3, tasks_of([0, 2, 3, 4, 5, 7, 9]), dynamic_sampling=True, complete=list(first.complete))
        start_batch(background, agent, batch, sampling=SamplingConfig()).result(60)
    accepted, zero_variance = batch.trajectories()
    assert len(accepted) == 6 and {t.group for t in accepted} <= {1, 3, 5, 7} and accepted[:2] == first.complete[0]
    assert {t.group for t in zero_variance} >= {0, 2} and all(t.group % 2 == 0 for t in zero_variance)
    assert accepted == sorted(accepted, key=lambda t: (t.group, t.sample))
    assert sorted(agent.sampled) == sorted((t.group, t.sample) for t in accepted + zero_variance)


def test_a_batch_that_is_stopped_keeps_its_complete_groups():
    engine, params = engine_of(3)
    batch = GroupBatch(3, tasks_of([1, 2, 3]))
    with BackgroundEngine(engine, params, version=0) as background:
        future = start_batch(background, Scored(endless=2), batch, sampling=SamplingConfig())
        assert wait(future, lambda: len(batch.complete) == 2) is None and not future.done()
    assert {group[0].group for group in batch.complete} == {1, 3}

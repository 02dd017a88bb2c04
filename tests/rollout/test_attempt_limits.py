"""AttemptLimits of time: on steps and trajectories, on agents that hang, wherever they strike."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import letters
import numpy as np
import pytest
from schedules import MANY, Planned, all_ids, assert_exact, engine_of, planned, sampled

from agentr1_jax.rollout.config import AttemptLimits
from agentr1_jax.trajectory import POLICIES, Outcome

FOREVER = 600.0
LIMIT = 0.5
OBSERVATIONS = ["the cab", "abc", "abcd"]


class Hanging(letters.ScriptedEnv):
    """Hangs where its row says: at call 0 (the reset) or at a step."""

    def __init__(self):
        super().__init__(OBSERVATIONS)

    async def reset(self, row, seed):
        self.hangs = row["hangs"]
        await asyncio.sleep(FOREVER if self.hangs == 0 else 0)
        return await super().reset(row, seed)

    async def step(self, action):
        await asyncio.sleep(FOREVER if self.hangs == len(self.actions) + 1 else 0)
        return await super().step(action)


def rows_that_hang(*calls):
    return [letters.ROW | {"hangs": call} for call in calls]


def loop(make_env=Hanging, **budget):
    return letters.loop(make_env, max_steps=3, context_tokens=128, on_truncated_response="continue", **budget)


def next_prompt(step):
    """The prompt after a step of `loop`."""
    stopped = step.response_ids[-1] == letters.TOKENIZER.stop_id
    return [*step.prompt_ids.tolist(), *step.response_ids.tolist(), *letters.observed(step.observation, stopped)]


@pytest.mark.parametrize("key", ["step_seconds", "trajectory_seconds"])
def test_an_environment_that_hangs_is_given_up_and_its_steps_are_kept(key):
    calls = [1, None, 2, None, 3, *([0] if key == "trajectory_seconds" else [])]
    fine = sampled(rows_that_hang(*[None] * len(calls)), agent=loop())  # First: it compiles, which takes time.
    out = sampled(rows_that_hang(*calls), agent=loop(**{key: LIMIT}))
    assert_exact([t for t in out if t.steps])
    for t, whole, call in zip(out, fine, calls, strict=True):
        if call is None:
            assert t.outcome is Outcome.MAX_STEPS and "error" not in t.info
            assert all_ids([t]) == all_ids([whole])
            continue
        reason = f"budget.{key} ({LIMIT} s) was reached"
        assert len(t.steps) == max(call - 1, min(call, 1))
        assert all_ids([t]) == [all_ids([whole])[0][: len(t.steps)]]
        if call <= 1:  # Nothing yet that the policy could be judged by.
            assert all(step.reward is None for step in t.steps)
            assert t.outcome is Outcome.ENV_FAILURE and t.info["error"] == f"TimeLimitReached: {reason}"
            assert t.final_prompt_ids is None
            continue
        assert t.outcome is Outcome.TIME_LIMIT and POLICIES[t.outcome].bootstrap
        assert t.info["error"] == reason and t.row["question"] == letters.ROW["question"]
        assert t.metrics == {"em": 0.0}
        assert t.final_prompt_ids.tolist() == next_prompt(t.steps[-1]) == whole.steps[call - 1].prompt_ids.tolist()
        assert t.total_reward == sum(range(1, call))


class Slow(letters.ScriptedEnv):
    """Each of its steps takes its time, in all more than a trajectory may."""

    def __init__(self, seconds):
        super().__init__(OBSERVATIONS)
        self.seconds = seconds

    async def step(self, action):
        await asyncio.sleep(self.seconds)
        return await super().step(action)


def test_steps_within_their_limit_may_exceed_that_of_the_trajectory():
    out = sampled([letters.ROW] * 3, agent=loop(lambda: Slow(0.3), step_seconds=30.0, trajectory_seconds=0.5))
    for t in out:
        assert t.outcome is Outcome.TIME_LIMIT and len(t.steps) == 1
        assert t.info["error"].startswith("budget.trajectory_seconds")


def test_a_time_limit_of_somebody_else_is_not_taken_for_the_budgets():
    class Fails(letters.ScriptedEnv):
        async def step(self, action):
            raise TimeoutError("of the database")

    (t,) = sampled([letters.ROW], agent=loop(lambda: Fails([]), step_seconds=30.0, trajectory_seconds=30.0))
    assert t.outcome is Outcome.ENV_FAILURE and t.info["error"] == "TimeoutError: of the database"


@dataclasses.dataclass
class ByRow:
    """Some trajectories have less time than others."""

    patient: object
    hasty: object

    async def run(self, session, row):
        await (self.hasty if row["hasty"] else self.patient).run(session, row)


@pytest.fixture
def slow_down(monkeypatch):
    """Makes each chunk of an engine take some time more."""

    def slow(engine, seconds):
        decode = engine.device.decode

        def later():
            time.sleep(seconds)
            decode()

        monkeypatch.setattr(engine.device, "decode", later)

    return slow


def test_limits_that_strike_amid_decoding_and_waiting_leave_the_slots_usable(slow_down):
    """Chunks are so slow that some run out of time in a response, and others waiting for a slot."""
    engine = {"slots": 3, "swap_slots": 2, "fetch_lag": 1}
    slow_down(engine_of(**engine)[0], 0.03)
    rows = [letters.ROW | {"hasty": i % 2 == 1} for i in range(10)]

    def env():
        return letters.ScriptedEnv(OBSERVATIONS)

    agent = ByRow(loop(env), loop(env, trajectory_seconds=0.3))
    out = sampled(rows, agent=agent, **engine)
    assert_exact([t for t in out if t.steps])
    for t, row in zip(out, rows, strict=True):
        if not row["hasty"]:
            assert t.outcome is Outcome.MAX_STEPS and len(t.steps) == 3
        if t.outcome is Outcome.TIME_LIMIT:
            assert t.final_prompt_ids.tolist() == next_prompt(t.steps[-1])
    hasty = [t.outcome for t, row in zip(out, rows, strict=True) if row["hasty"]]
    assert set(hasty) <= {Outcome.TIME_LIMIT, Outcome.ENV_FAILURE, Outcome.MAX_STEPS}
    assert hasty.count(Outcome.MAX_STEPS) < len(hasty)


class Impatient(Planned):
    """Goes as soon as its patience is at an end."""

    async def run(self, session, row):
        async with asyncio.timeout(row["patience"]):
            await super().run(session, row)


def test_limits_that_strike_at_any_moment_change_nobody_elses_tokens():
    rng = np.random.default_rng(0)
    expected = sampled(MANY)
    for engine in ({"slots": 1}, {"slots": 3, "swap_slots": 2, "fetch_lag": 1}):
        for _ in range(3):
            patience = [None if i % 3 == 0 else float(rng.uniform(0, 0.03)) for i in range(len(MANY))]
            rows = [row | {"patience": p} for row, p in zip(MANY, patience, strict=True)]
            out = sampled(rows, agent=Impatient(), **engine)
            assert_exact([t for t in out if t.steps])
            assert all_ids(out)[::3] == all_ids(expected)[::3]
            for t, whole in zip(out, expected, strict=True):
                assert all_ids([t])[0] == all_ids([whole])[0][: len(t.steps)]
                assert t.outcome in (Outcome.ENV_DONE, Outcome.ENV_FAILURE)


def test_a_response_that_nobody_waits_for_is_not_sampled_further(slow_down):
    engine, _ = engine_of(3)
    slow_down(engine, 0.01)
    rows = [planned([5, i], {"max_tokens": 100}) | {"patience": p} for i, p in enumerate([None, 0.05, 0.05])]
    out = sampled(rows, agent=Impatient())
    assert [len(t.steps) for t in out] == [1, 0, 0]
    assert engine.counters.decode_tokens < 200  # Of 300.


class Stuck(Planned):
    """An agent that keeps to no limit of its own."""

    async def run(self, session, row):
        if row["stuck"] == "at once":
            await asyncio.sleep(FOREVER)
        if row["stuck"] in ("after a step", "amid a step"):
            await session.generate(np.asarray(row["opening"], np.int32), 4)
            session.record(1.0)
            if row["stuck"] == "amid a step":
                await session.generate(np.asarray([9, 8, 7], np.int32), 4)
            await asyncio.sleep(FOREVER)
        await super().run(session, row)
        if row["stuck"] == "at its end":
            await asyncio.sleep(FOREVER)


def test_an_agent_that_hangs_is_ended_by_the_runner():
    stuck = [None, "at once", "after a step", "amid a step", "at its end", None]
    rows = [row | {"stuck": how} for row, how in zip(MANY, stuck, strict=False)]
    out = sampled(rows, agent=Stuck(), limits=AttemptLimits(seconds=LIMIT))
    whole = sampled(MANY)
    done = Outcome.ENV_DONE
    limit = Outcome.TIME_LIMIT
    assert [t.outcome for t in out] == [done, Outcome.ENV_FAILURE, limit, limit, done, done]
    for i in (0, 4, 5):
        assert all_ids([out[i]])[0] == all_ids(whole)[i]
    assert out[1].info["error"] == f"TimeoutError: no step within {LIMIT} s" and not out[1].steps
    last = out[2].steps[-1]
    assert out[2].final_prompt_ids.tolist() == [*last.prompt_ids.tolist(), *last.response_ids.tolist()]
    assert out[3].final_prompt_ids.tolist() == [9, 8, 7] and len(out[3].steps) == 1
    assert out[2].info["error"] == out[3].info["error"] == f"no end within {LIMIT} s"
    assert_exact([t for t in out if t.steps])


def test_an_attempt_that_hung_is_made_again_only_if_it_left_nothing_to_judge():
    tried = []

    class Once(Stuck):
        async def run(self, session, row):
            tried.append(session.identity.group)
            await super().run(session, row | {"stuck": row["stuck"] if tried.count(tried[-1]) == 1 else None})

    rows = [row | {"stuck": how} for row, how in zip(MANY, ["at once", "after a step"], strict=False)]
    out = sampled(rows, agent=Once(), limits=AttemptLimits(attempts=2, seconds=LIMIT))
    assert [t.outcome for t in out] == [Outcome.ENV_DONE, Outcome.TIME_LIMIT]
    assert sorted(tried) == [0, 0, 1]
    assert out[0].info["failures"] == [f"env_failure: TimeoutError: no step within {LIMIT} s"]
    assert all_ids(out[:1]) == all_ids(sampled(MANY))[:1]

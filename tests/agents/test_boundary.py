"""Faulty environments: each fault ends its own trajectory in a known way, and nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time

import letters
import numpy as np
import pytest
from schedules import all_ids, engine_of, sampled

from agentr1_jax.agents import event_loop
from agentr1_jax.agents.session import Identity
from agentr1_jax.credit.batch import flatten
from agentr1_jax.envs.base import Observation
from agentr1_jax.rollout.config import AttemptLimits, SamplingConfig
from agentr1_jax.rollout.runner import TaskGroup, run_groups
from agentr1_jax.trajectory import Outcome
from agentr1_jax.trajectory_io import read_jsonl, write_jsonl

SECONDS = 0.3
"""Time limit of an attempt where an environment hangs."""


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


def cyclic():
    value = {}
    value["self"] = value
    return value


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Unutterable(Exception):
    def __str__(self):
        raise SystemExit(3)


class Unshowable:
    def __repr__(self):
        raise Rude("no looks")


class Rude(BaseException):
    pass


def raises(error):
    async def step():
        raise error

    return step


def awaits(error):
    async def step():
        await asyncio.gather(raises(error)())

    return step


async def raise_stop_iteration_in_a_thread():
    await asyncio.to_thread(next, iter(()))


async def stop_the_loop():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


async def cancel_own_task():
    asyncio.current_task().cancel()
    await asyncio.sleep(60)


async def cancel_own_task_and_go_on():
    asyncio.current_task().cancel()


async def ignore_one_cancellation():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(60)


async def ignore_every_cancellation():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


async def ignore_everything():
    while True:
        try:
            await asyncio.sleep(60)
        except:  # noqa: E722
            continue


async def leave_behind_what_ignores_everything():
    TASKS.append(asyncio.create_task(ignore_everything()))
    await asyncio.sleep(60)


async def leave_behind_a_thread():
    await asyncio.to_thread(HOLD.wait)


TASKS: list[asyncio.Task] = []
HOLD = threading.Event()
"""Never set while a test runs."""


def shows(**fields):
    return {"observation": Observation(**({} if fields.keys() & {"texts", "messages"} else {"text": "so?"}) | fields)}


DONE, FAILED = Outcome.ENV_DONE, Outcome.ENV_FAILURE

STEPS = {
    # Changes of the first transition -> outcome, and a part of the error.
    "a reward of np.float32": ({"reward": np.float32(0.5)}, DONE, ""),
    "a reward of np.int64": ({"reward": np.int64(2)}, DONE, ""),
    "a reward of a 0-d array": ({"reward": np.array(0.5)}, DONE, ""),
    "a bool as reward": ({"reward": True}, DONE, ""),
    "no reward": ({"reward": None}, FAILED, "steps [0] have no reward"),
    "a text as reward": ({"reward": "1"}, FAILED, "reward is '1'; it must be a number"),
    "a complex reward": ({"reward": 1j}, FAILED, "must be a number"),
    "several rewards": ({"reward": np.ones(2)}, FAILED, "must be a number"),
    "a reward that is not a number": ({"reward": float("nan")}, FAILED, "must be a finite number"),
    "an infinite reward": ({"reward": np.float64("-inf")}, FAILED, "must be a finite number"),
    "a reward beyond float32": ({"reward": 1e38}, FAILED, "between -1e+15 and 1e+15"),
    "a reward of a thousand digits": ({"reward": 10**1000}, FAILED, "finite number"),
    "reward parts of numpy": ({"reward_parts": {"a": np.float32(1)}}, DONE, ""),
    "reward parts that are a list": ({"reward_parts": [1.0]}, FAILED, "reward_parts"),
    "a reward part None": ({"reward_parts": {"a": None}}, FAILED, "reward_parts['a'] is None"),
    "raw parts that are texts": ({"raw_reward_parts": {"a": "high"}}, FAILED, "raw_reward_parts['a'] is 'high'"),
    "raw parts that are a list": ({"raw_reward_parts": [1.0]}, FAILED, "raw_reward_parts is [1.0]; it must map"),
    "raw parts without names": ({"raw_reward_parts": {1: 1.0}}, FAILED, "a key of raw_reward_parts is 1"),
    "an array as flag": ({"terminated": np.bool_(False)}, DONE, ""),
    "a text as flag": ({"truncated": "no"}, FAILED, "truncated is 'no'; it must be True or False"),
    "the name of an outcome": ({"terminated": True, "outcome": "env_done"}, DONE, ""),
    "no name of an outcome": ({"terminated": True, "outcome": "won"}, FAILED, "outcome is 'won'"),
    "metrics of numpy": ({"terminated": True, "metrics": {"em": np.float32(1), "n": np.int8(3)}}, DONE, ""),
    "a metric None": ({"terminated": True, "metrics": {"em": None}}, FAILED, "metrics['em'] is None"),
    "an infinite metric": ({"terminated": True, "metrics": {"em": np.inf}}, FAILED, "must be a finite number"),
    "tool calls that are texts": ({"tool_calls": ["x"]}, FAILED, "must be a list of mappings"),
    "a tool call that JSON cannot store": ({"tool_calls": [{"result": {1, 2}}]}, FAILED, "JSON cannot store"),
    "info of numpy": ({"info": {"a": np.arange(3), np.str_("b"): np.float32(2), 3: (1, 2)}}, DONE, ""),
    "info that is a list": ({"info": [1]}, FAILED, "info is [1]; it must be a mapping"),
    "an object in info": ({"info": {"a": object()}}, FAILED, "JSON cannot store"),
    "an object without looks in info": ({"info": {"a": Unshowable()}}, FAILED, "an object of type Unshowable"),
    "bytes in info": ({"info": {"a": b"x"}}, FAILED, "JSON cannot store"),
    "a tuple as key in info": ({"info": {(1, 2): 3}}, FAILED, "keys of JSON are texts"),
    "info nested 900 deep": ({"info": {"a": nested(900)}}, FAILED, "nested more than 100"),
    "info nested 100,000 deep": ({"info": {"a": nested(100_000)}}, FAILED, "nested more than 100"),
    "info that holds itself": ({"info": cyclic()}, FAILED, "nested more than 100"),
    "a huge integer in info": ({"info": {"a": 10**5000}}, FAILED, "more than 4300 digits"),
    "the largest integer of JSON in info": ({"info": {"a": 10**4300 - 1}}, DONE, ""),
    "not a number in info": ({"info": {"a": float("nan")}}, DONE, ""),
    "no observation": ({"observation": None}, FAILED, "goes on without an observation"),
    "no transition": ({}, FAILED, "the result of step() is None; it must be a Transition"),
    "a text as observation": ({"observation": "so?"}, FAILED, "it must be an Observation"),
    "a number as text": (shows(text=5), FAILED, "text of an observation is 5"),
    "a number among texts": (shows(texts=["a", 5]), FAILED, "one of the texts"),
    "a number as texts": (shows(texts=5), FAILED, "texts of an observation are 5; they must be a list"),
    "a dict as texts": (shows(texts={"a": 1}), FAILED, "they must be a list"),
    "texts as tool calls of a message": (
        shows(messages=[{"role": "assistant", "content": "a", "tool_calls": ["x"]}]),
        FAILED,
        "'tool_calls' of a message is ['x']; it must be a list of mappings",
    ),
    "messages later": (
        shows(messages=[{"role": "user", "content": "a"}]),
        FAILED,
        "must hold text or token ids",
    ),
    "an unknown role": (shows(role="judge"), FAILED, "renders no 'judge' turn"),
    "token ids that are texts": ({"observation": Observation(token_ids=["a"])}, FAILED, "must be integers"),
    "token ids of two dimensions": ({"observation": Observation(token_ids=[[1, 2]])}, FAILED, "must be integers [N]"),
    "one token id": ({"observation": Observation(token_ids=5)}, FAILED, "must be integers [N]"),
    "token ids of 64 bits": ({"observation": Observation(token_ids=np.array([2**40 + 5]))}, FAILED, "0 to 2**31 - 1"),
    "no token ids": ({"observation": Observation(token_ids=[])}, DONE, ""),
    "token ids beyond the vocabulary": ({"observation": Observation(token_ids=[10**6])}, Outcome.ENGINE_FAILURE, "ids"),
    "an outcome without an end": ({"outcome": "answered"}, FAILED, "though the episode goes on"),
    "a limit that is no truncation": ({"terminated": True, "outcome": "max_steps"}, FAILED, "must be truncated"),
    "a truncation without an outcome": ({"truncated": True}, Outcome.MAX_STEPS, ""),
    "lone surrogates": (shows(text="a\ud800b"), DONE, ""),
    "a dict as state key": (shows(state_key={"a": 1}), FAILED, "state_key is {'a': 1}; it must be a text"),
    "a potential that is not a number": (shows(potential=np.nan), FAILED, "potential is nan"),
    "a potential of numpy": (shows(potential=np.float32(0.5)), DONE, ""),
    "a list as evidence": (shows(evidence=["a"]), FAILED, "evidence of an observation"),
    "a text of 10 MB": (shows(text="the cab " * 1_250_000), DONE, ""),
}

CALLS = {
    # What the first call of step() does -> outcome, and a part of the error.
    "an exception": (raises(OSError("gone")), FAILED, "OSError: gone"),
    "an exception whose message raises": (raises(Unspeakable()), FAILED, "Unspeakable: (its message raises"),
    "an exception whose message exits": (raises(Unutterable()), FAILED, "Unutterable: (its message raises SystemExit"),
    "an exception with a message of 10 MB": (raises(ValueError("x" * 10**7)), FAILED, "ValueError: xxx"),
    "a BaseException": (raises(Rude("rude")), FAILED, "Rude: rude"),
    "SystemExit": (raises(SystemExit(3)), FAILED, "SystemExit: 3"),
    "GeneratorExit": (raises(GeneratorExit()), FAILED, "GeneratorExit"),
    "KeyboardInterrupt": (raises(KeyboardInterrupt()), FAILED, "KeyboardInterrupt"),
    "SystemExit of another task": (awaits(SystemExit(3)), FAILED, "SystemExit: 3"),
    "KeyboardInterrupt of another task": (awaits(KeyboardInterrupt()), FAILED, "KeyboardInterrupt"),
    "StopIteration of a thread": (raise_stop_iteration_in_a_thread, FAILED, "raised StopIteration"),
    "it stops the event loop": (stop_the_loop, DONE, ""),
    "StopAsyncIteration": (raises(StopAsyncIteration()), FAILED, "StopAsyncIteration"),
    "RecursionError": (raises(RecursionError("deep")), FAILED, "RecursionError: deep"),
    "a TimeoutError of its own": (raises(TimeoutError("of its own")), FAILED, "TimeoutError: of its own"),
    "CancelledError": (raises(asyncio.CancelledError()), FAILED, "CancelledError"),
    "it cancels its task": (cancel_own_task, FAILED, "CancelledError"),
    "it cancels its task and goes on": (cancel_own_task_and_go_on, None, ""),
    "it ignores one cancellation": (ignore_one_cancellation, FAILED, "no step within"),
    "it ignores every cancellation": (ignore_every_cancellation, FAILED, "no step within"),
    "it ignores everything": (ignore_everything, FAILED, "no step within"),
    "its other task ignores everything": (leave_behind_what_ignores_everything, FAILED, "no step within"),
    "its thread ignores everything": (leave_behind_a_thread, FAILED, "no step within"),
}


class Faulty(letters.ScriptedEnv):
    """Does what the row names at its first step, or in its reset."""

    def __init__(self):
        super().__init__(["the cab", "abc"], end=3)

    async def reset(self, row, seed):
        self.fault = row.get("fault")
        if row.get("in_reset"):
            await CALLS[self.fault][0]()
            self.fault = None
        return await super().reset(row, seed)

    async def step(self, action):
        transition = await super().step(action)
        if len(self.actions) > 1 or self.fault is None:
            return transition
        if self.fault == "no transition":
            return None
        if self.fault in CALLS:
            await CALLS[self.fault][0]()
            return transition
        return dataclasses.replace(transition, **STEPS[self.fault][0])


def agent(make_env=Faulty, **budget):
    return letters.loop(make_env, context_tokens=128, on_truncated_response="continue", **budget)


def among_healthy(rows, **options):
    """Trajectories of rows, sampled between healthy ones, whose ids are those that they have alone."""
    rows = [letters.ROW, *(part for row in rows for part in (row, letters.ROW))]
    out = sampled(rows, agent=agent(), **options)
    assert {t.outcome for t in out[::2]} == {DONE}
    assert all_ids(out[::2]) == all_ids(sampled([letters.ROW] * len(rows), agent=agent()))[::2]
    return out[1::2]


def check(faulty, outcome, error, tmp_path):
    """It ended as the table says, and can be stored and trained."""
    assert outcome is None or faulty.outcome is outcome, faulty.info
    assert error in faulty.info.get("error", "")
    assert len(faulty.info.get("error", "")) < 3000
    write_jsonl(tmp_path / "out.jsonl.gz", [faulty])
    assert [t.outcome for t in read_jsonl(tmp_path / "out.jsonl.gz")] == [faulty.outcome]
    json.dumps([faulty.row, faulty.metrics, faulty.info], allow_nan=False)
    if faulty.outcome is DONE:
        flat = flatten([faulty])
        assert np.isfinite(flat.rewards).all() and np.isfinite(flat.returns).all()
    for step in faulty.steps:
        numbers = [step.reward, *step.reward_parts.values(), step.potential, step.next_potential]
        assert all(type(x) is float for x in numbers if x is not None)


def test_faulty_transitions_end_their_own_trajectory_only(tmp_path):
    faulty = among_healthy([letters.ROW | {"fault": fault} for fault in STEPS])
    for t, (_, outcome, error) in zip(faulty, STEPS.values(), strict=True):
        check(t, outcome, error, tmp_path)


@pytest.mark.parametrize("in_reset", [False, True])
def test_whatever_environments_raise_ends_their_own_trajectory_only(in_reset, tmp_path):
    raising = [fault for fault in CALLS if "ignores" not in fault]
    faulty = among_healthy([letters.ROW | {"fault": fault, "in_reset": in_reset} for fault in raising])
    for t, fault in zip(faulty, raising, strict=True):
        check(t, *CALLS[fault][1:], tmp_path)


@pytest.fixture
def hanging(monkeypatch):
    monkeypatch.setattr(event_loop, "CANCEL_SECONDS", 0.1)
    yield [letters.ROW | {"fault": fault} for fault in CALLS if "ignores" in fault]
    HOLD.set()
    HOLD.clear()


def test_environments_that_ignore_cancellations_end_at_the_time_limit(hanging, tmp_path, caplog):
    for in_reset in (False, True):
        rows = [row | {"in_reset": in_reset} for row in hanging]
        for t in among_healthy(rows, limits=AttemptLimits(seconds=SECONDS)):
            check(t, FAILED, "no step within", tmp_path)
    assert f"ignored 3 cancellations, at ignore_everything ({__file__}:" in caplog.text


def test_a_stream_that_ends_early_waits_for_no_agent_that_ignores_it(hanging):
    engine, params = engine_of(3)
    rows = [letters.ROW, *hanging]
    groups = [TaskGroup(row, [Identity(f"t/{i}", i, 0, "letters", i)]) for i, row in enumerate(rows)]
    stream = run_groups(engine, params, agent(), groups, sampling=SamplingConfig(), policy_version=0)
    started = time.monotonic()
    assert next(stream)[0].outcome is DONE
    stream.close()
    assert time.monotonic() - started < 30


def test_rows_that_cannot_be_used_end_their_own_trajectories_only(tmp_path):
    rows = {
        "OSError: no row": OSError("no row"),
        "Unspeakable: (its message raises": Unspeakable(),
        "a task row is None; it must be a mapping": None,
        "row['answers'] holds {1, 2}": letters.ROW | {"answers": {1, 2}},
        "row['answers'] is '42'; it must be a list": letters.ROW | {"answers": "42"},
        "row['max_steps'] is 'two'": letters.ROW | {"max_steps": "two"},
        "a row allows at least 1 step": letters.ROW | {"max_steps": 0},
        "row['answers'] is nested more than 100": letters.ROW | {"answers": nested(900)},
        "SystemExit: 3": SystemExit(3),
    }
    for t, error in zip(among_healthy(rows.values()), rows, strict=True):
        check(t, FAILED, error, tmp_path)


def fails():
    raise OSError("no environment")


class Truncated(Faulty):
    """Gives these metrics where the budget ends its episode."""

    metrics = None

    def truncate(self):
        return self.metrics


@pytest.mark.parametrize(
    ("metrics", "error"),
    [({"em": None}, "metrics['em'] is None"), ([1], "metrics is [1]"), ({"em": np.float32(1)}, "")],
)
def test_metrics_of_an_episode_that_the_budget_ends_are_checked(metrics, error):
    env = type("Own", (Truncated,), {"metrics": metrics})
    (t,) = sampled([letters.ROW], agent=agent(env, max_steps=1))
    assert t.outcome is (FAILED if error else Outcome.MAX_STEPS) and error in t.info.get("error", "")
    assert error or (t.metrics == {"em": 1.0} and type(t.metrics["em"]) is float)


def test_an_environment_that_cannot_be_made_fails_every_attempt_and_is_counted(caplog):
    (t,) = sampled([letters.ROW], agent=agent(fails), limits=AttemptLimits(attempts=3))
    assert t.outcome is FAILED and t.info["failures"] == ["env_failure: OSError: no environment"] * 3
    assert "attempt 3 of 3: env_failure: OSError: no environment" in caplog.text

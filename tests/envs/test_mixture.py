"""Mixtures of tasks, curricula of steps, and tasks of a user's own file."""

from __future__ import annotations

import asyncio
import collections
import sys
import types

import numpy as np
import pytest
from changes import changed
from configured import configured_task
from hypothesis import given
from hypothesis import strategies as st

from agentr1_jax.envs.base import Action, summary_rewards
from agentr1_jax.envs.mixture import MixtureTask, Stage, draw, limit_steps, parse_curriculum
from agentr1_jax.envs.registry import TASKS, call_directly
from agentr1_jax.errors import UserError
from agentr1_jax.tasks import make_task
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import collect
from configs import base, countdown, keydoor, whereabouts
from experiments import checks, setup

EVEN = ("countdown(weight=1)", "keydoor(weight=1)")
PARTS = {"countdown": make_task("countdown"), "keydoor": make_task("keydoor")}


def test_rows_come_by_weight_and_each_task_has_its_own_order():
    task = MixtureTask(PARTS, ("countdown(weight=3)", "keydoor(weight=1)"), seed=5)
    rows = [task.row("train", i) for i in range(400)]
    assert collections.Counter(row["task"] for row in rows) == {"countdown": 300, "keydoor": 100}
    for start in range(0, 400, 8):
        assert 5 <= sum(row["task"] == "countdown" for row in rows[start : start + 8]) <= 7
    for name, part in PARTS.items():
        own = [row for row in rows if row["task"] == name]
        assert own == [{**part.row("train", i), "task": name} for i in range(len(own))]
    assert task.row("eval/keydoor", 3) == {**PARTS["keydoor"].row("eval", 3), "task": "keydoor"}
    for split, index in (("eval/chess", 0), ("train", -1)):
        with pytest.raises(ValueError, match="mixture has no"):
            task.row(split, index)
    assert task.size("train") is None and set(task.reward_parts) >= {"answer", "goal"}
    assert MixtureTask(PARTS, ("countdown(weight=1)", "keydoor(weight=0)")).row("train", 9)["task"] == "countdown"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=5), st.integers(0, 2**32))
def test_draws_by_any_shares(sizes, seed):
    total = sum(sizes)
    shares = [size / total for size in sizes]
    offsets = np.random.default_rng(seed).uniform(0.1, 0.9, len(sizes)).tolist()
    counts = [0] * len(sizes)
    for index in range(min(total, 150)):
        k, number = draw(shares, offsets, index)
        assert number == counts[k]
        counts[k] += 1
        assert all(abs(n - share * (index + 1)) < len(sizes) for n, share in zip(counts, shares, strict=True))
    if total <= 150:
        assert counts == sizes
    k, number = draw(shares, offsets, 10**8)
    assert abs(number - shares[k] * 10**8) < len(sizes) + 1


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (("a", "b(weight=1)"), r"task.mixture: 'a': write name\(weight=2\)"),
        (("a(weight=-1)", "b(weight=1)"), "with a weight of 0 or more"),
        (("a(weight=nan)", "b(weight=1)"), "with a weight of 0 or more"),
        (("a(weight=1)", "a(weight=2)"), "task.mixture names 'a' twice"),
        (("a(weight=0)", "b(weight=0)"), "the weights of task.mixture are all 0"),
        (("a(weight=1)",), "gives weights of a; its tasks are a, b"),
    ],
)
def test_wrong_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        MixtureTask({"a": PARTS["countdown"], "b": PARTS["keydoor"]}, weights)


def test_an_environment_is_of_the_task_of_its_row():
    task = MixtureTask(PARTS, EVEN)
    env = task.env()
    for i in range(6):
        row = task.row("train", i)
        own, expert = PARTS[row["task"]].env(), task.expert(row, 3)
        text = expert(None)
        assert text == PARTS[row["task"]].expert(row, 3)(None)

        async def first(env, row=row, text=text):
            return await env.reset(row, 1), await env.step(Action(np.zeros(0, np.int32), text)), env.truncate()

        assert asyncio.run(first(env)) == asyncio.run(first(own))
    texts = task.texts(500)
    assert len(texts) == 500 and set(PARTS["keydoor"].texts(50)) <= set(texts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task__mixture": ()}, "task.mixture is empty; write e.g."),
        ({"task__mixture": ("countdown(weight=1)", "chess(weight=1)")}, "unknown task 'chess'; choose one of bfcl"),
        ({"task__name": "countdown"}, "which only task 'mixture' reads, and task.name is 'countdown'"),
        ({"warm_start__practice": 0.5}, "mixture has no split 'practice'"),
    ],
)
def test_wrong_mixtures_are_refused(changes, message):
    config = {"task__name": "mixture", "task__mixture": EVEN, "budget__max_steps": 7}
    with pytest.raises(UserError, match=message):
        configured_task(changed(countdown, **(config | changes)))


def test_a_config_makes_a_mixture():
    config = countdown.get_config()
    base.set_task(config, "countdown", "keydoor")
    config = changed(
        config,
        task__mixture=EVEN,
        task__keydoor__rooms=3,
        task__keydoor__rewards__goal=2.0,
        budget__max_steps=7,
    )
    task = configured_task(config)
    assert {task.row("train", i)["task"] for i in range(4)} == {"countdown", "keydoor"}
    assert len(task.row("train/keydoor", 0)["rooms"]) == 5 and task.name == "mixture"


@pytest.mark.parametrize("first", ["keydoor", "countdown"])
def test_all_tasks_of_a_mixture_are_checked(first):
    """Whichever the first row is of."""
    mixed = {"task__name": "mixture", "task__mixture": EVEN, "budget__max_steps": 7}
    for seed in range(9):
        config = changed(countdown, seed=seed, shaping__potential=0.5, **mixed)
        settings = setup.read_settings(config)
        task = setup.make_task(settings, ToolMetrics(), call_directly)
        if task.row("train", 0)["task"] == first:
            break
    with pytest.raises(UserError, match="observations of task 'countdown' have no potential"):
        checks.check_task(settings, task)


def test_a_task_with_names_of_its_own_is_no_mixture():
    config = changed(countdown)
    task = configured_task(config)
    object.__setattr__(task, "names", ["Ann", "Bob"])
    checks.check_task(setup.read_settings(config), task)


def test_summaries_are_judged_by_the_task_of_their_row():
    both = {"whereabouts": make_task("whereabouts"), "keydoor": make_task("keydoor")}
    task = MixtureTask(both, ("whereabouts(weight=1)", "keydoor(weight=1)"))

    async def judge(split):
        env, row = task.env(), task.row(split, 0)
        await env.reset(row, 0)
        facts = row["reports"][0] if "reports" in row else {}
        await env.step(Action(np.zeros(0, np.int32), "go on"))
        return summary_rewards(env, ", ".join(f"{who} {place}" for who, place in facts.items()))

    assert asyncio.run(judge("train/whereabouts")) == {"summary": 0.2} and asyncio.run(judge("train/keydoor")) == {}


def test_experts_that_cannot_sum_up_are_not_imitated_where_they_would_have_to():
    mixed = {
        "task__name": "mixture",
        "task__mixture": ("countdown(weight=1)", "whereabouts(weight=1)"),
        "budget__max_steps": 11,
    }
    for changes in ({"budget__max_steps": 7}, mixed):
        config = changed(countdown, **{"context__rule": "summary(turns=2)", **changes})
        with pytest.raises(UserError, match=r"the expert of task '\w+' writes none to imitate; choose another context"):
            configured_task(config)
    config.warm_start.updates = 0
    configured_task(config)
    config = whereabouts.get_config()
    configured_task(config)


GUESS = """
from pydantic.dataclasses import dataclass
from agentr1_jax.envs.registry import register
from agentr1_jax.tasks import make_task
from agentr1_jax.validation import STRICT, Count

@dataclass(frozen=True, config=STRICT)
class Mine:
    rooms: Count = 2

@register("mine", Mine)
def mine(config, run):
    return make_task("keydoor", rooms=config.rooms)
"""


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Writes a file of tasks; the registry is as before afterwards."""
    for attribute in ("_entries", "_files"):
        monkeypatch.setattr(TASKS, attribute, dict(getattr(TASKS, attribute)))

    def write(text, **args):
        (tmp_path / "mine.py").write_text(text)
        config = changed(base.get_config(), task__file=str(tmp_path / "mine.py"), task__name="mine")
        with config.unlocked():
            config.warm_start.updates, config.policy.preset = 0, "tiny"
            config.task.args.update(args)
        return config

    return write


def test_a_task_of_ones_own_comes_from_a_file(own):
    config = own(GUESS, rooms=3)
    assert len(configured_task(config).row("train", 0)["rooms"]) == 5
    with config.unlocked():
        config.task.args.chairs = 4
    with pytest.raises(UserError, match=r"unknown key 'task\.args\.chairs'"):
        configured_task(config)


def test_a_file_of_tasks_that_registers_none_is_refused(own):
    with pytest.raises(UserError, match=r"task\.file: .*mine\.py registers no task; decorate one with @register"):
        configured_task(own("x = 1"))


def test_arguments_are_of_tasks_of_ones_own_alone():
    config = changed(keydoor)
    with config.unlocked():
        config.task.args.rooms = 3
    with pytest.raises(UserError, match="task.args has rooms, which only a task of task.file with keys reads"):
        configured_task(config)


@given(st.integers(0, 500), st.integers(1, 9))
def test_a_curriculum_allows_steps_by_the_batch_of_a_row(visit, groups):
    found = [Stage(0, 2), Stage(3, 4), Stage(10, 7)]
    batch = visit // groups
    allowed = 2 if batch < 3 else 4 if batch < 10 else 7
    assert limit_steps({"id": "r"}, found, visit, groups) == {"id": "r", "max_steps": allowed}
    assert limit_steps({"id": "r"}, [], visit, groups) == {"id": "r"}
    assert limit_steps({"max_steps": 1}, found, visit, groups) == {"max_steps": 1}


def test_training_rows_alone_have_a_curriculum():
    config = changed(keydoor, task__curriculum=("max_steps(3)", "max_steps(7, update=2)"), rollout__groups=8)
    parts = types.SimpleNamespace(settings=setup.read_settings(config), task=PARTS["keydoor"])
    assert [collect.task_row(parts, "train", prompt)["max_steps"] for prompt in (0, 15, 16, 99)] == [3, 3, 7, 7]
    assert collect.task_row(parts, "eval", 0) == PARTS["keydoor"].row("eval", 0)


@pytest.mark.parametrize("row", [lambda *_: None, lambda *_: {"max_steps": "two"}, lambda *_: sys.exit()])
def test_a_row_that_is_none_is_the_failure_of_its_episodes(row):
    config = changed(keydoor, task__curriculum=("max_steps(3)",))
    parts = types.SimpleNamespace(settings=setup.read_settings(config), task=types.SimpleNamespace(row=row))
    assert isinstance(collect.task_row(parts, "train", 0), TypeError | SystemExit)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("3",), "cannot read '3'"),
        (("max_steps(3, update=5)",), "the first stage begins at update 0"),
        (("max_steps(3)", "max_steps(4, update=9)", "max_steps(5, update=5)"), "others after the one before"),
        (("max_steps(0)",), "allows 0 steps"),
        (("max_steps(8)",), "allows 8 steps; budget.max_steps is 7"),
    ],
)
def test_wrong_curricula_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        parse_curriculum(entries, 7)

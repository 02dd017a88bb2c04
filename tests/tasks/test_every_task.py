"""What every registered task must do: those of the core here, those of contrib in its lane."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import math
import typing

import numpy as np
import pytest

from agentr1_jax.contrib import TASK_MODULES as CONTRIB
from agentr1_jax.envs.base import Action, Env, Task, has_expert, has_texts
from agentr1_jax.envs.registry import TaskContext
from agentr1_jax.errors import UserError
from agentr1_jax.tasks import TASK_MODULES as CORE
from agentr1_jax.trajectory import POLICIES
from agentr1_jax.validation import from_section, to_section
from configs import base

NAMES = [*CORE, *(pytest.param(name, marks=pytest.mark.contrib) for name in CONTRIB)]
KEYS = {
    "multihop": {"corpus": "mini"},
    "gymnasium": {"id": "FrozenLake-v1", "actions": ("left", "down", "right", "up")},
}
WITH_DATA = ("multihop", "gsm8k", "bfcl")
ELSEWHERE = {"http": "tests/contrib/test_http_env.py", "verifiers": "tests/contrib/test_verifiers_env.py"}
STEPS = 24
NONSENSE = {int: (-1, 1.5, "3", None), float: (math.nan, math.inf, "x", None), bool: (1, "yes"), str: (3, None)}


@pytest.fixture(scope="module", params=NAMES)
def task(request, data_dir) -> Task:
    name = request.param
    if name in ELSEWHERE:
        pytest.skip(f"needs a server or a file; see {ELSEWHERE[name]}")
    if name == "gymnasium" and importlib.util.find_spec("gymnasium") is None:
        pytest.skip("gymnasium is not installed")
    folder = str(data_dir) if name in WITH_DATA else ""
    return base.find_task(name).make_from(KEYS.get(name, {}), TaskContext(data_dir=folder), name)


def play(task: Task, split: str, index: int, responses: typing.Iterator[str] | None = None) -> tuple[Env, list]:
    """The environment and all it returned in an episode with given responses, those of the expert without any."""

    async def run() -> tuple[Env, list]:
        row = task.row(split, index)
        env, respond, shown = task.env(), None if responses else task.expert(row, 3), None
        out: list = [await env.reset(row, 7)]
        for _ in range(STEPS):
            text = next(responses) if responses else respond(shown)
            out.append(await env.step(Action(np.zeros(0, np.int32), text)))
            if out[-1].outcome is not None:
                break
            shown = out[-1].observation.content
        return env, out

    return asyncio.run(run())


def test_rows_are_json_and_depend_on_split_and_index_alone(task):
    for split in ("train", "eval"):
        rows = [task.row(split, index) for index in range(20)]
        assert rows == [task.row(split, index) for index in range(20)]
        assert json.loads(json.dumps(rows)) == rows and all(isinstance(row["id"], str) for row in rows)
        size = task.size(split)
        assert size is None or size >= 1
    for split, index in (("nowhere", 0), ("train", -1)):
        with pytest.raises(ValueError, match="no row"):
            task.row(split, index)


def test_experts_play_episodes_that_end_and_are_equal_for_equal_seeds(task):
    assert has_expert(task)
    for index in range(3):
        env, first = play(task, "train", index)
        _, again = play(task, "train", index)
        assert first == again
        check_episode(task, env, first)


def test_any_text_is_an_action(task):
    for index, text in enumerate(("", "\x00", "</tool_call>{", "the quick brown fox", "<answer>1</answer>")):
        env, out = play(task, "eval", index, responses=iter([text] * STEPS))
        check_episode(task, env, out)


def check_episode(task: Task, env: Env, out: list) -> None:
    """Rewards are the sum of named parts, an outcome is in the table of policies, metrics are numbers."""
    opening, *transitions = out
    assert opening.messages and opening.state_key
    for transition in transitions[:-1]:
        assert transition.outcome is None and not transition.terminated and not transition.truncated
        assert transition.observation is not None and not transition.metrics
    for transition in transitions:
        assert set(transition.reward_parts) <= set(task.reward_parts)
        assert transition.reward == pytest.approx(sum(transition.reward_parts.values()))
    last = transitions[-1]
    if last.outcome is not None:
        assert last.outcome in POLICIES and (last.terminated or last.truncated)
    metrics = last.metrics or env.truncate()
    assert "em" in metrics and all(math.isfinite(value) for value in metrics.values())


def test_texts_are_samples_of_the_task(task):
    assert has_texts(task)
    texts = task.texts(30)
    assert len(texts) == 30 and all(isinstance(text, str) and text for text in texts) and texts == task.texts(30)


@pytest.mark.parametrize("name", NAMES)
def test_keys_refuse_nonsense(name):
    """Every key has a default and a meaning, and refuses values of another type or out of range."""
    config = base.find_task(name).config
    for path, kind, field in key_types(config):
        values = [v for v in NONSENSE.get(kind, (object(),)) if not (kind is float and isinstance(v, int))]
        if typing.get_origin(kind) is typing.Literal:
            values = ["nonsense", 3]
        refused = 0
        for value in values:
            section = {**to_section(config), **KEYS.get(name, {})}
            place = section
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = value
            try:
                from_section(config, f"task.{name}", section)
            except UserError as error:
                assert f"task.{name}" in str(error)
                refused += 1
        assert refused >= len(values) - (kind is int and -1 in values and not field.metadata), path


def key_types(config, prefix=()):
    """Path, type and pydantic's record of every key of a config class."""
    for name, field in config.__pydantic_fields__.items():
        if dataclasses.is_dataclass(field.annotation):
            yield from key_types(field.annotation, (*prefix, name))
        else:
            assert field.annotation is not None and not field.is_required()
            yield (*prefix, name), field.annotation, field


def test_a_config_has_the_keys_of_its_tasks_alone():
    one, both = base.get_config("keydoor"), base.get_config("keydoor", "countdown")
    assert base.task_names(one.task) == ["keydoor"] and one.task.name == "keydoor"
    assert base.task_names(both.task) == ["countdown", "keydoor"] and both.task.name == "mixture"
    base.set_task(both, "hopworld")
    assert base.task_names(both.task) == ["hopworld"] and not base.task_names(base.get_config().task)
    with pytest.raises(ValueError, match="unknown task 'chess'; choose one of bfcl, countdown"):
        base.get_config("chess")
    with pytest.raises(AttributeError):
        one.task.countdown.numbers = 3

"""Every key of a config has a type and a range: a mutated value is read, or refused by name, and never crashes."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Annotated, Any

import pytest

from agentr1_jax.errors import UserError
from agentr1_jax.runtime.config import flatten
from agentr1_jax.train.settings import Settings
from configs import base, quickstart
from experiments.setup import read_settings

TASKS = sorted(base.TASK_MODULES)
MUTATIONS: tuple[Any, ...] = (
    -1,
    0,
    1,
    2**40,
    -1.0,
    0.0,
    0.5,
    1.5,
    1e30,
    math.nan,
    math.inf,
    "",
    "nonsense",
    True,
    None,
)
REQUIRED = {
    "gymnasium": {"id": "CartPole-v1"},
    "http": {"url": "http://localhost:8100"},
    "verifiers": {"source": "env"},
}
"""Keys without which a task cannot run."""
LISTS: tuple[Any, ...] = ((), ("nonsense(",), (-1,), ("a", "b"), (0, 0), [3.5])


def mutate(config: Any, key: str, value: Any) -> Any:
    """The config with another value of one key, whatever its type."""
    config = config.copy_and_resolve_references()
    *sections, name = key.split(".")
    section = config
    for part in sections:
        section = section[part]
    with config.unlocked(), section.ignore_type():
        section[name] = value
    return config


def leaves(config: Any) -> list[str]:
    return [key for key, _ in flatten(config.to_dict())]


@pytest.mark.parametrize("key", leaves(quickstart.get_config()))
def test_a_mutated_key_is_read_or_refused_by_name(key):
    config = quickstart.get_config()
    for value in (*MUTATIONS, *LISTS):
        try:
            settings = read_settings(mutate(config, key, value))
        except UserError as error:
            assert key.rpartition(".")[2] in str(error), (value, str(error))
        else:
            assert isinstance(settings, Settings), value


@pytest.mark.contrib
@pytest.mark.parametrize("task", TASKS)
def test_mutated_keys_of_a_task_are_read_or_refused_by_name(task):
    config = base.get_config(task)
    config.policy.preset, config.credit.name = "tiny", "reinforce"
    if task in config.task:
        config.task[task].update(REQUIRED.get(task, {}))
    for key in leaves(config.task[task]) if task in config.task else ():
        for value in (*MUTATIONS, *LISTS):
            try:
                read_settings(mutate(config, f"task.{task}.{key}", value))
            except UserError as error:
                assert key.split(".")[0] in str(error), (key, value, str(error))


def numbers_without_range(hint: Any, *, ranged: bool = False) -> bool:
    """Whether a type has a number that may be anything."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return numbers_without_range(typing.get_args(hint)[0], ranged=True)
    if origin in (typing.Union, types.UnionType, tuple):
        return any(numbers_without_range(part, ranged=ranged) for part in typing.get_args(hint))
    return hint in (int, float) and not ranged


def settings_classes(cls: type, seen: set[type]) -> set[type]:
    """All dataclasses of settings below one."""
    for hint in typing.get_type_hints(cls).values():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part) and part not in seen and part.__name__.endswith(("Config", "Budget")):
                settings_classes(part, seen | {part})
                seen.add(part)
    return seen


def test_every_number_has_a_range():
    entries = [base.find_task(name).config for name in TASKS]
    classes = settings_classes(Settings, {entry for entry in entries if entry})
    assert len(classes) > 25
    open_ended = [
        f"{cls.__name__}.{name}"
        for cls in classes
        for name, hint in typing.get_type_hints(cls, include_extras=True).items()
        if numbers_without_range(hint)
    ]
    assert not open_ended


def test_nonsense_that_once_trained_is_refused():
    negative = ("optimizer.lr", "optimizer.eps", "optimizer.max_grad_norm", "policy.norm_eps", "warm_start.lr")
    negative += ("warm_start.control_seconds", "correction.cap", "updates", "seed")
    zero = ("policy.rope_theta", "policy.heads", "warm_start.demonstrations", "checkpoint.every", "checkpoint.keep")
    zero += ("rollout.groups", "rollout.samples", "learner.minibatches", "learner.epochs", "loss.fixed_denominator")
    values = dict.fromkeys(negative, -1) | dict.fromkeys(zero, 0) | {"run_dir": "", "optimizer.b1": 1.5}
    for key, value in values.items():
        with pytest.raises(UserError, match=key.rpartition(".")[2]):
            read_settings(mutate(quickstart.get_config(), key, value))

"""Tasks of the core: each module registers its task and owns the dataclass of its config keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentr1_jax.envs.base import Task
from agentr1_jax.envs.registry import TaskContext, find_task

TASK_MODULES: Mapping[str, str] = {
    "countdown": "agentr1_jax.tasks.countdown",
    "frozenlake": "agentr1_jax.tasks.frozenlake",
    "gsm8k": "agentr1_jax.tasks.gsm8k",
    "hopworld": "agentr1_jax.tasks.hopworld.task",
    "keydoor": "agentr1_jax.tasks.keydoor",
    "multihop": "agentr1_jax.tasks.multihop.task",
    "whereabouts": "agentr1_jax.tasks.whereabouts",
}
"""Task name -> the module that registers it, imported when a config names the task."""


def make_task(name: str, run: TaskContext | None = None, **keys: Any) -> Task:
    """Make a task by its name, e.g. `make_task("keydoor", rooms=3)`.

    Args:
      name: task of the core, or one that is registered already.
      run: seed, data folder and limits; defaults where it is None.
      keys: keys of its section that differ from their defaults; `rewards` and other sections below it as mappings.

    Raises:
      UserError: a key is unknown, of another type or out of range.
      ValueError: no such task, or settings that it cannot be made with.
      FileNotFoundError: its data are missing.
    """
    return find_task(name, TASK_MODULES).make_from(keys, run or TaskContext(), name)

"""The registry of users' own tasks, by the name used in configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentr1_jax.envs.base import Task
from agentr1_jax.registry import Registry

Make = Callable[..., Task]
"""(wrap, **`task.args`) -> Task; `wrap` puts the run's limits around a tool."""

TASKS: Registry[Make] = Registry("task", "task.file")


def register(name: str) -> Callable[[Any], Any]:
    """Decorator that adds what makes a task, a function or a class, under `name`. Raises ValueError if it is taken."""

    def add(make: Any) -> Any:
        TASKS.add(name, make, make)
        return make

    return add

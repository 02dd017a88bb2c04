"""Registry of tasks by the name used in configs; each task brings the dataclass of its own config keys.

    @dataclass(frozen=True, config=STRICT)          # pydantic.dataclasses.dataclass
    class GuessConfig:
        most: Count = 9
        # largest secret number

    @register("guess", GuessConfig)
    def make_guess(config: GuessConfig, run: TaskContext) -> Task: ...

`configs/base.py` makes the section `task.guess` from the dataclass: name, default and meaning of every key.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from agentr1_jax.envs.base import Task
from agentr1_jax.errors import UserError
from agentr1_jax.registry import Registry
from agentr1_jax.tools.base import Tool
from agentr1_jax.validation import from_section

Make = TypeVar("Make", bound=Callable[..., Task])
T = TypeVar("T")


class Dispatch(Protocol):
    """Runs a function that uses the devices where and when no other program is enqueued; see `Dispatcher`."""

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]: ...


async def call_directly(function: Callable[[], T]) -> T:
    """Call the function at once: the `Dispatch` where nothing else uses the devices."""
    return function()


def no_tool(name: str) -> Tool:
    """Raise ValueError: the `make_tool` of a context that has no further tools."""
    raise ValueError(f"there is no tool {name!r} here")


@dataclasses.dataclass(frozen=True)
class TaskContext:
    """What a run gives every task.

    Attributes:
      seed: seed of the run; keys the order of training rows.
      data_dir: folder of real data; "" for the default of `data_folder`.
      max_steps: most steps of an episode (`budget.max_steps`); None where there is no limit.
      wrap: puts the run's limits around a tool, and measures it.
      dispatch: runs what a dense retriever does on the devices.
      make_retriever: (settings, corpus, passages per search, dispatch) -> retriever of a search task; None for BM25.
      make_tool: name -> a tool that the core does not have; raises ValueError where there is none.
    """

    seed: int = 0
    data_dir: str = ""
    max_steps: int | None = None
    wrap: Callable[[Tool], Tool] = lambda tool: tool
    dispatch: Dispatch = call_directly
    make_retriever: Callable[[Any, Any, int, Dispatch], Any] | None = None
    make_tool: Callable[[str], Tool] = no_tool

    def check_steps(self, needed: int, task: str, why: str, remedy: str) -> None:
        """Raise ValueError where `max_steps` is less than a task needs, with why it does and what else would help."""
        if self.max_steps is not None and self.max_steps < needed:
            raise ValueError(f"{task}: {why}, beyond budget.max_steps ({self.max_steps}); raise it, or {remedy}")


@dataclasses.dataclass(frozen=True)
class TaskEntry:
    """A registered task.

    Attributes:
      make: (config, context) -> the task; config is None where the task has no keys.
      config: dataclass of its keys; None where it has none.
    """

    make: Callable[[Any, TaskContext], Task]
    config: type | None = None

    def make_from(self, keys: Mapping[str, Any], run: TaskContext, section: str) -> Task:
        """Make the task from those keys that differ from their defaults, or all.

        Args:
          keys: values by name.
          run: what the run gives it.
          section: name of the section that holds the keys, for messages.

        Raises:
          UserError: a key is unknown, of another type or out of range.
        """
        if self.config is None:
            if keys:
                raise UserError(f"{section} has {', '.join(keys)}, and its task has no keys")
            return self.make(None, run)
        return self.make(from_section(self.config, section, keys), run)


TASKS: Registry[TaskEntry] = Registry("task", "task.file")


def register(name: str, config: type | None = None) -> Callable[[Make], Make]:
    """Register a function `(config, run) -> Task` under a name, as a decorator.

    Args:
      name: `task.name` of configs.
      config: frozen dataclass of the task's keys, declared as `agentr1_jax/validation.py` says, with a default for
        every field; None where the task has no keys.

    Raises:
      ValueError: the name is taken.
    """

    def add(make: Make) -> Make:
        TASKS.add(name, TaskEntry(make, config), make)
        return make

    return add


def find_task(name: str, modules: Mapping[str, str]) -> TaskEntry:
    """Return the entry of a task, after importing the module of `modules` that registers it where need be.

    Raises:
      ValueError: no such task; the message lists the names.
    """
    if name not in TASKS and name in modules:
        importlib.import_module(modules[name])
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; choose one of {', '.join(sorted({*modules, *TASKS}))}")
    return TASKS[name]

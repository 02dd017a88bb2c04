"""Several tasks as one: each row is of one of them, drawn by their weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from agentr1_jax.envs.base import (
    Action,
    Env,
    Expert,
    Observation,
    Row,
    Task,
    Transition,
    has_expert,
    has_texts,
    judged,
    sums_up,
)
from agentr1_jax.envs.shares import draw, offsets_of, parse_weights, shares_of

KEY = "task.mixture"


class MixtureTask:
    """A Task whose rows are those of other tasks, each with the name of its own as `task`.

    Among any n rows in a row a task has its share of n to within the number of tasks; which row is whose depends on
    seed, split and index alone. Splits are those that all tasks have, and `split/name` of one task by itself.

    Args:
      tasks: by their names.
      weights: `name=weight` for each; see `shares.draw`.
      seed: of their order.

    Raises:
      ValueError: a weight that cannot be read, of no task here, or of fewer than all; or all are 0.
    """

    name = "mixture"

    def __init__(self, tasks: Mapping[str, Task], weights: Sequence[str], seed: int = 0) -> None:
        given = parse_weights(weights, KEY)
        if given.keys() != tasks.keys():
            raise ValueError(f"{KEY} gives weights of {', '.join(given)}; its tasks are {', '.join(tasks)}")
        self._shares = shares_of(given, KEY)
        self._offsets = offsets_of(len(self._shares), seed)
        self._tasks = {name: tasks[name] for name in self._shares}

    @property
    def names(self) -> Sequence[str]:
        """Of its tasks."""
        return list(self._tasks)

    @property
    def expert_sums_up(self) -> bool:
        """Whether the experts of all tasks do."""
        return all(sums_up(task) for task in self._tasks.values())

    @property
    def has_expert(self) -> bool:
        """Whether all tasks have one."""
        return all(has_expert(task) for task in self._tasks.values())

    @property
    def has_texts(self) -> bool:
        """Whether all tasks have some."""
        return all(has_texts(task) for task in self._tasks.values())

    @property
    def reward_parts(self) -> Sequence[str]:
        """Those of all tasks."""
        return list(dict.fromkeys(itertools.chain(*(task.reward_parts for task in self._tasks.values()))))

    def row(self, split: str, index: int) -> Row:
        """Row `index` of a split. Raises ValueError where a task has no such row."""
        split, _, name = split.partition("/")
        if name in self._tasks:
            return self._named(name, split, index)
        if name:
            raise ValueError(f"mixture has no split {split}/{name}; its tasks are {', '.join(self._tasks)}")
        if index < 0:
            raise ValueError(f"mixture has no row {split!r} {index}; rows start at 0")
        which, number = draw(list(self._shares.values()), self._offsets, index)
        return self._named(list(self._tasks)[which], split, number)

    def size(self, split: str) -> int | None:
        """Rows of all tasks together; None if one of them is procedural."""
        split, _, name = split.partition("/")
        sizes = [task.size(split) for key, task in self._tasks.items() if name in ("", key)]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]

    def env(self) -> MixtureEnv:
        """A fresh environment, of whichever task its row is."""
        return MixtureEnv(self._tasks)

    def expert(self, row: Row, seed: int) -> Expert:
        """The expert of the row's task."""
        return self._tasks[row["task"]].expert(row, seed)

    def texts(self, count: int) -> Sequence[str]:
        """Texts of all tasks, one of each in turn."""
        each = [task.texts(-(-count // len(self._tasks))) for task in self._tasks.values()]
        mixed = itertools.chain.from_iterable(itertools.zip_longest(*each))
        return list(itertools.islice((text for text in mixed if text is not None), count))

    def _named(self, name: str, split: str, index: int) -> Row:
        return {**self._tasks[name].row(split, index), "task": name}


class MixtureEnv:
    """The environment of the task that each row names."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks
        self._env: Env | None = None

    async def reset(self, row: Row, seed: int) -> Observation:
        """Starts an episode."""
        self._env = self._tasks[row["task"]].env()
        return await self._env.reset(row, seed)

    async def step(self, action: Action) -> Transition:
        """Applies one response."""
        return await self._own().step(action)

    def summarised(self, text: str) -> Mapping[str, float]:
        """What a summary earns in the row's task."""
        return judged(self._own(), text)

    def cut(self) -> Mapping[str, float]:
        """Metrics of the episode so far."""
        return self._own().cut()

    def _own(self) -> Env:
        if self._env is None:
            raise RuntimeError("an environment must be reset before it steps")
        return self._env

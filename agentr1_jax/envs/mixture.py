"""Several tasks as one: each row is of one of them, drawn by their weights in an order fixed by the seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

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
    summary_rewards,
    writes_summaries,
)
from agentr1_jax.registry import parse_call

KEY = "task.mixture"


def parse_weights(entries: Sequence[str], key: str) -> dict[str, float]:
    """Read the weights of a mixture, written as `name(weight=2)`.

    Args:
      entries: one for each source.
      key: of the config, for messages.

    Raises:
      ValueError: a weight cannot be read or is negative, or a name comes twice.
    """
    weights: dict[str, float] = {}
    for entry in entries:
        call = parse_call(str(entry), key)
        weight = call.named.get("weight")
        if not isinstance(weight, int | float) or call.values or len(call.named) > 1 or not 0 <= weight < math.inf:
            raise ValueError(f"{key}: {entry!r}: write name(weight=2), with a weight of 0 or more")
        if call.name in weights:
            raise ValueError(f"{key} names {call.name!r} twice")
        weights[call.name] = float(weight)
    return weights


def normalise_weights(weights: Mapping[str, float], key: str) -> dict[str, float]:
    """Return the share of each source among the draws; sources of weight 0 are left out.

    Raises:
      ValueError: all weights are 0.
    """
    total = sum(weights.values())
    if not total > 0:
        raise ValueError(f"the weights of {key} are all 0; make one positive")
    return {name: weight / total for name, weight in weights.items() if weight}


def draw_offsets(count: int, seed: int) -> list[float]:
    """Return where in its turn each of `count` sources begins; see `draw`."""
    return np.random.default_rng([seed, 3]).uniform(0.1, 0.9, count).tolist()


def draw(shares: Sequence[float], offsets: Sequence[float], index: int) -> tuple[int, int]:
    """Return the source of draw `index`, and how many draws that source had before.

    The j-th row of source k is due at the time (j + oₖ) / pₖ, and draws go by these times. So among any n draws in a
    row, source k has n pₖ to within the number of sources, and after N draws exactly nₖ where pₖ = nₖ / N.

    Args:
      shares: pₖ > 0, sum 1.
      offsets: oₖ within 0 and 1.
      index: of the draw, at least 0.

    Returns:
      (k, j)
    """
    # Σₖ of what was due by a time is that time to within the number of sources, so few steps are left to go.
    start = max(index - len(shares) - 1, 0)
    counts = [max(math.floor(share * start - offset), 0) for share, offset in zip(shares, offsets, strict=True)]
    while True:
        times = [(n + offset) / share for n, offset, share in zip(counts, offsets, shares, strict=True)]
        k = int(np.argmin(times))
        if sum(counts) == index:
            return k, counts[k]
        counts[k] += 1


class MixtureTask:
    """A Task whose rows are those of other tasks, each with the name of its own as `task`.

    Among any n rows in a row a task has its share of n to within the number of tasks; which row is whose depends on
    seed, split and index alone. Splits are those that all tasks have, and `split/name` of one task by itself.

    Args:
      tasks: by their names.
      weights: `name(weight=2)` for each; see `draw`.
      seed: of their order.

    Raises:
      ValueError: a weight that cannot be read, of no task here, or of fewer than all; or all are 0.
    """

    name = "mixture"

    def __init__(self, tasks: Mapping[str, Task], weights: Sequence[str], seed: int = 0) -> None:
        by_name = parse_weights(weights, KEY)
        if by_name.keys() != tasks.keys():
            raise ValueError(f"{KEY} gives weights of {', '.join(by_name)}; its tasks are {', '.join(tasks)}")
        self._shares = normalise_weights(by_name, KEY)
        self._offsets = draw_offsets(len(self._shares), seed)
        self._tasks = {name: tasks[name] for name in self._shares}

    @property
    def names(self) -> Sequence[str]:
        """Of its tasks."""
        return list(self._tasks)

    @property
    def expert_writes_summaries(self) -> bool:
        """True if the experts of all tasks write summaries."""
        return all(writes_summaries(task) for task in self._tasks.values())

    @property
    def has_expert(self) -> bool:
        """True if all tasks have an expert."""
        return all(has_expert(task) for task in self._tasks.values())

    @property
    def has_texts(self) -> bool:
        """True if all tasks have texts."""
        return all(has_texts(task) for task in self._tasks.values())

    @property
    def reward_parts(self) -> Sequence[str]:
        """Those of all tasks."""
        return list(dict.fromkeys(itertools.chain(*(task.reward_parts for task in self._tasks.values()))))

    def row(self, split: str, index: int) -> Row:
        """Row `index` of a split. Raises ValueError where a task has no such row."""
        split, _, name = split.partition("/")
        if name in self._tasks:
            return self._tag_row(name, split, index)
        if name:
            raise ValueError(f"mixture has no split {split}/{name}; its tasks are {', '.join(self._tasks)}")
        if index < 0:
            raise ValueError(f"mixture has no row {split!r} {index}; rows start at 0")
        which, number = draw(list(self._shares.values()), self._offsets, index)
        return self._tag_row(list(self._tasks)[which], split, number)

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

    def _tag_row(self, name: str, split: str, index: int) -> Row:
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
        return await self._current().step(action)

    def judge_summary(self, text: str) -> Mapping[str, float]:
        """Return the weighted reward parts of a summary in the row's task."""
        return summary_rewards(self._current(), text)

    def truncate(self) -> Mapping[str, float]:
        """Metrics of the episode so far."""
        return self._current().truncate()

    def _current(self) -> Env:
        if self._env is None:
            raise RuntimeError("an environment must be reset before it steps")
        return self._env

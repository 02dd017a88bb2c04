"""Mixtures of tasks, and curricula of steps: the keys `task.mixture` and `task.curriculum`."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
CURRICULUM = "task.curriculum"


def parse_weights(entries: Sequence[str], key: str) -> dict[str, float]:
    """Read the weights of a mixture, written as `name(weight=2)`.

    Args:
      entries: one for each source.
      key: key of the config, for messages.

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
    """Return the offsets oₖ of `count` sources for `draw`."""
    return np.random.default_rng([seed, 3]).uniform(0.1, 0.9, count).tolist()


def draw(shares: Sequence[float], offsets: Sequence[float], index: int) -> tuple[int, int]:
    """Return the source k of draw `index`, and the number j of draws that this source had before.

    The j-th row of source k is due at the time (j + oₖ) / pₖ, and draws go by these times. So among any n draws in a
    row, source k has n pₖ to within the number of sources, and after N draws exactly nₖ where pₖ = nₖ / N.

    Args:
      shares: pₖ > 0, sum 1.
      offsets: oₖ within 0 and 1.
      index: number of the draw, from 0 on.
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
      seed: seed of their order.

    Raises:
      ValueError: a weight that cannot be read, of no task here, or of fewer than all; or all are 0.
    """

    name = "mixture"

    def __init__(self, tasks: Mapping[str, Task], weights: Sequence[str], seed: int = 0) -> None:
        by_name = parse_weights(weights, KEY)
        if by_name.keys() != tasks.keys():
            raise ValueError(f"{KEY} gives weights of {', '.join(by_name)}; its tasks are {', '.join(tasks)}")
        shares = normalise_weights(by_name, KEY)
        self.names, self._shares = list(shares), list(shares.values())
        self._offsets = draw_offsets(len(shares), seed)
        self._tasks = {name: tasks[name] for name in shares}
        each = self._tasks.values()
        self.reward_parts = list(dict.fromkeys(itertools.chain(*(task.reward_parts for task in each))))
        self.has_expert = all(map(has_expert, each))
        self.has_texts = all(map(has_texts, each))
        self.expert_writes_summaries = all(map(writes_summaries, each))

    def row(self, split: str, index: int) -> Row:
        """Return row `index` of a split. Raises ValueError where a task has no such row."""
        split, _, name = split.partition("/")
        if name and name not in self._tasks:
            raise ValueError(f"mixture has no split {split}/{name}; its tasks are {', '.join(self.names)}")
        if index < 0:
            raise ValueError(f"mixture has no row {split!r} {index}; rows start at 0")
        if not name:
            k, index = draw(self._shares, self._offsets, index)
            name = self.names[k]
        return {**self._tasks[name].row(split, index), "task": name}

    def size(self, split: str) -> int | None:
        """Return the rows of all tasks together; None if one of them is procedural."""
        split, _, name = split.partition("/")
        sizes = [task.size(split) for key, task in self._tasks.items() if name in ("", key)]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]

    def env(self) -> MixtureEnv:
        """Return a fresh environment, of the task that its row names."""
        return MixtureEnv(self._tasks)

    def expert(self, row: Row, seed: int) -> Expert:
        """Return the expert of the row's task."""
        return self._tasks[row["task"]].expert(row, seed)

    def texts(self, count: int) -> Sequence[str]:
        """Return texts of all tasks, one of each in turn."""
        each = [task.texts(-(-count // len(self._tasks))) for task in self._tasks.values()]
        mixed = itertools.chain.from_iterable(itertools.zip_longest(*each))
        return list(itertools.islice((text for text in mixed if text is not None), count))


class MixtureEnv:
    """The environment of the task that each row names."""

    _env: Env

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks

    async def reset(self, row: Row, seed: int) -> Observation:
        """Start an episode of the row's task."""
        self._env = self._tasks[row["task"]].env()
        return await self._env.reset(row, seed)

    async def step(self, action: Action) -> Transition:
        """Apply one response."""
        return await self._env.step(action)

    def judge_summary(self, text: str) -> Mapping[str, float]:
        """Return the weighted reward parts of a summary in the row's task."""
        return summary_rewards(self._env, text)

    def truncate(self) -> Mapping[str, float]:
        """Return the metrics of the episode so far."""
        return self._env.truncate()


class Stage(NamedTuple):
    """A stage of a curriculum: from the RL batch `update` on, training episodes may take `max_steps` steps.

    After ScalingInter-RL (AgentGym-RL, 2025). The stage of a row follows from its prompt index alone, so that a resumed
    run, and one whose rollouts run ahead, give the same row the same steps.
    """

    update: int
    max_steps: int


def parse_curriculum(entries: Sequence[str], max_steps: int) -> list[Stage]:
    """Read the stages of a curriculum, written as `max_steps(3)` and `max_steps(6, update=40)`.

    Args:
      entries: one for each stage; none without a curriculum.
      max_steps: limit of the budget, which no stage may exceed.

    Raises:
      ValueError: an entry cannot be read, the first does not begin at 0, one does not begin after the one before, or
        allows no step or more than `max_steps`.
    """
    stages: list[Stage] = []
    for entry in entries:
        call = parse_call(str(entry), CURRICULUM)
        update, steps = call.named.get("update", 0), call.values[0] if len(call.values) == 1 else None
        unknown = call.name != "max_steps" or not call.named.keys() <= {"update"}
        if unknown or type(update) is not int or type(steps) is not int or update < 0:
            raise ValueError(f"{CURRICULUM}: cannot read {entry!r}; write max_steps(3) or max_steps(6, update=40)")
        if not 1 <= steps <= max_steps:
            raise ValueError(f"{CURRICULUM}: {entry!r} allows {steps} steps; budget.max_steps is {max_steps}")
        if update <= stages[-1].update if stages else update != 0:
            raise ValueError(
                f"{CURRICULUM}: {entry!r}; the first stage begins at update 0, others after the one before"
            )
        stages.append(Stage(update, steps))
    return stages


def limit_steps(row: Row, stages: Sequence[Stage], index: int, groups: int) -> Row:
    """Return a training row with the steps that its stage allows, as `max_steps`.

    Args:
      row: row of the task.
      stages: see `parse_curriculum`.
      index: prompt index of the row.
      groups: rows of a batch; where groups are refilled, batches take more, and stages begin the sooner.
    """
    if not stages:
        return row
    allowed = stages[bisect.bisect_right(stages, index // groups, key=lambda stage: stage.update) - 1].max_steps
    return {**row, "max_steps": min(allowed, row.get("max_steps", allowed))}

"""Curricula: how many steps a training episode may take, growing over the run (ScalingInter-RL, AgentGym-RL, 2025).

A stage begins with an RL batch. The stage of a row follows from its prompt index alone, so that a resumed run, and one
whose rollouts run ahead, give the same row the same steps.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from agentr1_jax.envs.base import Row
from agentr1_jax.registry import parse_call

KEY = "task.curriculum"


class Stage(NamedTuple):
    """A stage of a curriculum.

    Attributes:
      update: RL batch that it begins with.
      max_steps: steps that its episodes may take.
    """

    update: int
    max_steps: int


def parse_curriculum(entries: Sequence[str], max_steps: int) -> list[Stage]:
    """Read the stages of a curriculum, written as `max_steps(3)` and `max_steps(6, update=40)`.

    Args:
      entries: one for each stage; none without a curriculum.
      max_steps: of the budget; no stage may allow more.

    Raises:
      ValueError: an entry cannot be read, the first does not begin at 0, one does not begin after the one before, or
        allows no step or more than `max_steps`.
    """
    stages: list[Stage] = []
    for entry in entries:
        call = parse_call(str(entry), KEY)
        update, steps = call.named.get("update", 0), call.values[0] if len(call.values) == 1 else None
        unknown = call.name != "max_steps" or not call.named.keys() <= {"update"}
        if unknown or type(update) is not int or type(steps) is not int or update < 0:
            raise ValueError(f"{KEY}: cannot read {entry!r}; write max_steps(3) or max_steps(6, update=40)")
        stage = Stage(update, steps)
        if not 1 <= stage.max_steps <= max_steps:
            raise ValueError(f"{KEY}: {entry!r} allows {stage.max_steps} steps; budget.max_steps is {max_steps}")
        if stage.update <= stages[-1].update if stages else stage.update != 0:
            raise ValueError(f"{KEY}: {entry!r}; the first stage begins at update 0, others after the one before")
        stages.append(stage)
    return stages


def limit_steps(row: Row, stages: Sequence[Stage], index: int, groups: int) -> Row:
    """Return a training row with the steps that its stage allows, as `max_steps`.

    Args:
      row: of the task.
      stages: see `parse_curriculum`.
      index: prompt index of the row.
      groups: rows of a batch; where groups are refilled, batches take more, and stages begin the sooner.
    """
    if not stages:
        return row
    allowed = stages[bisect.bisect_right(stages, index // groups, key=lambda stage: stage.update) - 1].max_steps
    return {**row, "max_steps": min(allowed, row.get("max_steps", allowed))}

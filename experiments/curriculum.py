"""Curricula: how many steps a training episode may take, growing over the run (ScalingInter-RL, AgentGym-RL, 2025).

A stage begins with an RL batch. Which stage a row belongs to follows from its running index alone, so that a resumed
run, and one whose rollouts run ahead, give the same row the same steps.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence

import ml_collections

from agentr1_jax.envs.base import Row
from agentr1_jax.errors import UserError


def stages(config: ml_collections.ConfigDict) -> list[tuple[int, int]]:
    """The stages of `task.curriculum`: from which RL batch on, and how many steps; none without a curriculum.

    Raises:
      UserError: an entry cannot be read, the first does not begin at 0, one does not begin after the one before, or
        allows no step or more than `budget.max_steps`.
    """
    entries, most = config.task.curriculum, config.budget.max_steps
    out: list[tuple[int, int]] = []
    for entry in entries:
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", str(entry))
        if not match:
            raise UserError(f"task.curriculum: {entry!r} is not 'batch:steps', e.g. '40:6'")
        first, steps = int(match[1]), int(match[2])
        if not 1 <= steps <= most:
            raise UserError(f"task.curriculum: {entry!r} allows {steps} steps; budget.max_steps is {most}")
        if first <= out[-1][0] if out else first != 0:
            raise UserError(f"task.curriculum: {entry!r}; the first stage begins at batch 0, others after that before")
        out.append((first, steps))
    return out


def limited(row: Row, found: Sequence[tuple[int, int]], visit: int, groups: int) -> Row:
    """A training row with the steps that its stage allows, as `max_steps`.

    Args:
      row: of the task.
      found: the stages.
      visit: the row's running index.
      groups: rows of a batch; where groups are refilled, batches take more, and stages begin the sooner.
    """
    if not found:
        return row
    allowed = found[bisect.bisect_right(found, visit // groups, key=lambda stage: stage[0]) - 1][1]
    return {**row, "max_steps": min(allowed, row.get("max_steps", allowed))}

"""From config to the task of a run."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection

import ml_collections

from agentr1_jax.envs import qa
from agentr1_jax.envs.base import Task
from agentr1_jax.envs.frozenlake import frozenlake_task
from agentr1_jax.envs.hopworld.task import HopWorldTask
from agentr1_jax.envs.keydoor import keydoor_task
from agentr1_jax.envs.multihop import MultihopTask, data_folder
from agentr1_jax.envs.tabular_task import REWARD_PARTS
from agentr1_jax.runtime.errors import UserError
from agentr1_jax.tools.limits import ToolLimits, wrapped
from agentr1_jax.tools.meter import Meter
from configs import base


def make_task(config: ml_collections.ConfigDict, meter: Meter | None = None) -> Task:
    """The task that `config.task` names; `meter` counts what its tools do."""
    c = config.task
    try:
        wrap = functools.partial(wrapped, limits=ToolLimits(**config.tools.to_dict()), meter=meter or Meter())
        if c.name == "hopworld":
            return HopWorldTask(
                top_k=c.top_k,
                questions_per_world=c.questions_per_world,
                flaws=c.flaws.to_dict(),
                reward_weights=_reward_weights(config, qa.PARTS),
                wrap=wrap,
            )
        if c.name == "multihop":
            return MultihopTask(
                data_dir=c.data_dir,
                datasets=c.datasets,
                corpus=c.corpus,
                top_k=c.top_k,
                reward_weights=_reward_weights(config, qa.PARTS),
                seed=config.seed,
                wrap=wrap,
            )
        if c.name in ("keydoor", "frozenlake") and config.warm_start.practice:
            raise UserError(f"{c.name} has no split 'practice'; set warm_start.practice=0")
        if c.name == "keydoor":
            steps = c.rooms + 2
            if config.budget.max_steps < steps:
                raise UserError(
                    f"keydoor: its door is {steps} steps away (task.rooms + 2), beyond budget.max_steps "
                    f"({config.budget.max_steps}); raise it, or lower task.rooms"
                )
            weights = _reward_weights(config, REWARD_PARTS)
            return keydoor_task(
                rooms=c.rooms, key_count=c.key_count, noise=c.noise, mistakes=c.mistakes, reward_weights=weights
            )
        if c.name == "frozenlake":
            weights = _reward_weights(config, REWARD_PARTS)
            return frozenlake_task(size=c.size, holes=c.holes, slip=c.slip, mistakes=c.mistakes, reward_weights=weights)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error
    raise UserError(f"unknown task.name {c.name!r}; choose 'hopworld', 'multihop', 'keydoor' or 'frozenlake'")


def _reward_weights(config: ml_collections.ConfigDict, parts: Collection[str]) -> dict[str, float]:
    """Weights of a task's reward parts. Raises UserError where a part is weighted that the task does not have."""
    given, default = config.task.rewards.to_dict(), base.get_config().task.rewards.to_dict()
    for name, weight in given.items():
        if name not in parts and weight != default[name]:
            raise UserError(
                f"task.rewards.{name} is {weight}, but task {config.task.name!r} has no such reward part; it has "
                f"{', '.join(parts)}"
            )
    return {name: weight for name, weight in given.items() if name in parts}


def data_folder_of(config: ml_collections.ConfigDict) -> os.PathLike[str]:
    """The folder of real data. Raises UserError where there is none."""
    try:
        return data_folder(config.task.data_dir)
    except FileNotFoundError as error:
        raise UserError(str(error)) from error

"""Tasks as a config makes them."""

from __future__ import annotations

import ml_collections

from agentr1_jax.envs.base import Task
from agentr1_jax.envs.registry import call_directly
from agentr1_jax.tools.wrappers import ToolMetrics
from experiments import checks, setup


def configured_task(config: ml_collections.ConfigDict) -> Task:
    """Make the task of a config and check it against the other keys, as a run does."""
    settings = setup.read_settings(config)
    task = setup.make_task(settings, ToolMetrics(), call_directly)
    checks.check_task(settings, task)
    return task

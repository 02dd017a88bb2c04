"""From config to the task of a run."""

from __future__ import annotations

import functools
import importlib
import os

import ml_collections

from agentr1_jax import contrib
from agentr1_jax.envs.base import Task, has_expert, has_texts
from agentr1_jax.envs.datasets import data_folder
from agentr1_jax.envs.mixture import MixtureTask, parse_weights
from agentr1_jax.envs.registry import TASKS, Dispatch, TaskContext, call_directly
from agentr1_jax.errors import UserError
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.validation import from_section, to_section
from configs import base
from experiments import retrieval


def make_task(
    config: ml_collections.ConfigDict, tool_metrics: ToolMetrics | None = None, dispatch: Dispatch = call_directly
) -> Task:
    """Make the task that `config.task` names.

    Args:
      config: of the run.
      tool_metrics: metrics of its tools.
      dispatch: runs what a dense retriever does on the devices; see `retrieval.LateDispatch`.

    Raises:
      UserError: keys that make no sense, alone or together, or data that are missing or damaged.
    """
    c, limits = config.task, from_section(ToolsConfig, "tools", config.tools.to_dict())
    try:
        if c.file:
            TASKS.load(c.file)
        names = _task_names(c)
        context = TaskContext(
            seed=config.seed,
            data_dir=c.data_dir,
            max_steps=config.budget.max_steps,
            wrap=functools.partial(wrap_tool, config=limits, metrics=tool_metrics or ToolMetrics()),
            dispatch=dispatch,
            make_retriever=retrieval.make_retriever,
            make_tool=_make_tool,
        )
        tasks = {name: _make(c, name, context) for name in names}
        task: Task = MixtureTask(tasks, c.mixture, config.seed) if c.name == base.MIXTURE else tasks[c.name]
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    _check_expert(config, task)
    return task


def _task_names(c: ml_collections.ConfigDict) -> list[str]:
    """Names of the tasks that are to run, one or those of a mixture; no other task has keys that differ from defaults.

    Raises:
      ValueError: an unknown task, or a mixture that cannot be read.
      UserError: keys of something that is not run.
    """
    weights = parse_weights(c.mixture, "task.mixture")
    if c.name == base.MIXTURE and not weights:
        raise UserError(
            "task.name is mixture, and task.mixture is empty; write e.g. ('hopworld(weight=2)', 'keydoor(weight=1)')"
        )
    if c.name != base.MIXTURE and weights:
        raise UserError(f"task.mixture is {c.mixture!r}, which only task 'mixture' reads, and task.name is {c.name!r}")
    names = list(weights) if c.name == base.MIXTURE else [c.name]
    entries = {name: base.find_task(name) for name in names}
    for name in base.task_names(c):
        default = base.find_task(name).config
        if name not in entries and (default is None or c[name].to_dict() != to_section(default)):
            raise UserError(
                f"task.{name} has keys of a task that is not run; the tasks are {', '.join(names)}: change the task of "
                f"a config by base.set_task(c, {', '.join(map(repr, names))})"
            )
    if c.args and all(name in base.TASK_MODULES for name in names):
        raise UserError(f"task.args has {', '.join(c.args)}, which only a task of task.file reads")
    return names


def _make(c: ml_collections.ConfigDict, name: str, context: TaskContext) -> Task:
    """Make one task from its section, from its defaults, or from `task.args` where it is of `task.file`."""
    if name in base.TASK_MODULES:
        return base.find_task(name).make_from(c[name].to_dict() if name in c else {}, context, f"task.{name}")
    return base.find_task(name).make_from(c.args.to_dict(), context, "task.args")


def _make_tool(name: str) -> Tool:
    """Make a tool of contrib by its name."""
    if name not in contrib.TOOLS:
        raise ValueError(f"unknown tool {name!r}; choose one of {', '.join(contrib.TOOLS)}")
    module, _, attribute = contrib.TOOLS[name].partition(":")
    tool: Tool = getattr(importlib.import_module(module), attribute)()
    return tool


def _check_expert(config: ml_collections.ConfigDict, task: Task) -> None:
    """Refuse a warm start of a task without experts, without texts, or without the split `practice` that it needs."""
    c = config.warm_start
    if not c.run and not has_expert(task) and (config.warm_start.updates or config.control):
        raise UserError(
            f"task {task.name!r} has no expert to imitate, and warm_start.updates is {config.warm_start.updates} "
            f"(control: {config.control}); set warm_start.updates=0, or name a run in warm_start.init_from"
        )
    if not c.run and not has_texts(task) and (not config.tokenizer.path or config.pretrain.updates):
        raise UserError(
            f"task {task.name!r} has no texts to train a tokenizer or to pretrain on; set tokenizer.path and "
            "pretrain.updates=0, or name a run in warm_start.init_from"
        )
    if not config.warm_start.updates or c.run or not c.practice:
        return
    try:
        task.row("practice", 0)
    except ValueError as error:
        raise UserError(f"{task.name} has no split 'practice'; set warm_start.practice=0 ({error})") from error


def data_folder_of(config: ml_collections.ConfigDict) -> os.PathLike[str]:
    """The folder of real data. Raises UserError where there is none."""
    try:
        return data_folder(config.task.data_dir)
    except FileNotFoundError as error:
        raise UserError(str(error)) from error

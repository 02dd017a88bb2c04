"""From config to the task of a run."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator

import ml_collections

from agentr1_jax.envs import qa
from agentr1_jax.envs.base import Task
from agentr1_jax.envs.frozenlake import frozenlake_task
from agentr1_jax.envs.hopworld.task import HopWorldTask
from agentr1_jax.envs.keydoor import keydoor_task
from agentr1_jax.envs.multihop import Files, MultihopTask, data_folder
from agentr1_jax.envs.tabular_task import REWARD_PARTS
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.errors import UserError
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.limits import ToolLimits, wrapped
from agentr1_jax.tools.meter import Meter
from agentr1_jax.tools.replay import Recording, Replay
from agentr1_jax.tools.search.dense import Dispatch, at_once
from configs import base
from experiments import retrieval

MULTIHOP_KEYS = (
    *("retriever", "datasets", "eval_datasets", "corpus", "files", "mixture", "held_out", "held_out_datasets"),
    *("instruction", "passage_characters", "reward", "reward_functions"),
)


def make_task(config: ml_collections.ConfigDict, meter: Meter | None = None, dispatch: Dispatch = at_once) -> Task:
    """The task that `config.task` names.

    Args:
      config: of the run.
      meter: counts what its tools do.
      dispatch: runs what a dense retriever does on the devices; see `retrieval.LateDispatch`.

    Raises:
      UserError: keys that make no sense, alone or together, or data that are missing or damaged.
    """
    c = config.task
    _check_keys(config)
    try:
        limits = config.tools.to_dict()
        limits.pop("lenient")  # Of the agent: it reads calls.
        tape = _tape(limits.pop("record"), limits.pop("replay"))
        wrap = functools.partial(wrapped, limits=ToolLimits(**limits), meter=meter or Meter(), tape=tape)
        if c.name == "hopworld":
            return HopWorldTask(
                top_k=c.top_k,
                questions_per_world=c.questions_per_world,
                flaws=c.flaws.to_dict(),
                reward_weights=_reward_weights(config, qa.PARTS),
                wrap=wrap,
            )
        if c.name == "multihop":
            return _multihop(config, wrap, dispatch)
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
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    raise UserError(f"unknown task.name {c.name!r}; choose 'hopworld', 'multihop', 'keydoor' or 'frozenlake'")


def _multihop(config: ml_collections.ConfigDict, wrap: Callable[[Tool], Tool], dispatch: Dispatch) -> MultihopTask:
    """The task of real questions. Raises UserError, or what `MultihopTask` raises."""
    c, default = config.task, base.get_config().task
    if config.warm_start_updates and not config.warm_start.run and config.warm_start.practice:
        raise UserError("multihop has no split 'practice'; set warm_start.practice=0")
    for split, key in (("train", "datasets"), ("eval", "eval_datasets")):
        if c.files[split] and c[key] != default[key]:
            raise UserError(
                f"task.files.{split} names the files that are read, whatever their data sets are, and task.{key} is "
                f"{c[key]}; leave one of them out"
            )
    retrieval.check_retriever(config)
    weights = _reward_weights(config, qa.PARTS)
    if c.reward != "weighted":
        changed = [name for name, weight in weights.items() if weight not in (0, default.rewards[name])]
        if changed:
            raise UserError(f"task.reward {c.reward!r} has fixed weights; leave out task.rewards.{changed[0]}")
    task = MultihopTask(
        data_dir=c.data_dir,
        datasets=c.datasets,
        eval_datasets=c.eval_datasets or None,
        corpus=c.corpus,
        files=Files(*(tuple(_paths(config, c.files[key])) for key in ("train", "eval", "corpus"))),
        mixture=c.mixture,
        held_out=c.held_out,
        held_out_datasets=c.held_out_datasets,
        instruction=c.instruction,
        top_k=c.top_k,
        passage_characters=c.passage_characters,
        retriever_factory=functools.partial(retrieval.make_retriever, config, dispatch=dispatch),
        reward_weights=weights if c.reward == "weighted" else None,
        reward=c.reward,
        reward_functions=c.reward_functions,
        seed=config.seed,
        wrap=wrap,
    )
    if not task.corpus and c.retriever.kind != "http":
        raise UserError(
            f"the question files bring no passages, and task.retriever.kind {c.retriever.kind!r} has to search some; "
            "name a corpus in task.files.corpus"
        )
    return task


def _paths(config: ml_collections.ConfigDict, paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        path = os.path.expanduser(path)
        yield path.replace("{data}", os.fspath(data_folder(config.task.data_dir))) if "{data}" in path else path


def _check_keys(config: ml_collections.ConfigDict) -> None:
    """Refuses keys that only the task `multihop` reads, where another one is to run."""
    c, default = config.task, base.get_config().task
    for key in MULTIHOP_KEYS if c.name != "multihop" else ():
        inner = [f"{key}.{name}" for name in c[key]] if isinstance(c[key], ml_collections.ConfigDict) else [key]
        for name in inner:
            if c[name] != default[name]:
                raise UserError(
                    f"task.{name} is {c[name]!r}, which only task 'multihop' reads, and task.name is {c.name!r}"
                )


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


def _tape(record: str, replay: str) -> Recording | Replay | None:
    """What records tool calls or replays them; of several processes each has a file of its own, `<path>.p<index>`."""
    if record and replay:
        raise UserError(f"tools.record ({record}) and tools.replay ({replay}) exclude each other; leave one empty")
    if not record and not replay:
        return None
    suffix = f".p{processes.process_index()}" if processes.process_count() > 1 else ""
    return Recording(record + suffix) if record else Replay(replay + suffix)


def data_folder_of(config: ml_collections.ConfigDict) -> os.PathLike[str]:
    """The folder of real data. Raises UserError where there is none."""
    try:
        return data_folder(config.task.data_dir)
    except FileNotFoundError as error:
        raise UserError(str(error)) from error

"""From a config to the parts of a run.

The only reader of the ConfigDict, shared by train, evaluate, ask, ablate and dry_run:

    settings = read_settings(config)      every key checked, by itself and against the others; nothing is made
    setup, builder = make_setup(settings)      task, tokenizer, agent, policy, engine: what does not fit is refused
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import ml_collections
from jax.sharding import Mesh

from agentr1_jax import contrib, files
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.credit.scheme import CreditConfig
from agentr1_jax.envs.base import Observation, Row, Task, has_expert, has_texts, writes_summaries
from agentr1_jax.envs.mixture import MixtureTask, parse_weights
from agentr1_jax.envs.registry import TASKS, Dispatch, TaskContext, call_directly
from agentr1_jax.errors import UserError
from agentr1_jax.policy import attention_check
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.runtime import compile_cache, processes
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.processes import Dispatcher
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.wrappers import ToolMetrics, wrap_tool
from agentr1_jax.train import build
from agentr1_jax.train.build import Setup
from agentr1_jax.train.restore import newest_checkpoint
from agentr1_jax.train.settings import SECTIONS, RunConfig, Settings, TaskConfig, load_file, settings_from_dict
from agentr1_jax.validation import from_section, to_section
from configs import base

if TYPE_CHECKING:
    from agentr1_jax.tasks.multihop.task import RetrieverConfig
    from agentr1_jax.tools.search import Corpus, Retriever

T = TypeVar("T")
Config = ml_collections.ConfigDict
"""A config, which other scripts only hand on to the functions below."""
OPENINGS_CHECKED = 8
"""Rows of each split whose first prompt must fit the budget."""
IN_BUCKETS = ("run_dir", "warm_start.init_from", "tokenizer.path", "compilation_cache")
"""Keys whose paths may be `gs://`."""


def read_settings(config: ml_collections.ConfigDict) -> Settings:
    """Check every key of a config, by itself and against the others.

    Imports the user's files that register schemes, context rules and tasks. Makes nothing, and asks no device.

    Raises:
      UserError: a value is of another type, out of range or does not fit another; the message names the keys.
    """
    _check_places(config)
    values = config.to_dict()
    return settings_from_dict(values, _read_task(values["task"]))


def read_section(config: ml_collections.ConfigDict, cls: type[T]) -> T:
    """Read one section of a config, checked by itself alone: of a config that is still to be changed.

    Args:
      config: the config.
      cls: dataclass of the section, e.g. `LearnerConfig`.

    Raises:
      UserError: a value is of another type or out of range.
    """
    values = config.to_dict()
    if cls is RunConfig:
        return from_section(cls, "", {key: x for key, x in values.items() if not isinstance(x, dict)})
    (name,) = (name for name, section in {**SECTIONS, "credit": CreditConfig}.items() if section is cls)
    return from_section(cls, name, values[name])


def make_setup(settings: Settings, *, resumes: bool) -> tuple[Setup, build.StateBuilder]:
    """Make the parts of a run; nothing is written but a tokenizer that is trained.

    Collective: all processes check before the first one writes.

    Args:
      settings: of the run.
      resumes: True if the run folder has its tokenizer already.

    Returns:
      the parts, and how the learner's state is made.

    Raises:
      UserError: the parts do not fit each other.
    """
    if settings.sinks.active:
        from agentr1_jax.runtime.sinks import check_sinks

        check_sinks(settings.sinks, settings.run.run_dir)
    check_placement(settings, jax.devices())
    tool_metrics, dispatcher = ToolMetrics(), Dispatcher()
    task = make_task(settings, tool_metrics, dispatcher)
    check_task(settings, task)
    processes.barrier()
    try:
        tokenizer = build.make_tokenizer(settings, task, resumes=resumes)
        agent = build.make_agent(settings, task, tokenizer)
        check_openings(settings, task, agent)
        policy = build.make_policy(settings, tokenizer)
        learner_mesh, rollout_mesh = build.make_learner_mesh(settings), build.make_rollout_mesh(settings)
        check_attention(settings, policy, learner_mesh)
        frozen = build.make_frozen(settings, policy, learner_mesh)
        engine = build.make_engine(settings, policy, rollout_mesh, dispatcher)
    except BaseException:
        if processes.process_index() == 0 and not resumes:
            build.remove_tokenizer(settings.run.run_dir)  # The corrected command must find the folder as this one did.
        raise
    ahead = settings.rollout.staleness > 0
    shared = ahead and not settings.mesh.rollout_devices
    dispatch_learner = dispatcher.call if shared else processes.call
    processes.use_for_exchange(list(learner_mesh.devices.flat), dispatch_learner)
    setup = Setup(
        settings=settings,
        task=task,
        tokenizer=tokenizer,
        agent=agent,
        policy=policy,
        frozen=frozen,
        learner_mesh=learner_mesh,
        engine=engine,
        rollout_params=build.make_rollout_params(policy, learner_mesh, rollout_mesh, copy=ahead),
        tool_metrics=tool_metrics,
        dispatch=dispatch_learner,
    )
    return setup, build.make_state_builder(settings, policy, learner_mesh)


def read_run(run: str) -> ml_collections.ConfigDict:
    """Read the config of the run in a folder; its `run_dir` is where the folder lies now.

    Raises:
      UserError: there is no run, or one of another version of the config.
    """
    files.check_reachable(run, "RUN")
    stored = RunFolder(run).read_config()
    config = base.get_config(*(name for name in stored.get("task", {}) if name in base.TASK_MODULES))
    try:
        config.update(stored)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = str(error.args[0]).partition(". ")[0]
        raise UserError(f"{run}/config.json: not a config of this version ({message})") from error
    config.run_dir = run
    return config


def is_run(source: str) -> bool:
    """Return whether a folder is that of a run that may have a checkpoint."""
    files.check_reachable(source, "RUN")
    parts = (os.path.join(source, "config.json"), os.path.join(source, "checkpoints"))
    return bool(source) and files.is_file(parts[0]) and files.is_folder(parts[1])


def change_config(config: ml_collections.ConfigDict, changes: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Return a copy of a config with other values of some keys, which are dotted names."""
    config = copy.deepcopy(config)
    config.update_from_flattened_dict(dict(changes))
    return config


def with_policy_of(config: ml_collections.ConfigDict, run: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Return a copy of a config with the policy, tokenizer and folder of a run; how it is computed stays as it is."""
    config = config.copy_and_resolve_references()
    computed = {key: config.policy[key] for key in ("attention", "remat", "dtype")}
    config.policy, config.tokenizer, config.run_dir = run.policy, run.tokenizer, run.run_dir
    config.policy.update(computed)
    return config


def with_weights(config: ml_collections.ConfigDict, source: str) -> ml_collections.ConfigDict:
    """Return a copy of a config with published weights, whose shape stays as it is, and their tokenizer."""
    config = config.copy_and_resolve_references()
    for key, value in base.get_config().policy.items():
        if value is None:
            config.policy[key] = None
    config.policy.preset, config.policy.weights, config.tokenizer.path = "", source, source
    config.policy.lora.rank = 0
    return config


POLICY_SECTIONS = ("policy.", "tokenizer.")
COMPUTED_OTHERWISE = ("policy.attention", "policy.remat")
"""How a policy is computed, not what it is."""


def differing_policy_keys(here: ml_collections.ConfigDict, there: Mapping[str, Any]) -> list[str]:
    """Return the keys that make two runs' policies or tokenizers different, a line each.

    Args:
      here: config of this run.
      there: config of the other run, as plain JSON.
    """
    ours, theirs = dict(configs.flatten(configs.resolve(here))), dict(configs.flatten(there))
    keys = [k for k in sorted(ours.keys() | theirs.keys()) if k.startswith(POLICY_SECTIONS)]
    keys = [key for key in keys if key not in COMPUTED_OTHERWISE]
    if ours.get("policy.lora.rank") and not ours.get("policy.weights"):
        keys.append("seed")  # The frozen random weights under the adapters are made from it.
    missing = "(no such key)"
    return [
        f"  {key}: {theirs.get(key, missing)!r} there, {ours.get(key, missing)!r} here"
        for key in keys
        if ours.get(key, missing) != theirs.get(key, missing)
    ]


def check_init_from(config: ml_collections.ConfigDict) -> None:
    """Refuse a `warm_start.init_from` that this run cannot start from.

    Raises:
      UserError: no such run, one that is not finished or lacks its tokenizer, another policy (the differing keys are
        listed), or a run that would do nothing but a warm start itself.
    """
    source, key = config.warm_start.init_from, "warm_start.init_from: "
    if not source:
        return
    if config.warm_start.control_seconds:
        raise UserError(
            "a control run learns from demonstrations alone; set warm_start.init_from='' or "
            "warm_start.control_seconds=0"
        )
    if files.same_path(source, config.run_dir):
        raise UserError(f"{key}{source} is the run's own folder; name the run that RL starts from")
    files.check_reachable(source, "warm_start.init_from")
    different = differing_policy_keys(config, RunFolder(source).read_config())
    if different:
        listed = "\n".join(different)
        raise UserError(f"{key}{source} has another policy:\n{listed}\nset them to what that run has")
    if not config.tokenizer.path and not files.is_file(os.path.join(source, "tokenizer.model")):
        raise UserError(f"{key}{source}: its tokenizer.model is gone; restore it")
    newest_checkpoint(source, key)
    if not files.is_file(os.path.join(source, "summary.json")):
        raise UserError(
            f"{key}{source} is not finished (it has no summary.json): its policy is half trained; let it come to its "
            "end first, by the command that started it"
        )


def use_compile_cache(settings: Settings) -> None:
    """Keep compiled programs from one start to the next in `compilation_cache`, where that is set.

    JAX's own variable `JAX_COMPILATION_CACHE_DIR` takes precedence.
    """
    if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR") or settings.run.compilation_cache:
        compile_cache.enable(compile_cache.cache_folder(folder, settings.run.run_dir))


def _check_places(config: ml_collections.ConfigDict) -> None:
    """Refuse paths in buckets where they cannot be used, and buckets without their library."""
    for key, value in configs.flatten(config.to_dict()):
        if not isinstance(value, str) or not files.is_remote(value):
            continue
        if key not in IN_BUCKETS:
            raise UserError(
                f"{key} is {value}, and only {', '.join(IN_BUCKETS)} may lie in a bucket; copy it to this machine, or "
                "mount the bucket and give the path there"
            )
        files.path(value)


def _read_task(values: Mapping[str, Any]) -> TaskConfig:
    """Read the section `task`, and the sections of the tasks that it names."""
    sections = {name: section for name, section in values.items() if name not in base.TASK_KEYS}
    keys = {key: values[key] for key in base.TASK_KEYS}
    config = from_section(TaskConfig, "task", {**keys, "sections": {}})
    if config.file:
        load_file(TASKS, config.file)
    checked = {}
    for name in task_names(config):
        entry = _find_task(name)
        if entry.config is None:
            continue
        if name in base.TASK_MODULES:
            checked[name] = from_section(entry.config, f"task.{name}", sections.get(name, to_section(entry.config)))
        else:
            checked[name] = from_section(entry.config, "task.args", config.args)
    _check_unread_task_keys(config, sections, checked)
    return dataclasses.replace(config, sections=checked)


def _find_task(name: str) -> Any:
    try:
        return base.find_task(name)
    except ValueError as error:
        raise UserError(f"task.name: {error}") from error


def task_names(config: TaskConfig) -> list[str]:
    """Return the name of the task, or the names of the tasks of a mixture.

    Raises:
      UserError: no task, or a mixture that cannot be read.
    """
    try:
        weights = parse_weights(config.mixture, "task.mixture") if config.mixture else {}
    except ValueError as error:
        raise UserError(str(error)) from error
    if config.name != base.MIXTURE and weights:
        raise UserError(
            f"task.mixture is {config.mixture!r}, which only task 'mixture' reads, and task.name is {config.name!r}"
        )
    if config.name == base.MIXTURE and not weights:
        raise UserError(
            "task.name is mixture, and task.mixture is empty; write e.g. ('hopworld(weight=2)', 'keydoor(weight=1)')"
        )
    return list(weights) if config.name == base.MIXTURE else [config.name]


def _check_unread_task_keys(config: TaskConfig, sections: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """Refuse keys that no task of the run reads."""
    names = task_names(config)
    for name, section in sections.items():
        default = _find_task(name).config
        if name not in names and (default is None or section != to_section(default)):
            raise UserError(
                f"task.{name} has keys of a task that is not run; the tasks are {', '.join(names)}: change the task of "
                f"a config by base.set_task(c, {', '.join(map(repr, names))})"
            )
    if config.args and not any(name in read for name in names if name not in base.TASK_MODULES):
        raise UserError(f"task.args has {', '.join(config.args)}, which only a task of task.file with keys reads")


def make_task(settings: Settings, tool_metrics: ToolMetrics, dispatch: Dispatch = call_directly) -> Task:
    """Make the task, or the mixture of tasks, of a run.

    Args:
      settings: of the run.
      tool_metrics: counts what its tools do.
      dispatch: runs what a dense retriever does on the devices.

    Raises:
      UserError: data are missing or damaged, or a task cannot be solved within the budget.
    """
    c = settings.task
    context = TaskContext(
        seed=settings.run.seed,
        data_dir=c.data_dir,
        max_steps=settings.budget.max_steps,
        wrap=functools.partial(wrap_tool, config=settings.tools, metrics=tool_metrics),
        dispatch=dispatch,
        make_retriever=_make_retriever,
        make_tool=_make_tool,
    )
    try:
        tasks = {name: _find_task(name).make(c.sections.get(name), context) for name in task_names(c)}
        if c.name == base.MIXTURE:
            return MixtureTask(tasks, c.mixture, settings.run.seed)
        return tasks[c.name]
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def _make_retriever(c: RetrieverConfig, corpus: Corpus, top_k: int, dispatch: Dispatch = call_directly) -> Retriever:
    """Make the retriever of a search task; see `TaskContext.make_retriever`.

    A dense one computes the corpus's vectors here, unless its index has them, and compiles what searches need.
    """
    from agentr1_jax.tools.search import BM25, RemoteRetriever

    index = os.path.join(os.path.expanduser(c.index), c.kind) if c.index else ""
    try:
        if c.kind == "http":
            return RemoteRetriever(c.url, c.seconds, c.attempts, cache=c.cache, corpus=corpus)
        if c.kind == "bm25":
            return BM25(corpus, index)
        dense = importlib.import_module("agentr1_jax.contrib.dense_retrieval")
        return dense.make_dense_retriever(c, corpus, top_k, index, dispatch)
    except (ValueError, OSError) as error:
        raise UserError(f"task.multihop.retriever: {error}") from error


def _make_tool(name: str) -> Tool:
    """Make a tool of contrib by its name."""
    if name not in contrib.TOOLS:
        raise ValueError(f"unknown tool {name!r}; choose one of {', '.join(contrib.TOOLS)}")
    module, _, attribute = contrib.TOOLS[name].partition(":")
    tool: Tool = getattr(importlib.import_module(module), attribute)()
    return tool


def check_task(settings: Settings, task: Task) -> None:
    """Refuse a task that lacks what the settings need of it: experts, texts, splits, reward parts, state keys.

    Raises:
      UserError: names what there is and the keys to change.
    """
    warm_start = settings.warm_start
    if settings.imitates and not has_expert(task):
        raise UserError(
            f"task {task.name!r} has no expert to imitate, and warm_start.updates is {warm_start.updates}; set "
            "warm_start.updates=0, or name a run in warm_start.init_from"
        )
    if not warm_start.init_from and not has_texts(task) and (not settings.tokenizer.path or settings.pretrain.updates):
        raise UserError(
            f"task {task.name!r} has no texts to train a tokenizer or to pretrain on; set tokenizer.path and "
            "pretrain.updates=0, or name a run in warm_start.init_from"
        )
    if settings.imitates and warm_start.practice:
        try:
            task.row("practice", 0)
        except ValueError as error:
            raise UserError(f"{task.name} has no split 'practice'; set warm_start.practice=0 ({error})") from error
    for part in settings.shaping.process_parts:
        if part not in task.reward_parts:
            raise UserError(
                f"shaping.process_parts: task {task.name!r} has no reward part {part!r}; it has "
                f"{', '.join(task.reward_parts)}"
            )
    if settings.context_rule.makes_summaries and settings.imitates and not writes_summaries(task):
        raise UserError(
            f"context.rule {settings.context.rule!r} asks for summaries, and the expert of task {task.name!r} writes "
            "none to imitate; choose another context.rule, set warm_start.updates=0, or name a run in "
            "warm_start.init_from"
        )
    for row, observation in _openings(settings, task, rows=1):
        _check_observation(settings, row.get("task", task.name), observation)


def check_openings(settings: Settings, task: Task, agent: EnvLoop) -> None:
    """Refuse a budget that the task's first prompts already exceed.

    Raises:
      UserError: names the row, its length and the keys to change.
    """
    budget = settings.budget
    room = budget.context_tokens - budget.response_tokens
    for row, observation in _openings(settings, task, rows=OPENINGS_CHECKED):
        tokens = len(agent.render_opening(observation))
        if tokens > room:
            raise UserError(
                f"the prompt of row {row['id']} has {tokens} tokens; budget.context_tokens ({budget.context_tokens}) "
                f"less budget.response_tokens ({budget.response_tokens}) leaves {room}: raise budget.context_tokens"
            )


def _openings(settings: Settings, task: Task, rows: int) -> Iterator[tuple[Row, Observation]]:
    """Yield the first rows of each split that a run uses, of each task of a mixture, and how their episodes begin."""

    async def reset(row: Row) -> Observation:
        return await task.env().reset(row, seed=0)

    splits = [
        f"{split}/{name}" if name and "/" not in split else split
        for split in ("train", settings.eval.split)
        for name in (task.names if isinstance(task, MixtureTask) else [""])
    ]
    for split in dict.fromkeys(splits):
        try:
            chosen = [task.row(split, index) for index in range(rows)]
        except ValueError as error:
            raise UserError(f"eval.split: {error}") from error
        for row in chosen:
            yield row, asyncio.run(reset(row))


def _check_observation(settings: Settings, task: str, observation: Observation) -> None:
    """Refuse an environment whose observations lack what credit scheme, context rule or shaping read."""
    if settings.scheme.needs_state_key and observation.state_key is None:
        raise UserError(
            f"credit scheme {settings.scheme.name!r} compares steps of equal state_key, and observations of task "
            f"{task!r} have none; set Observation.state_key in the environment, or choose another credit.name"
        )
    if settings.context_rule.needs_evidence and observation.evidence is None:
        raise UserError(
            f"context.rule {settings.context.rule!r} builds prompts from what the environment has shown, and "
            f"observations of task {task!r} do not say it; set Observation.evidence in the environment, or choose "
            "another context.rule"
        )
    if settings.shaping.potential and observation.potential is None:
        raise UserError(
            f"shaping.potential is {settings.shaping.potential}, and observations of task {task!r} have no potential; "
            "set Observation.potential in the environment, or shaping.potential=0"
        )


def check_placement(settings: Settings, devices: Sequence[jax.Device]) -> None:
    """Refuse meshes that do not fit the devices, and sizes that do not spread evenly over them.

    Raises:
      UserError: names the keys and the numbers that must divide.
    """
    count, minibatches = len({d.process_index for d in devices}), settings.learner.minibatches
    if settings.rollout.groups % (count * minibatches):
        raise UserError(
            f"rollout.groups ({settings.rollout.groups}) must be a multiple of processes x learner.minibatches "
            f"({count} x {minibatches})"
        )
    for section, c in (("pretrain", settings.pretrain), ("warm_start", settings.warm_start)):
        if c.updates and c.batch % count:
            raise UserError(f"{section}.batch ({c.batch}) must be a multiple of the {count} processes")
    if settings.warm_start.control_seconds and count > 1:
        raise UserError("a control run is timed, and clocks of several processes differ; run it in one process")
    mesh = settings.mesh
    learner_devices, rollout_devices = meshes.split_devices(devices, mesh.rollout_devices)
    data, fsdp, _ = meshes.axis_sizes(mesh.data, mesh.fsdp, mesh.tensor, learner_devices)
    sections = {"learner": settings.learner.rows}
    if settings.pretrain.updates:
        sections["pretrain"] = settings.pretrain.rows
    for section, rows in sections.items():
        if rows % (data * fsdp):
            raise UserError(
                f"{section}.rows ({rows}) must be a multiple of the {data * fsdp} shards of a batch "
                f"(mesh.data x mesh.fsdp: {data} x {fsdp})"
            )
    try:
        settings.engine.check_shards(meshes.rollout_shards(len(rollout_devices) // count, settings.rollout.tensor))
    except ValueError as error:
        raise UserError(str(error)) from error


def check_attention(settings: Settings, policy: DecoderConfig, mesh: Mesh, *, run: bool = True) -> None:
    """Refuse an attention implementation that the learner's devices or rows do not allow, by a tiny call of it."""
    if policy.attention in ("xla", "dense"):
        return  # They work everywhere.
    learner = settings.learner
    try:
        attention_check.check_attention(policy, mesh, learner.row_tokens, learner.packing, call=run)
    except ValueError as error:
        raise UserError(str(error)) from error

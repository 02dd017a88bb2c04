"""From a config to the parts of a run.

The only reader of the ConfigDict, shared by train, evaluate, ask, ablate and dry_run:

    settings = read_settings(config)      every key checked, by itself and against the others; nothing is made
    setup, builder = make_setup(settings)      task, tokenizer, agent, policy, engine: what does not fit is refused
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import ml_collections
from ml_collections.config_dict import placeholder
from rich.console import Console
from rich.prompt import Confirm
from rich.text import Text

from agentr1_jax import contrib, files
from agentr1_jax.credit.scheme import SCHEMES, CreditConfig
from agentr1_jax.envs.base import Task
from agentr1_jax.envs.mixture import MixtureTask, parse_weights
from agentr1_jax.envs.registry import TASKS, Dispatch, TaskContext, TaskEntry, call_directly
from agentr1_jax.errors import UserError, inert, user_error
from agentr1_jax.runtime import compile_cache, processes
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.processes import Dispatcher
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.text.tokenizer import has_tokenizer
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.wrappers import ToolMetrics, wrap_tool
from agentr1_jax.train import build, defaults
from agentr1_jax.train.build import Setup
from agentr1_jax.train.restore import newest_checkpoint
from agentr1_jax.train.settings import SECTIONS, RunConfig, Settings, TaskConfig, load_file, settings_from_dict
from agentr1_jax.validation import from_section, to_section
from configs import base
from experiments.checks import check_answers, check_attention, check_openings, check_placement, check_task

if TYPE_CHECKING:
    from agentr1_jax.tasks.multihop.task import RetrieverConfig
    from agentr1_jax.tools.search import Corpus, Retriever

T = TypeVar("T")
Config = ml_collections.ConfigDict
"""A config, which other scripts only hand on to the functions below."""
COMPUTED_OTHERWISE = ("policy.attention", "policy.precision", "policy.remat")
"""Keys that say how a policy is computed, not what it is."""
IN_BUCKETS = ("run_dir", "warm_start.init_from", "tokenizer.path", "compilation_cache")
"""Keys whose paths may be `gs://`."""


def complete(
    config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None
) -> ml_collections.ConfigDict:
    """Return a copy of a config whose unset keys have the values that follow from other keys and the hardware.

    Args:
      config: the config; it is not changed.
      devices: of all processes, for `hardware=auto`.

    Raises:
      UserError: see `defaults.complete`.
    """
    values, before = defaults.complete(config.to_dict(), devices), dict(configs.flatten(config.to_dict()))
    filled = {key: x for key, x in configs.flatten(values) if key in before and x != before[key]}
    return change_config(config, filled)


def read_settings(config: ml_collections.ConfigDict) -> Settings:
    """Check every key of a config, by itself and against the others; see `settings_from_dict`.

    Also imports the user's file that registers tasks. Makes nothing, and asks no device.
    """
    _check_places(config)
    values = config.to_dict()
    return settings_from_dict(values, _read_task(values["task"]))


def adapt(config: ml_collections.ConfigDict, changes: Mapping[str, Any]) -> tuple[ml_collections.ConfigDict, list[str]]:
    """Return a copy of a config that has the keys of the task and the credit scheme that changes choose.

    Keys of another task make room for those of the chosen one, with their defaults. Arguments of another credit scheme
    that the chosen one lacks are unset, unless the changes set them: `read_settings` refuses those. What does not exist
    is left to `read_settings`, too.

    Args:
      config: the config; it is not changed.
      changes: dotted key -> value, as text or as it is; they are still to be made.

    Returns:
      the config; what was dropped, a line each.

    Raises:
      UserError: a user's file does not load.
    """
    config, notes = copy.deepcopy(config), list[str]()
    if {"task.name", "task.file"} & changes.keys():
        notes += _adapt_task(config, changes)
    if any(key.startswith("credit.") for key in changes):
        notes += _adapt_credit(config, changes)
    return config, notes


def _adapt_task(config: ml_collections.ConfigDict, changes: Mapping[str, Any]) -> list[str]:
    """Put the keys of the chosen task, or of the tasks of a mixture, into a config; see `adapt`."""
    name, file = (str(changes.get(f"task.{key}", config.task[key])) for key in ("name", "file"))
    if file:
        load_file(TASKS, file)
    names, before = [name], set(base.task_names(config.task))
    if name == base.MIXTURE:
        mixture = changes.get("task.mixture", config.task.mixture)
        with user_error(), contextlib.suppress(SyntaxError):
            names = list(parse_weights(ast.literal_eval(str(mixture)), "task.mixture"))
    try:
        entries = {name: base.find_task(name) for name in names}
    except ValueError:
        return []
    if name == config.task.name and before == {
        key for key in names if key in base.TASK_MODULES and entries[key].config
    }:
        return []
    base.set_task(config, *(key for key in names if key in base.TASK_MODULES))
    keys = [entry.config for key, entry in entries.items() if key not in base.TASK_MODULES and entry.config]
    with config.unlocked():
        config.task.args = Config(to_section(keys[0]) if len(keys) == 1 else {})
    dropped = sorted(before - set(names))
    return [f"task.name is {name}: task.{key} of the config is left out" for key in dropped]


def _adapt_credit(config: ml_collections.ConfigDict, changes: Mapping[str, Any]) -> list[str]:
    """Unset arguments that the chosen credit scheme lacks, and declare those that it has; see `adapt`."""
    name, file = (str(changes.get(f"credit.{key}", config.credit[key])) for key in ("name", "file"))
    if file:
        load_file(SCHEMES, file)
    if name not in SCHEMES:
        return []
    defaults, args, notes = SCHEMES[name].defaults, config.credit.args, []
    if name != config.credit.name:
        for key, value in args.items():
            if value is not None and key not in defaults and f"credit.args.{key}" not in changes:
                args[key] = None
                notes.append(f"credit.name is {name}: credit.args.{key}={value} of {config.credit.name} is left out")
        for key, unset in {"probe": "none", "probe_text": ""}.items() if not SCHEMES[name].needs_belief else ():
            if config.credit[key] != unset and f"credit.{key}" not in changes:
                notes.append(
                    f"credit.name is {name}, which takes no belief: credit.{key}={config.credit[key]} is left out"
                )
                config.credit[key] = unset
    with config.unlocked():
        for key in (key.removeprefix("credit.args.") for key in changes if key.startswith("credit.args.")):
            if key not in args and "." not in key:
                SCHEMES[name].bind(**dict.fromkeys({key} - defaults.keys(), 0))  # Says what arguments there are.
                args[key] = placeholder(type(defaults[key]))
    return notes


def run_main(main: Callable[[Sequence[str]], Any], arguments: Sequence[str] = ()) -> None:
    """Run the `main` of a script that reads a config; see `configs.run_main`."""
    configs.run_main(main, arguments, adapt, _show_keys)


def _show_keys(given: configs.Given, section: str) -> None:
    from experiments import config_reference

    config_reference.show_keys(given, section)


def read_section(config: ml_collections.ConfigDict, cls: type[T]) -> T:
    """Read the section of a dataclass, e.g. `LearnerConfig`, from a config that is still to be changed or completed.

    Raises:
      UserError: a value is of another type or out of range.
    """
    values = defaults.complete(config.to_dict())
    if cls is RunConfig:
        return from_section(cls, "", {key: x for key, x in values.items() if not isinstance(x, dict)})
    (name,) = (name for name, section in {**SECTIONS, "credit": CreditConfig}.items() if section is cls)
    return from_section(cls, name, values[name])


def make_setup(settings: Settings, *, resumes: bool) -> tuple[Setup, build.StateBuilder]:
    """Make the parts of a run; also return how the learner's state is made. Collective.

    Nothing is written but a tokenizer that is trained, unless the run resumes; all processes check before the first one
    writes.

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
        check_answers(settings, task, tokenizer)
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


def read_run(run: str, *, executes: bool = True) -> ml_collections.ConfigDict:
    """Read the config of the run in a folder; its `run_dir` is where the folder lies now.

    Args:
      run: the folder.
      executes: parts of the run will be made from its config; whoever starts the program has to agree to what may be
        unsafe then, see `RunFolder.risks`.

    Raises:
      UserError: there is no run, or one of another version of the config, or nobody agrees.
    """
    files.check_reachable(run, "RUN")
    stored = RunFolder(run).read_config()
    if executes and (risks := RunFolder(run).risks(stored)):
        _agree(run, tuple(f"  {key}: {value}" for key, value in risks.items()))
    config = base.get_config(*(name for name in stored.get("task", {}) if name in base.TASK_MODULES))
    try:
        with config.task.args.unlocked(), config.credit.args.unlocked(), config.optimizer.args.unlocked():
            config.update(stored)  # Arguments of what a user's file registers are unknown to the base config.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = str(error.args[0]).partition(". ")[0]
        raise UserError(f"{run}/config.json: not a config of this version ({message})") from error
    config.run_dir = run
    return config


@functools.cache
def _agree(run: str, listed: Sequence[str]) -> None:
    """Ask, once, whether to do what a run's config says. Raises UserError if not."""
    if configs.trusts_run():
        return
    what = "\n".join(
        [f"{run}: its config would execute Python that may have come with it, or send environment variables:", *listed]
    )
    if sys.stdin is not None and sys.stdin.isatty():
        question = Text(inert(f"{what}\nDo you trust this run?"))
        with contextlib.suppress(EOFError):
            if Confirm.ask(question, default=False, console=Console(stderr=True, soft_wrap=True)):
                return
    raise UserError(f"{what}\nlook at them, and agree by --trust_run")


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
    computed = {key: config.policy[key] for key in ("attention", "precision", "remat", "dtype")}
    config.policy, config.tokenizer, config.run_dir = run.policy, run.tokenizer, run.run_dir
    config.policy.update(computed)
    return config


def with_weights(config: ml_collections.ConfigDict, source: str) -> ml_collections.ConfigDict:
    """Return a copy of a config with published weights, whose shape stays as it is, and the tokenizer they bring."""
    config = config.copy_and_resolve_references()
    for key, value in base.get_config().policy.items():
        if value is None and f"policy.{key}" not in defaults.BY_HARDWARE:
            config.policy[key] = None
    config.policy.preset, config.policy.weights = "", source
    if has_tokenizer(os.path.expanduser(source)):
        config.tokenizer.path = source
    config.policy.lora.rank = 0
    return config


def differing_policy_keys(here: ml_collections.ConfigDict, there: Mapping[str, Any]) -> list[str]:
    """Return the keys that make two runs' policies or tokenizers different, a line each; `there` is plain JSON.

    A key that is newer than the run there has its default there.
    """
    before = configs.flatten(base.get_config().to_dict())
    ours, theirs = (dict(configs.flatten(x)) for x in (configs.resolve(here), there))
    theirs = dict(before) | theirs
    policy = {key for key in ours.keys() | theirs.keys() if key.startswith(("policy.", "tokenizer."))}
    keys = sorted(policy - set(COMPUTED_OTHERWISE))
    if ours.get("policy.lora.rank") and not ours.get("policy.weights"):
        keys.append("seed")  # The frozen random weights under the adapters are made from it.
    missing = "(no such key)"
    return [
        f"  {key}: {theirs.get(key, missing)!r} there, {ours.get(key, missing)!r} here"
        for key in keys
        if ours.get(key, missing) != theirs.get(key, missing)
    ]


def check_init_from(config: ml_collections.ConfigDict) -> None:
    """Refuse a `warm_start.init_from` that this run cannot start from; a policy that differs is told key by key."""
    source, key = config.warm_start.init_from, "warm_start.init_from: "
    if not source:
        return
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
    checked: dict[str, Any] = {}
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


def _find_task(name: str) -> TaskEntry:
    with user_error("task.name: "):
        return base.find_task(name)


def task_names(config: TaskConfig) -> list[str]:
    """Return the name of the task, or the names of a mixture. Raises UserError if the mixture cannot be read."""
    with user_error():
        weights = parse_weights(config.mixture, "task.mixture") if config.mixture else {}
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


def make_task(
    settings: Settings,
    tool_metrics: ToolMetrics,
    dispatch: Dispatch = call_directly,
    wrap: Callable[[Tool], Tool] | None = None,
) -> Task:
    """Make the task, or the mixture of tasks, of a run.

    Args:
      settings: of the run.
      tool_metrics: counts what its tools do.
      dispatch: runs what a dense retriever does on the devices.
      wrap: puts limits around a tool; None for those of the settings.

    Raises:
      UserError: data are missing or damaged, or a task cannot be solved within the budget.
    """
    c = settings.task
    context = TaskContext(
        seed=settings.run.seed,
        data_dir=c.data_dir,
        max_steps=settings.budget.max_steps,
        wrap=wrap or functools.partial(wrap_tool, config=settings.tools, metrics=tool_metrics),
        dispatch=dispatch,
        make_retriever=make_retriever,
        make_tool=_make_tool,
    )
    try:
        tasks = {name: _find_task(name).make(c.sections.get(name), context) for name in task_names(c)}
        if c.name == base.MIXTURE:
            return MixtureTask(tasks, c.mixture, settings.run.seed)
        return tasks[c.name]
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def make_retriever(c: RetrieverConfig, corpus: Corpus, top_k: int, dispatch: Dispatch = call_directly) -> Retriever:
    """Make the retriever of a search task; a dense one computes the corpus's vectors unless its index has them."""
    from agentr1_jax.tools.search import BM25, RemoteRetriever

    index = os.path.join(os.path.expanduser(c.index), c.kind) if c.index else ""
    try:
        if c.kind == "http":
            return RemoteRetriever(c.url, c.seconds, cache=c.cache, corpus=corpus)
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

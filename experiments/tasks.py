"""From config to the task of a run."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import ml_collections

from agentr1_jax.contrib.bfcl import BfclTask, scoring
from agentr1_jax.contrib.gymnasium.task import GymnasiumTask
from agentr1_jax.contrib.http_env.client import HttpTask, Server
from agentr1_jax.contrib.sokoban import sokoban_task
from agentr1_jax.contrib.verifiers import verifiers_task
from agentr1_jax.envs import countdown, gsm8k, qa, whereabouts
from agentr1_jax.envs.base import Task
from agentr1_jax.envs.countdown import CountdownTask
from agentr1_jax.envs.frozenlake import frozenlake_task
from agentr1_jax.envs.gsm8k import Gsm8kTask
from agentr1_jax.envs.hopworld.task import HopWorldTask
from agentr1_jax.envs.keydoor import keydoor_task
from agentr1_jax.envs.mixture import MixtureTask
from agentr1_jax.envs.multihop import Files, MultihopTask, data_folder
from agentr1_jax.envs.registry import TASKS
from agentr1_jax.envs.shares import parse_weights
from agentr1_jax.envs.tabular_task import REWARD_PARTS
from agentr1_jax.envs.whereabouts import WhereaboutsTask
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import processes
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.calculator import CalculatorTool
from agentr1_jax.tools.limits import ToolLimits, wrapped
from agentr1_jax.tools.meter import Meter
from agentr1_jax.tools.replay import Recording, Replay
from agentr1_jax.tools.search.dense import Dispatch, at_once
from configs import base
from experiments import retrieval

MIXTURE = "mixture"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a task is made with.

    Attributes:
      config: of the run.
      wrap: puts the run's limits around a tool.
      dispatch: runs what a dense retriever does on the devices.
      weights: of those reward parts that the task has.
    """

    config: ml_collections.ConfigDict
    wrap: Callable[[Tool], Tool]
    dispatch: Dispatch
    weights: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A task of this house.

    Attributes:
      make: makes it.
      parts: the reward parts that it can have.
      keys: of `task`, that it reads besides its own section and `task.rewards`.
    """

    make: Callable[[Setting], Task]
    parts: Collection[str]
    keys: Sequence[str] = ()


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
    try:
        if c.file:
            TASKS.load(c.file)
        names = list(parse_weights(c.mixture, "task.mixture")) if c.name == MIXTURE else [c.name]
        _check_names(config, names)
        _check_keys(config, names)
        limits = config.tools.to_dict()
        limits.pop("lenient")  # Of the agent: it reads calls.
        tape = _tape(limits.pop("record"), limits.pop("replay"))
        wrap = functools.partial(wrapped, limits=ToolLimits(**limits), meter=meter or Meter(), tape=tape)
        made = {name: _make(config, name, wrap, dispatch) for name in names}
        task = MixtureTask(made, c.mixture, config.seed) if c.name == MIXTURE else made[c.name]
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    _check_practice(config, task)
    return task


def _make(config: ml_collections.ConfigDict, name: str, wrap: Callable[[Tool], Tool], dispatch: Dispatch) -> Task:
    if name in KINDS:
        kind = KINDS[name]
        weights = {part: config.task.rewards[part] for part in kind.parts}
        return kind.make(Setting(config, wrap, dispatch, weights))
    make, args = TASKS[name], config.task.args.to_dict()
    try:
        inspect.signature(make).bind(wrap=wrap, **args)
    except TypeError as error:
        raise UserError(
            f"task {name!r} of task.file: {error}; what makes it is called with wrap= and the keys of task.args "
            f"({', '.join(args) or 'none'})"
        ) from error
    return make(wrap=wrap, **args)


def _hopworld(s: Setting) -> Task:
    c = s.config.task
    return HopWorldTask(
        top_k=c.top_k,
        questions_per_world=c.hopworld.questions_per_world,
        flaws=c.hopworld.flaws.to_dict(),
        reward_weights=s.weights,
        wrap=s.wrap,
    )


def _keydoor(s: Setting) -> Task:
    c, most = s.config.task.keydoor, s.config.budget.max_steps
    if most < c.rooms + 2:
        raise UserError(
            f"keydoor: its door is {c.rooms + 2} steps away (task.keydoor.rooms + 2), beyond budget.max_steps "
            f"({most}); raise it, or lower task.keydoor.rooms"
        )
    return keydoor_task(**c.to_dict(), reward_weights=s.weights)


def _frozenlake(s: Setting) -> Task:
    return frozenlake_task(**s.config.task.frozenlake.to_dict(), reward_weights=s.weights)


def _sokoban(s: Setting) -> Task:
    c, most = s.config.task.sokoban, s.config.budget.max_steps
    if most < c.most_moves:
        raise UserError(
            f"sokoban: solutions have up to task.sokoban.most_moves ({c.most_moves}) moves, beyond budget.max_steps "
            f"({most}); raise it, or lower task.sokoban.most_moves"
        )
    return sokoban_task(**c.to_dict(), reward_weights=s.weights)


def _gymnasium(s: Setting) -> Task:
    c = s.config.task.gymnasium
    if not c.id:
        raise UserError("task.gymnasium.id is empty; name an environment of Gymnasium, e.g. FrozenLake-v1")
    return GymnasiumTask(**c.to_dict(), reward_weights=s.weights)


def _http(s: Setting) -> Task:
    config = s.config
    _check_no_expert(config, "http")
    if not config.warm_start.run and (not config.tokenizer.path or config.pretrain.updates):
        raise UserError(
            "task 'http' has no texts to train a tokenizer or to pretrain on; set tokenizer.path and "
            "pretrain.updates=0, or name a run in warm_start.run"
        )
    return HttpTask(Server(**config.task.http.to_dict()))


def _verifiers(s: Setting) -> Task:
    c = s.config.task.verifiers
    _check_no_expert(s.config, "verifiers")
    if not c.source:
        raise UserError("task.verifiers.source is empty; name a Python file with load_environment, or a module")
    return verifiers_task(c.source, c.args, s.config.seed)


def _check_no_expert(config: ml_collections.ConfigDict, name: str) -> None:
    """Refuses what needs demonstrations of a task that has none."""
    if not config.warm_start.run and (config.warm_start_updates or config.control):
        raise UserError(
            f"task {name!r} has no expert to imitate, and warm_start_updates is {config.warm_start_updates} (control: "
            f"{config.control}); set warm_start_updates=0 control=False, or name a run in warm_start.run"
        )


def _multihop(s: Setting) -> MultihopTask:
    """The task of real questions. Raises UserError, or what `MultihopTask` raises."""
    config = s.config
    c, default = config.task.multihop, base.get_config().task
    for split, key in (("train", "datasets"), ("eval", "eval_datasets")):
        if c.files[split] and c[key] != default.multihop[key]:
            raise UserError(
                f"task.multihop.files.{split} names the files that are read, whatever their data sets are, and "
                f"task.multihop.{key} is {c[key]}; leave one of them out"
            )
    retrieval.check_retriever(config)
    if c.reward != "weighted":
        changed = [name for name, weight in s.weights.items() if weight not in (0, default.rewards[name])]
        if changed:
            raise UserError(f"task.multihop.reward {c.reward!r} has fixed weights; leave out task.rewards.{changed[0]}")
    task = MultihopTask(
        data_dir=config.task.data_dir,
        datasets=c.datasets,
        eval_datasets=c.eval_datasets or None,
        corpus=c.corpus,
        files=Files(*(tuple(_paths(config, c.files[key])) for key in ("train", "eval", "corpus"))),
        mixture=c.mixture,
        held_out=c.held_out,
        held_out_datasets=c.held_out_datasets,
        instruction=c.instruction,
        top_k=config.task.top_k,
        passage_characters=c.passage_characters,
        retriever_factory=functools.partial(retrieval.make_retriever, config, dispatch=s.dispatch),
        reward_weights=s.weights if c.reward == "weighted" else None,
        reward=c.reward,
        reward_functions=c.reward_functions,
        seed=config.seed,
        wrap=s.wrap,
    )
    if not task.corpus and c.retriever.kind != "http":
        raise UserError(
            f"the question files bring no passages, and task.multihop.retriever.kind {c.retriever.kind!r} has to "
            "search some; name a corpus in task.multihop.files.corpus"
        )
    return task


def _paths(config: ml_collections.ConfigDict, paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        path = os.path.expanduser(path)
        yield path.replace("{data}", os.fspath(data_folder(config.task.data_dir))) if "{data}" in path else path


def _countdown(s: Setting) -> Task:
    return CountdownTask(**s.config.task.countdown.to_dict(), reward_weights=s.weights, wrap=s.wrap)


def _gsm8k(s: Setting) -> Task:
    c = s.config.task.gsm8k
    if c.tool not in ("calculator", "python"):
        raise UserError(f"task.gsm8k.tool is {c.tool!r}; choose calculator or python")
    tool: Tool = CalculatorTool()
    if c.tool == "python":
        from agentr1_jax.contrib.python_sandbox import PythonTool

        tool = PythonTool()
    return Gsm8kTask(s.config.task.data_dir, tool, s.weights, s.config.seed, s.wrap)


def _whereabouts(s: Setting) -> Task:
    c, most = s.config.task.whereabouts, s.config.budget.max_steps
    if most < c.reports + 1:
        raise UserError(
            f"whereabouts: its question comes at step {c.reports + 1} (task.whereabouts.reports + 1), beyond "
            f"budget.max_steps ({most}); raise it, or lower task.whereabouts.reports"
        )
    return WhereaboutsTask(**s.config.task.whereabouts.to_dict(), reward_weights=s.weights)


def _bfcl(s: Setting) -> Task:
    return BfclTask(s.config.task.data_dir, s.weights, s.config.seed, s.wrap)


KINDS: Mapping[str, Kind] = {
    "hopworld": Kind(_hopworld, qa.PARTS, ("top_k",)),
    "multihop": Kind(_multihop, qa.PARTS, ("top_k",)),
    "countdown": Kind(_countdown, countdown.PARTS),
    "gsm8k": Kind(_gsm8k, gsm8k.PARTS),
    "whereabouts": Kind(_whereabouts, whereabouts.REWARD_PARTS),
    "bfcl": Kind(_bfcl, scoring.PARTS),
    "keydoor": Kind(_keydoor, REWARD_PARTS),
    "frozenlake": Kind(_frozenlake, REWARD_PARTS),
    "sokoban": Kind(_sokoban, REWARD_PARTS),
    "gymnasium": Kind(_gymnasium, REWARD_PARTS),
    "http": Kind(_http, ()),
    "verifiers": Kind(_verifiers, ()),
}


def _check_names(config: ml_collections.ConfigDict, names: Sequence[str]) -> None:
    c, known = config.task, [*KINDS, MIXTURE, *TASKS]
    for name in names:
        if name not in known or (c.name == MIXTURE and name == MIXTURE):
            where = "task.mixture" if c.name == MIXTURE else "task.name"
            raise UserError(f"unknown task {name!r} in {where}; choose among {', '.join(known)}, or set task.file")
    if c.name == MIXTURE and not names:
        raise UserError("task.name is mixture, and task.mixture is empty; write e.g. ('hopworld=2', 'keydoor=1')")
    if c.name != MIXTURE and c.mixture:
        raise UserError(f"task.mixture is {c.mixture!r}, which only task 'mixture' reads, and task.name is {c.name!r}")


def _check_keys(config: ml_collections.ConfigDict, names: Sequence[str]) -> None:
    """Refuses keys that none of the tasks that are to run reads."""
    c, default = config.task, base.get_config().task
    kinds = [KINDS[name] for name in names if name in KINDS]
    parts = list(dict.fromkeys(part for kind in kinds for part in kind.parts))
    read = {key for kind in kinds for key in kind.keys}
    here = f"task.name is {c.name!r}" if c.name != MIXTURE else f"the tasks are {', '.join(names)}"
    for key, reader in (*((name, name) for name in KINDS), *((k, n) for n, kind in KINDS.items() for k in kind.keys)):
        if key in read or key in names or key not in c:
            continue
        mine, theirs = (dict(configs.flatten({key: of[key]})) for of in (c.to_dict(), default.to_dict()))
        for name, value in mine.items():
            if value != theirs[name]:
                raise UserError(f"task.{name} is {value!r}, which only task {reader!r} reads, and {here}")
    for name, weight in c.rewards.items():
        if name not in parts and weight != default.rewards[name]:
            raise UserError(
                f"task.rewards.{name} is {weight}, but task {', '.join(map(repr, names))} has no such reward part; it "
                f"has {', '.join(parts) or 'none that are weighted there'}"
            )
    if c.args and all(name in KINDS for name in names):
        raise UserError(f"task.args has {', '.join(c.args)}, which only a task of task.file reads, and {here}")


def _check_practice(config: ml_collections.ConfigDict, task: Task) -> None:
    """Practice in the warm start needs a split of that name."""
    c = config.warm_start
    if not config.warm_start_updates or c.run or not c.practice:
        return
    try:
        task.row("practice", 0)
    except ValueError as error:
        raise UserError(f"{task.name} has no split 'practice'; set warm_start.practice=0 ({error})") from error


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

"""From flags and configs to the parts of an evaluation."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
from absl import logging
from jax.sharding import Mesh

from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.envs.base import Task
from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.params import init_decoder
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.text.tokenizer import Tokenizer
from experiments import build, checks, tasks
from experiments.evaluation import policies
from experiments.evaluation.chunks import SECTIONS
from experiments.evaluation.modes import START, check_task, make_agent, parameters_of
from experiments.evaluation.policies import Source
from experiments.retrieval import LateDispatch
from experiments.sources import fit_devices, is_run, stored_config

HELD_OUT = "held_out"


@dataclasses.dataclass(frozen=True)
class Request:
    """Request of an evaluation; see the flags of `experiments.evaluate`.

    Attributes:
      modes: ways of answering to compare.
      named: whether somebody asked for just these; otherwise baselines that cannot be answered are left out.
    """

    modes: Sequence[str]
    splits: Sequence[str] = ()
    samples: int = 1
    temperature: float = 0.0
    out: str = ""
    questions: int | None = None
    baselines: str = START
    base: str = ""
    chunk: int = 128
    seed: int = 0
    named: bool = True

    def __post_init__(self) -> None:
        if self.samples > 1 and self.temperature == 0:
            raise UserError("with --temperature=0 all --samples of a question are the same; set e.g. --temperature=1")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The parts that all modes share.

    Attributes:
      config: of the evaluation, fitted to the devices, with the seed of the request.
      task: what is asked.
      tokenizer: of the policy.
      policy: its shape, adapters merged.
      mesh: what parameters are loaded on.
      engine: samples the responses.
      view: (parameters on `mesh`, {}) -> the decoder's on the engine's mesh.
      agents: each mode that is answered -> its agent.
      counts: split -> rows that are asked.
    """

    config: ml_collections.ConfigDict
    task: Task
    tokenizer: Tokenizer
    policy: DecoderConfig
    mesh: Mesh
    engine: Engine
    view: Callable[[Params, Params], Params]
    agents: Mapping[str, EnvLoop]
    counts: Mapping[str, int]


def resolve_sources(
    given: ml_collections.ConfigDict | None, source: str, request: Request
) -> tuple[ml_collections.ConfigDict, dict[str, Source], str]:
    """Resolve config and sources of an evaluation; `given` is not changed.

    Returns:
      the config of the evaluation, where the parameters come from that its modes need (START is absent where no mode
      can be answered that needs it), and the folder of the results.

    Raises:
      UserError: a mode needs parameters that nothing names; of modes that nobody named only for those of TRAINED.
    """
    if not source and given is not None and is_run(given.run_dir):
        source = given.run_dir
    config = policies.evaluated_config(given, source)
    of_run = is_run(source)
    trained_by = stored_config(source) if of_run or given is None else given
    sources = {}
    for role in dict.fromkeys(parameters_of(mode, request.baselines) for mode in request.modes):
        if role == START:
            try:
                sources[role] = policies.start(trained_by, request.base, source=source)
            except UserError as error:
                if request.base:
                    raise
                leave_out(request, [m for m in request.modes if parameters_of(m, request.baselines) == START], error)
        elif source:
            sources[role] = policies.checkpoint(trained_by if of_run else config, source)
        else:
            raise UserError(f"{config.run_dir}: no run there; name the trained policy by --checkpoint=RUN (or WEIGHTS)")
    out = request.out or (os.path.join(source, "evaluation") if of_run else f"{config.run_dir}_evaluation")
    return config, sources, out


def leave_out(request: Request, modes: Sequence[str], error: UserError) -> None:
    """Warn which modes are not answered, and why. Raise the error where modes were asked for by name."""
    if request.named:
        raise error
    logging.warning("left out: %s. %s", ", ".join(modes), error)


def set_up(config: ml_collections.ConfigDict, request: Request, modes: Sequence[str]) -> Setting:
    """The parts of an evaluation.

    Args:
      config: of the evaluation; it stays as it is.
      request: what is asked.
      modes: those of the request whose parameters there are.

    Raises:
      UserError: they do not fit each other; of modes that nobody named only for `agent`.
    """
    build.keep_programs(config)
    config = config.copy_and_resolve_references()
    config.seed = request.seed  # That of the run has done its work; here equal seeds ask equal questions.
    fit_devices(config)
    dispatch = LateDispatch()
    task = tasks.make_task(config, dispatch=dispatch)
    counts = rows_of_splits(config, task, request)
    tokenizer = build.tokenizer(config, task, resumes=True)
    agents = {}
    for mode in modes:
        try:
            check_task(task, task.row(next(iter(counts)), 0), [mode])
            agents[mode] = make_fitting_agent(mode, config, task, tokenizer)
        except UserError as error:
            if mode == "agent":
                raise
            leave_out(request, [mode], error)
    policy = policies.merge_adapters(build.policy(config, tokenizer))
    mesh = meshes.learner_mesh(1, jax.device_count(), 1)
    rollout_mesh = meshes.rollout_mesh(mesh, config.rollout.tensor)
    engine = build.engine(config, policy, rollout_mesh)
    dispatch.to = engine.dispatch
    view = build.rollout_view(policy, mesh, rollout_mesh)
    return Setting(config, task, tokenizer, policy, mesh, engine, view, agents, counts)


def make_fitting_agent(mode: str, config: ml_collections.ConfigDict, task: Task, tokenizer: Tokenizer) -> EnvLoop:
    """The agent of a mode. Raise UserError where the tokenizer does not allow it, or the budget has no room for it."""
    try:
        agent = make_agent(mode, config, task, tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from error
    if mode != "rag":  # What it opens with depends on what is found; an overflow is an outcome of its own.
        try:
            checks.check_openings(config, task, agent)
        except UserError as error:
            raise UserError(f"mode {mode}: {error}; or leave {mode} out of --modes") from error
    return agent


def rows_of_splits(config: ml_collections.ConfigDict, task: Task, request: Request) -> dict[str, int]:
    """Return the number of rows to ask of each split: all, `--questions`, or `eval.questions` of a procedural split.

    Raises:
      UserError: the task has no such split.
    """
    counts = {}
    for split in request.splits or (config.eval.split, HELD_OUT):
        try:
            task.row(split, 0)
        except ValueError as error:
            if not request.splits and split == HELD_OUT:
                continue
            raise UserError(f"--splits: {error}") from error
        size = task.size(split)
        wanted = request.questions or size or config.eval.questions
        if size is not None and wanted > size:
            logging.warning("split %s has %d questions, not %d; all are asked", split, size, wanted)
        counts[split] = wanted if size is None else min(wanted, size)
    return counts


def load(setting: Setting, source: Source) -> tuple[Params, str]:
    """The decoder's parameters on the engine's mesh, ready to sample, and their hash.

    Raises:
      UserError: they are not of the policy that is evaluated.
    """
    decoder = source.load(setting.tokenizer, setting.mesh)
    wanted = jax.eval_shape(lambda key: init_decoder(setting.policy, key), jax.random.key(0))
    if jax.tree.map(lambda x: x.shape, decoder) != jax.tree.map(lambda x: x.shape, wanted):
        raise UserError(f"{source.name}: has another shape than the policy that is evaluated; evaluate it by itself")
    digest = policies.digest(decoder)
    params = setting.view({"decoder": decoder}, {})
    setting.engine.compile(params)
    return params, digest


def request_record(setting: Setting, request: Request) -> dict[str, Any]:
    """Return what makes two evaluations the same one, as plain JSON, except for `policies` and `sources`."""
    resolved = configs.resolve(setting.config)
    return {
        "samples": request.samples,
        "temperature": request.temperature,
        "seed": request.seed,
        "chunk": request.chunk,
        "splits": dict(setting.counts),
        "config": {key: resolved[key] for key in SECTIONS if key in resolved},
    }

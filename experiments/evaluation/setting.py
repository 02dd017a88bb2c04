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
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.params import init_decoder
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.errors import UserError
from agentr1_jax.text.tokenizer import Tokenizer
from experiments import build, checks, tasks
from experiments.evaluation import policies
from experiments.evaluation.chunks import SECTIONS
from experiments.evaluation.modes import START, check_task, make_agent, parameters_of
from experiments.evaluation.policies import Source
from experiments.export_hf import stored_config
from experiments.retrieval import LateDispatch

HELD_OUT = "held_out"


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of an evaluation; see the flags of `experiments.evaluate`."""

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

    def __post_init__(self) -> None:
        if self.samples > 1 and self.temperature == 0:
            raise UserError("with --temperature=0 all --samples of a question are the same; set e.g. --temperature=1")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The parts that all modes share.

    Attributes:
      agents: mode -> agent.
      counts: split -> rows that are asked.
      view: (parameters of the learner, {}) -> the decoder's on the engine's mesh.
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


def whose(
    given: ml_collections.ConfigDict | None, source: str, request: Request
) -> tuple[ml_collections.ConfigDict, dict[str, Source], str]:
    """The config of the evaluation, where the parameters come from that its modes need, and the folder of the results.

    Raises:
      UserError: a mode needs parameters that nothing names.
    """
    if not source and given is not None and policies.is_run(given.run_dir):
        source = given.run_dir
    began_with = None if given is None else given.copy_and_resolve_references()
    config = policies.evaluated_config(given, source)
    of_run = policies.is_run(source)
    if of_run or began_with is None:
        began_with = stored_config(source)
    sources = {}
    for role in dict.fromkeys(parameters_of(mode, request.baselines) for mode in request.modes):
        if role == START:
            sources[role] = policies.start(began_with, request.base)
        elif source:
            sources[role] = policies.checkpoint(began_with if of_run else config, source)
        else:
            raise UserError(f"{config.run_dir}: no run there; name the trained policy by --checkpoint=RUN (or WEIGHTS)")
    out = request.out or (os.path.join(source, "evaluation") if of_run else f"{config.run_dir}_evaluation")
    return config, sources, out


def set_up(config: ml_collections.ConfigDict, request: Request) -> Setting:
    """The parts of an evaluation. Raises UserError if they do not fit each other."""
    if config.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    config = config.copy_and_resolve_references()
    config.seed = request.seed  # That of the run has done its work; here equal seeds ask equal questions.
    policies.fit_devices(config)
    dispatch = LateDispatch()
    task = tasks.make_task(config, dispatch=dispatch)
    counts = rows_of_splits(config, task, request)
    check_task(task, task.row(next(iter(counts)), 0), request.modes)
    tokenizer = build.tokenizer(config, task, resumes=True)
    try:
        agents = {mode: make_agent(mode, config, task, tokenizer) for mode in request.modes}
    except ValueError as error:
        raise UserError(str(error)) from error
    for mode in request.modes:
        if mode != "rag":  # What it opens with depends on what is found; an overflow is an outcome of its own.
            try:
                checks.check_openings(config, task, agents[mode])
            except UserError as error:
                raise UserError(f"mode {mode}: {error}; or leave {mode} out of --modes") from error
    policy = policies.merged(build.policy(config, tokenizer))
    mesh = meshes.learner_mesh(1, jax.device_count(), 1)
    rollout_mesh = meshes.rollout_mesh(mesh, config.rollout.tensor)
    engine = build.engine(config, policy, rollout_mesh)
    dispatch.to = engine.dispatch
    view = build.rollout_view(policy, mesh, rollout_mesh)
    return Setting(config, task, tokenizer, policy, mesh, engine, view, agents, counts)


def rows_of_splits(config: ml_collections.ConfigDict, task: Task, request: Request) -> dict[str, int]:
    """How many rows of each split are asked: all there are, `--questions`, or `eval.questions` of a procedural split.

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
    """What makes two evaluations the same one, as plain JSON, but for `policies` and `sources`."""
    resolved = configs.resolve(setting.config)
    return {
        "samples": request.samples,
        "temperature": request.temperature,
        "seed": request.seed,
        "chunk": request.chunk,
        "splits": dict(setting.counts),
        "config": {key: resolved[key] for key in SECTIONS if key in resolved},
    }

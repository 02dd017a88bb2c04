"""An evaluation from its request to its results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh
from rich.console import Console

from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.envs.base import Task
from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.params import init_decoder
from agentr1_jax.report.evaluation import quality_table
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.runner import TaskGroup, run_groups
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.runtime.monitoring import progress_bar
from agentr1_jax.runtime.processes import Dispatcher, StopRequest
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from agentr1_jax.train.settings import Settings
from agentr1_jax.trajectory import Trajectory
from agentr1_jax.trajectory_io import write_jsonl
from experiments.checks import check_openings, first_prompt
from experiments.evaluation import policies, results
from experiments.evaluation.chunks import SECTIONS, Chunk, chunks_of, claim, identities, with_facts
from experiments.evaluation.modes import START, check_mode, make_agent, role_of
from experiments.evaluation.policies import Source
from experiments.setup import (
    Config,
    change_config,
    complete,
    is_run,
    make_task,
    read_run,
    read_settings,
    use_compile_cache,
)

HELD_OUT = "held_out"


@dataclasses.dataclass(frozen=True)
class Request:
    """Request of an evaluation; see the flags of `experiments.evaluate`.

    Attributes:
      modes: ways of answering to compare.
      named: True if somebody asked for just these; otherwise baselines that cannot be answered are left out.
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

    def modes_of(self, role: str) -> list[str]:
        """Return the modes that use the parameters of a role, `TRAINED` or `START`."""
        return [mode for mode in self.modes if role_of(mode, self.baselines) == role]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The parts that all modes share.

    Attributes:
      request: what is asked.
      config: config of the evaluation as plain JSON, with the seed of the request.
      settings: that config, with meshes and slots that fit the devices.
      task: rows and environments.
      tokenizer: of the policy.
      policy: shape of the decoder, adapters merged.
      mesh: devices that parameters are loaded on.
      engine: rollout engine.
      rollout_params: (parameters on `mesh`, {}) -> the decoder's on the engine's mesh.
      agents: agent of each mode that is answered.
      counts: number of rows of each split that are asked.
    """

    request: Request
    config: Mapping[str, Any]
    settings: Settings
    task: Task
    tokenizer: Tokenizer
    policy: DecoderConfig
    mesh: Mesh
    engine: Engine
    rollout_params: Callable[[Params, Params], Params]
    agents: Mapping[str, EnvLoop]
    counts: Mapping[str, int]

    @property
    def record(self) -> dict[str, Any]:
        """The facts that make two evaluations the same one, as plain JSON, except for `policies` and `sources`."""
        return {
            "samples": self.request.samples,
            "temperature": self.request.temperature,
            "seed": self.request.seed,
            "chunk": self.request.chunk,
            "splits": dict(self.counts),
            "config": {key: self.config[key] for key in SECTIONS if key in self.config},
        }


def evaluate(config: Config | None, source: str, request: Request, console: Console) -> int:
    """Set an evaluation up, answer its chunks of questions, write its results.

    Args:
      config: config of `--config`; None without one.
      source: run folder or weights of `--checkpoint`; "" without one.
      request: what is asked.
      console: console that shows the figures.

    Returns:
      number of programs that were compiled after the first chunk; there should be none.

    Raises:
      UserError: the arguments do not fit each other, or the folder holds another evaluation.
    """
    config, sources, out = resolve_sources(config, source, request)
    evaluation = set_up(config, request, [mode for role in sources for mode in request.modes_of(role)])
    agents, record = evaluation.agents, evaluation.record
    if "agent" in agents:
        prompt = first_prompt(evaluation.settings, evaluation.task, agents["agent"])
        logging.info("%s", build.describe_prompt(*prompt, evaluation.tokenizer))
    chunks = {mode: chunks_of(out, mode, evaluation.counts, request.chunk) for mode in agents}
    compiles, recompiles, warm = CompileCounter(), 0, False
    with StopRequest() as stop, progress_display(chunks) as advance:
        for role, origin in sources.items():
            params, digest = load(evaluation, origin)
            agent = next(agents[mode] for mode in request.modes_of(role) if mode in agents)
            logging.info("%s", build.describe_policy(evaluation.settings, evaluation.policy, agent, origin.name))
            own = [mode for mode in request.modes_of(role) if mode in agents]
            names = {"policies": dict.fromkeys(own, digest), "sources": dict.fromkeys(own, origin.name)}
            record = claim(out, {**record, **names})
            for chunk in (chunk for mode in own for chunk in chunks[mode] if not chunk.is_complete):
                before = compiles.count
                if not answer(chunk, evaluation, params, stop, functools.partial(advance, chunk)):
                    console.print(f"stopped; the same command goes on with {out}", markup=False)
                    return recompiles
                compiled, warm = (compiles.count - before) * warm, True
                recompiles += compiled
                if compiled:
                    logging.warning("%d programs were compiled after warm-up", compiled)
    figures = results.write(out, evaluation.tokenizer, evaluation.config, record)
    console.print(quality_table(figures, title=out))
    look = f"Look at {out}/evaluation.md and {out}/report.html; all figures are in {out}/evaluation.json"
    console.print(look, markup=False, highlight=False)
    return recompiles


def resolve_sources(config: Config | None, source: str, request: Request) -> tuple[Config, dict[str, Source], str]:
    """Resolve config and sources of an evaluation; the argument `config` is not changed.

    Returns:
      the complete config of the evaluation, the source of the parameters of each role that its modes need (START is
      absent where no mode can be answered that needs it), and the folder of the results.

    Raises:
      UserError: a mode needs parameters that nothing names; of modes that nobody named only for those of TRAINED.
    """
    if not source and config is not None:
        run_dir = read_settings(config).run.run_dir
        source = run_dir if is_run(run_dir) else ""
    devices = jax.devices()
    base, config = config, complete(policies.find_config(config, source), devices)
    of_run, run_dir = is_run(source), read_settings(config).run.run_dir
    training = read_run(source) if of_run or base is None else complete(base, devices)
    sources = {}
    for role in dict.fromkeys(role_of(mode, request.baselines) for mode in request.modes):
        if role == START:
            try:
                sources[role] = policies.first_policy(training, request.base, source=source)
            except UserError as error:
                if request.base:
                    raise
                leave_out(request, request.modes_of(START), error)
        elif source:
            sources[role] = policies.trained_policy(training if of_run else config, source)
        else:
            raise UserError(f"{run_dir}: no run there; name the trained policy by --checkpoint=RUN (or WEIGHTS)")
    out = request.out or (os.path.join(source, "evaluation") if of_run else f"{run_dir}_evaluation")
    return config, sources, out


def leave_out(request: Request, modes: Sequence[str], error: UserError) -> None:
    """Warn which modes are not answered, and why. Raise the error where modes were asked for by name."""
    if request.named:
        raise error
    logging.warning("left out: %s. %s", ", ".join(modes), error)


def set_up(config: Config, request: Request, modes: Sequence[str]) -> Evaluation:
    """Make the parts of an evaluation.

    Args:
      config: config of the evaluation, complete; it is not changed.
      request: what is asked.
      modes: modes of the request whose parameters there are.

    Raises:
      UserError: they do not fit each other; of modes that nobody named only for `agent`.
    """
    config = change_config(config, {"seed": request.seed})  # Equal seeds of requests ask equal questions.
    settings = build.fit_devices(read_settings(config))
    use_compile_cache(settings)
    dispatcher = Dispatcher()
    task = make_task(settings, ToolMetrics(), dispatcher)
    counts = count_rows(settings, task, request)
    tokenizer = build.make_tokenizer(settings, task, resumes=True)
    agents = {}
    for mode in (mode for mode in request.modes if mode in modes):
        try:
            check_mode(mode, task, task.row(next(iter(counts)), 0))
            agents[mode] = make_fitting_agent(mode, settings, task, tokenizer)
        except UserError as error:
            if mode == "agent":
                raise
            leave_out(request, [mode], error)
    policy = policies.without_adapters(build.make_policy(settings, tokenizer))
    mesh = meshes.learner_mesh(1, jax.device_count(), 1)
    rollout_mesh = meshes.rollout_mesh(mesh, settings.rollout.tensor)
    engine = build.make_engine(settings, policy, rollout_mesh, dispatcher)
    return Evaluation(
        request=request,
        config=configs.resolve(config),
        settings=settings,
        task=task,
        tokenizer=tokenizer,
        policy=policy,
        mesh=mesh,
        engine=engine,
        rollout_params=build.make_rollout_params(policy, mesh, rollout_mesh),
        agents=agents,
        counts=counts,
    )


def make_fitting_agent(mode: str, settings: Settings, task: Task, tokenizer: Tokenizer) -> EnvLoop:
    """Make the agent of a mode. Raise UserError where the tokenizer does not allow it, or the budget has no room."""
    try:
        agent = make_agent(mode, settings, task, tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from error
    if mode != "rag":  # Its first prompt depends on what is found; an overflow is an outcome of its own.
        try:
            check_openings(settings, task, agent)
        except UserError as error:
            raise UserError(f"mode {mode}: {error}; or leave {mode} out of --modes") from error
    return agent


def count_rows(settings: Settings, task: Task, request: Request) -> dict[str, int]:
    """Return the number of rows to ask of each split: all, `--questions`, or `eval.questions` of a procedural split.

    Raises:
      UserError: the task has no such split.
    """
    counts = {}
    for split in request.splits or (settings.eval.split, HELD_OUT):
        try:
            task.row(split, 0)
        except ValueError as error:
            if not request.splits and split == HELD_OUT:
                continue
            raise UserError(f"--splits: {error}") from error
        size = task.size(split)
        wanted = request.questions or size or settings.eval.questions
        if size is not None and wanted > size:
            logging.warning("split %s has %d questions, not %d; all are asked", split, size, wanted)
        counts[split] = wanted if size is None else min(wanted, size)
    return counts


def load(evaluation: Evaluation, source: Source) -> tuple[Params, str]:
    """Load the decoder's parameters on the engine's mesh, ready to sample; also return their hash.

    Raises:
      UserError: they are not of the policy that is evaluated.
    """
    decoder = source.load(evaluation.tokenizer, evaluation.mesh)
    expected = jax.eval_shape(lambda key: init_decoder(evaluation.policy, key), jax.random.key(0))
    if jax.tree.map(lambda x: x.shape, decoder) != jax.tree.map(lambda x: x.shape, expected):
        raise UserError(f"{source.name}: has another shape than the policy that is evaluated; evaluate it by itself")
    digest = policies.hash_params(decoder)
    params = evaluation.rollout_params({"decoder": decoder}, {})
    evaluation.engine.compile(params)
    return params, digest


def answer(
    chunk: Chunk, evaluation: Evaluation, params: Params, stop: StopRequest, advance: Callable[[], None]
) -> bool:
    """Answer the questions of a chunk, calling `advance` after each, and write its file, in order of row and sample.

    Return False, without a file, if a stop was requested between two questions.
    """
    request, task = evaluation.request, evaluation.task
    rows = {index: task.row(chunk.split, index) for index in chunk.rows}
    groups = run_groups(
        evaluation.engine,
        params,
        evaluation.agents[chunk.mode],
        [
            TaskGroup(row, identities(chunk, index, task.name, request.seed, request.samples))
            for index, row in rows.items()
        ],
        sampling=SamplingConfig(request.temperature),
        policy_version=0,
        limits=evaluation.settings.attempt_limits,
    )
    trajectories: list[Trajectory] = []
    with contextlib.closing(groups):  # Ends what is still running.
        for group in groups:
            if stop.requested:
                return False
            trajectories += [with_facts(t, chunk, rows[t.group], task.name) for t in group]
            advance()
    write_jsonl(chunk.path, sorted(trajectories, key=lambda t: (t.group, t.sample)))
    return True


@contextlib.contextmanager
def progress_display(chunks: Mapping[str, Sequence[Chunk]]) -> Iterator[Callable[[Chunk], None]]:
    """Show the progress in questions; yield a function to call, as each is answered, with the chunk that it is of."""
    every = [chunk for of_mode in chunks.values() for chunk in of_mode]
    done = sum(len(chunk.rows) for chunk in every if chunk.is_complete)
    with progress_bar("evaluate", done, sum(len(chunk.rows) for chunk in every), True) as show:

        def advance(chunk: Chunk) -> None:
            nonlocal done
            done += 1
            show(done, f"questions; {chunk.mode} on {chunk.split}")

        yield advance

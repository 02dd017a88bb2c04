"""The first half of the circle: roll out and evaluate; `learning.py` is the other half."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import ml_collections
import numpy as np
from jax.sharding import Mesh

from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import ScriptedSession
from agentr1_jax.envs.base import Row, Task
from agentr1_jax.envs.curriculum import limit_steps, parse_curriculum
from agentr1_jax.envs.rewards import totals
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout import runner
from agentr1_jax.rollout.background import BackgroundEngine, wait
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.runner import GroupBatch, TaskGroup, run_groups
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.seeds import generator
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.trajectory import POLICIES, Outcome, Step, Trajectory
from experiments import build

PRACTICE = "practice"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run that do not change while it runs.

    Attributes:
      frozen: parameters that LoRA does not train; empty without it.
      view: (trained, frozen parameters) -> the policy's on the rollout mesh.
      tools: counts what tools do.
    """

    config: ml_collections.ConfigDict
    task: Task
    tokenizer: Tokenizer
    agent: EnvLoop
    policy: DecoderConfig
    frozen: Params
    engine: Engine
    learner_mesh: Mesh
    view: Callable[[Params, Params], Params]
    tools: ToolMetrics


def demonstrations(run: Run) -> list[Trajectory]:
    """This process's share of expert trajectories, some of them on the task's practice split where it has one."""
    c = run.config.warm_start
    rng = generator(run.config.seed, "practice")
    practice = rng.random(c.demonstrations) < c.practice
    indices = build.dealt(c.demonstrations)
    names = build.identities(run.task, run.config.seed, "demonstration", indices, indices, 1)

    async def play() -> list[Trajectory]:
        out = []
        for index, (identity,) in zip(indices, names, strict=True):
            row = run.task.row(PRACTICE if practice[index] else "train", index)
            session = ScriptedSession(
                identity, run.task.expert(row, identity.seed), run.tokenizer, run.agent.call_format
            )
            session.begin(row)
            await run.agent.run(session, row)
            out.append(session.trajectory())
        return out

    return asyncio.run(play())


def documents(run: Run) -> list[Trajectory]:
    """This process's share of the task's texts, in pieces; each is a trajectory of one step that says it.

    A piece begins and ends with the stop token, as a piece of a longer text does too.
    """
    c, stop = run.config.pretrain, run.tokenizer.stop_id
    texts = run.task.texts(c.texts)
    pieces = [
        np.asarray([*ids[at : at + c.tokens - 2], stop], np.int32)
        for ids in (run.tokenizer.encode_data(texts[i]) for i in build.dealt(len(texts)))
        for at in range(0, len(ids), c.tokens - 2)
    ]
    prompt = np.asarray([stop], np.int32)
    return [
        Trajectory(
            uid=f"text/{i:06d}",
            group=i,
            sample=0,
            task=run.task.name,
            seed=0,
            steps=(Step(prompt, piece, np.zeros(len(piece), np.float32), reward=0.0),),
            outcome=Outcome.ENV_DONE,
        )
        for i, piece in enumerate(pieces)
    ]


def groups_of(
    run: Run, phase: str, split: str, places: Sequence[int], visits: Sequence[int], samples: int
) -> list[TaskGroup]:
    """Groups of a batch: their places in it, and the running indices of their rows.

    All at once: a row may come from a server, and nobody waits for one within the engine's loop.
    """
    identities = build.identities(run.task, run.config.seed, phase, places, visits, samples)
    return [TaskGroup(row_of(run, split, visit), names) for visit, names in zip(visits, identities, strict=True)]


def row_of(run: Run, split: str, visit: int) -> Row | Exception:
    """The row of a running index; where it is trained on, with the steps that a curriculum allows.

    An exception stands for a row that cannot be made: its trajectories end in `env_failure`.
    """
    try:
        row = run.task.row(split, visit)
    except Exception as error:
        return error
    if split != "train":
        return row
    stages = parse_curriculum(run.config.task.curriculum, run.config.budget.max_steps)
    return limit_steps(row, stages, visit, run.config.rollout.groups)


def compile_engine(run: Run, params: Params) -> None:
    """Compiles what the engine can need, with the learner's parameters."""
    run.engine.compile(run.view(params, run.frozen))


def roll_out(
    run: Run,
    params: Params,
    phase: str,
    split: str,
    visits: Sequence[int],
    *,
    samples: int,
    sampling: SamplingConfig,
    version: int,
    refills: Sequence[int] = (),
    complete: list[list[Trajectory]] | None = None,
    stop: Callable[[], bool] = lambda: False,
    within: BackgroundEngine | None = None,
) -> tuple[list[Trajectory], list[Trajectory]] | None:
    """This process's share of the groups with the given running indices.

    Args:
      run: the run's parts.
      params: of the learner.
      phase: part of the names of the trajectories, and of their seeds.
      split: whose rows.
      visits: running indices of the groups.
      samples: of each group.
      sampling: the distribution of responses.
      version: of the policy.
      refills: running indices of groups to sample in place of those without signal; this process takes its share of
        them, in order, as far as it needs.
      complete: groups that were sampled before; those that become complete are added, also where it is broken off.
      stop: asked every now and then whether to break off.
      within: an engine that rolls out already, with the parameters wanted; else it is opened here.

    Returns:
      trajectories sorted by (group, sample), and those of groups without signal where there are refills; None where it
      was broken off.
    """
    places = build.dealt(len(visits))
    spare = [len(visits) + i for i in build.dealt(len(refills))]
    complete = [] if complete is None else complete
    have = {group[0].group for group in complete}
    everywhere, order = [*visits, *refills], [place for place in (*places, *spare) if place not in have]
    tasks = groups_of(run, phase, split, order, [everywhere[place] for place in order], samples)
    batch = GroupBatch(len(places), tasks, dynamic_sampling=bool(refills), complete=complete)

    def sample(background: BackgroundEngine) -> bool:
        limits = build.limits(run.config)
        future = runner.start_batch(background, run.agent, batch, sampling=sampling, limits=limits)
        return wait(future, stop) is not None

    if within:
        return batch.trajectories() if sample(within) else None
    with BackgroundEngine(run.engine, run.view(params, run.frozen), version) as background:
        done = sample(background)
    return batch.trajectories() if done else None


def with_greedy_rewards(
    run: Run, params: Params, trajectories: Sequence[Trajectory], visits: Sequence[int], *, version: int
) -> list[Trajectory]:
    """The trajectories with the reward of the greedy rollout of their row as `greedy_return`, where it did not
    fail; `visits` is where group 0 of the batch began.

    Each process makes those of its own groups.
    """
    view = run.view(params, run.frozen)  # A program of all processes, also of one that has no group here.
    groups = sorted({t.group for t in trajectories})
    names = build.identities(run.task, run.config.seed, "greedy", groups, [visits[0] + g for g in groups], 1)
    rows = [TaskGroup(row_of(run, "train", visits[0] + g), own) for g, own in zip(groups, names, strict=True)]
    greedy = run_groups(
        run.engine,
        view,
        run.agent,
        rows,
        sampling=SamplingConfig(0.0),
        policy_version=version,
        limits=build.limits(run.config),
    )
    rewards = {t.group: t.total_reward for (t,) in greedy if POLICIES[t.outcome].reward == "use"}
    return [dataclasses.replace(t, greedy_return=rewards[t.group]) if t.group in rewards else t for t in trajectories]


def means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the trajectories of all processes: metrics, reward, steps, tokens, outcomes, and `em` by kind."""
    sums: dict[str, list[float]] = {}

    def add(key: str, value: float) -> None:
        total = sums.setdefault(key, [0.0, 0])
        total[0], total[1] = total[0] + value, total[1] + 1

    for t in trajectories:
        for key, value in t.metrics.items():
            add(key, value)
        if "em" in t.metrics and "kind" in t.row:
            add(f"em_{t.row['kind']}", t.metrics["em"])
        if "em" in t.metrics and "task" in t.row:
            add(f"em_{t.row['task']}", t.metrics["em"])
        if POLICIES[t.outcome].reward == "use":
            add("reward", t.total_reward)
            for part, value in totals(step.raw_reward_parts for step in t.steps).items():
                add(f"reward/{part}", value)
        add("steps", len(t.steps))
        add("response_tokens", sum(len(s.response_ids) for s in t.steps))
        for outcome in {u.outcome for u in trajectories}:
            add(f"outcome/{outcome}", float(t.outcome is outcome))
    joined: dict[str, list[float]] = {}
    for part in processes.all_gather_json(sums):
        for key, (total, count) in part.items():
            have = joined.setdefault(key, [0.0, 0])
            have[0], have[1] = have[0] + total, have[1] + count
    everything = joined.get("steps", [0.0, 0])[1]
    # A process that saw no such outcome adds nothing to its count.
    return {
        key: total / max(everything if key.startswith("outcome/") else count, 1)
        for key, (total, count) in sorted(joined.items())
    }


def count_anew(run: Run) -> None:
    """Engine and tools count from zero."""
    run.engine.reset_counters()
    run.tools.reset()


def rollout_metrics(run: Run) -> dict[str, float]:
    """What engine and tools did since they counted anew, as metrics of this process."""
    return {
        **run.tools.metrics(),
        **run.engine.counters.metrics(),
    }

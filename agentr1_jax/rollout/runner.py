"""Runner of groups: samples many trajectories on one engine, and yields each group when it is complete."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import itertools
import math
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from typing import Any

import numpy as np
from absl import logging

from agentr1_jax.agents.base import Agent, Completion, Row
from agentr1_jax.agents.boundary import BoundaryError
from agentr1_jax.agents.isolation import AgentTimeout, Isolation
from agentr1_jax.agents.session import Identity, RecordedSession
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.background import BackgroundEngine
from agentr1_jax.rollout.config import AttemptLimits, SamplingConfig
from agentr1_jax.rollout.engine import Engine, RequestError
from agentr1_jax.rollout.scheduler import SlotLease
from agentr1_jax.trajectory import POLICIES, Outcome, Trajectory

RETRIED = (Outcome.TOOL_FAILURE, Outcome.ENV_FAILURE)
"""Failures of the infrastructure, after which the same row and seed are tried again."""

ONE_ATTEMPT = AttemptLimits()

Group = list[Trajectory]
"""Trajectories sampled from one task row, in order of sample."""


@dataclasses.dataclass(frozen=True)
class TaskGroup:
    """Group to be sampled.

    Attributes:
      row: the task row, or the exception of making it: then every trajectory ends in `env_failure`.
      identities: names and seeds of the trajectories.
    """

    row: Row | Exception
    identities: Sequence[Identity]


class EngineSession(RecordedSession):
    """A session whose responses come from the engine."""

    def __init__(self, engine: Engine, lease: SlotLease, identity: Identity, sampling: SamplingConfig) -> None:
        super().__init__(identity)
        self._engine = engine
        self._lease = lease
        self._sampling = sampling

    async def respond(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]]) -> Completion:
        key = np.random.SeedSequence([self.seed, len(self._steps)]).generate_state(2, np.uint32)
        return await self._engine.generate(
            self._lease, prompt_ids, max_tokens, sampling=self._sampling, key=key, stop=stop
        )


def run_groups(
    engine: Engine, params: Params, agent: Agent, tasks: Iterable[TaskGroup], *, policy_version: int, **options: Any
) -> Generator[Group, None, None]:
    """Open the engine, sample groups, and yield each when it is complete.

    Args:
      engine: must have no stream open.
      params: decoder parameters on the engine's mesh.
      agent: workflow of one trajectory.
      tasks: groups to sample; taken when they are started.
      policy_version: version of the parameters, recorded in every step.
      **options: of `sample_groups`.
    """
    return engine.stream(params, lambda: sample_groups(engine, agent, tasks, **options), policy_version)


async def sample_groups(
    engine: Engine,
    agent: Agent,
    tasks: Iterable[TaskGroup],
    *,
    sampling: SamplingConfig,
    count: int | None = None,
    accept: Callable[[Group], bool] = lambda group: True,
    limits: AttemptLimits = ONE_ATTEMPT,
    on_finish: Callable[[Trajectory], None] = lambda trajectory: None,
) -> AsyncIterator[Group]:
    """Sample groups, and yield each when it is complete.

    No group is ever aborted because others were faster, which would favour short trajectories. For each group that
    `accept` refuses, the next one of `tasks` is started.

    Args:
      engine: with an open stream, in whose loop this runs.
      agent: workflow of one trajectory.
      tasks: groups to sample; taken when they are started.
      sampling: distribution of the responses.
      count: number of groups to accept; None for all tasks.
      accept: whether a complete group counts towards `count`; it is yielded in any case.
      limits: attempts and seconds of each trajectory.
      on_finish: called with each trajectory when it ends.

    Yields:
      complete groups, sorted by sample. What an agent, environment or tool raises ends its own trajectory only, as
      `env_failure` (`engine_failure` where the engine refused its request), with the error in `info`.
    """
    source = iter(tasks)
    running: set[asyncio.Task[Group]] = set()
    isolation = Isolation()
    accepted = 0

    def start(most: int | None) -> None:
        for task in itertools.islice(source, most):
            running.add(asyncio.create_task(run(task)))

    async def run(task: TaskGroup) -> Group:
        episodes = (episode(task.row, identity) for identity in task.identities)
        return sorted(await asyncio.gather(*episodes), key=lambda t: t.sample)

    async def episode(row: Row | Exception, identity: Identity) -> Trajectory:
        trajectory = await _episode(engine, isolation, agent, row, identity, sampling, limits)
        on_finish(trajectory)
        return trajectory

    try:
        start(count)
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for group in sorted(done, key=lambda group: group.result()[0].group):
                running.discard(group)
                accepted += accept(group.result())
                if count is not None:
                    start(max(count - accepted - len(running), 0))
                yield group.result()
    finally:
        await isolation.close(running)


@dataclasses.dataclass
class GroupBatch:
    """Groups of one batch, as far as they are sampled.

    Attributes:
      size: number of groups to sample; with `dynamic_sampling`, zero-variance groups do not count.
      tasks: groups that may be sampled, in order, without those in `complete`; those that replace zero-variance groups
        come last.
      dynamic_sampling: whether zero-variance groups are replaced by further ones of `tasks`.
      complete: complete groups, including those from before an interruption. Sampling adds to it, also where it is
        aborted later.
    """

    size: int
    tasks: Sequence[TaskGroup]
    dynamic_sampling: bool = False
    complete: list[Group] = dataclasses.field(default_factory=list)

    def accept(self, group: Group) -> bool:
        """Return whether a complete group counts towards the size."""
        return not self.dynamic_sampling or not is_zero_variance(group)

    def trajectories(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """Return the trajectories of accepted and of zero-variance groups, each sorted by (group, sample)."""
        accepted: list[Trajectory] = []
        zero_variance: list[Trajectory] = []
        for group in sorted(self.complete, key=lambda group: group[0].group):
            (accepted if self.accept(group) else zero_variance).extend(group)
        return accepted, zero_variance


def start_batch(
    background: BackgroundEngine,
    agent: Agent,
    batch: GroupBatch,
    *,
    sampling: SamplingConfig,
    limits: AttemptLimits = ONE_ATTEMPT,
) -> concurrent.futures.Future[list[Group]]:
    """Start sampling the missing groups of a batch on an engine that rolls out in the background.

    Args:
      background: the engine.
      agent: workflow of one trajectory.
      batch: the groups; its `complete` grows as groups become complete.
      sampling: distribution of the responses.
      limits: attempts and seconds of each trajectory.

    Returns:
      future that is done when the batch is complete, and raises what made it impossible.
    """
    count = max(batch.size - sum(map(batch.accept, batch.complete)), 0)

    async def sample() -> AsyncIterator[Group]:
        groups = sample_groups(
            background.engine,
            agent,
            batch.tasks,
            sampling=sampling,
            count=count,
            accept=batch.accept,
            limits=limits,
        )
        async for group in groups:
            batch.complete.append(group)
            yield group

    return background.start(sample)


async def _episode(
    engine: Engine,
    isolation: Isolation,
    agent: Agent,
    row: Row | Exception,
    identity: Identity,
    sampling: SamplingConfig,
    limits: AttemptLimits,
) -> Trajectory:
    """Sample one trajectory, with further attempts after failures of the infrastructure."""
    lease = await engine.acquire((identity.group, identity.sample))
    try:
        failures: list[str] = []
        for attempt in range(limits.attempts):
            session = EngineSession(engine, lease, identity, sampling)
            trajectory = await _attempt(isolation, agent, session, row, limits.seconds)
            if POLICIES[trajectory.outcome].training != "drop":
                break
            failures.append(f"{trajectory.outcome}: {trajectory.info.get('error', 'no details')}")
            logging.warning("%s, attempt %d of %d: %s", identity.uid, attempt + 1, limits.attempts, failures[-1])
            if trajectory.outcome not in RETRIED:
                break
        return (
            dataclasses.replace(trajectory, info={**trajectory.info, "failures": failures}) if failures else trajectory
        )
    finally:
        engine.release(lease)


async def _attempt(
    isolation: Isolation, agent: Agent, session: EngineSession, row: Row | Exception, seconds: float | None
) -> Trajectory:
    """Run one attempt. A bad rollout is data, not a crash."""
    error = await isolation.run(agent, session, row, seconds)
    if isinstance(error, RequestError):
        return session.fail(Outcome.ENGINE_FAILURE, error)
    if error is not None and not isinstance(error, AgentTimeout):
        return session.fail(Outcome.ENV_FAILURE, error)
    try:
        if error is not None and not session.is_finished:
            if not session.steps:
                raise TimeoutError(f"no step within {seconds} s")
            session.abort(Outcome.TIME_LIMIT, str(error))
        return session.trajectory()
    except (RuntimeError, TimeoutError, BoundaryError) as fault:
        return session.fail(Outcome.ENV_FAILURE, fault)


def is_zero_variance(group: Sequence[Trajectory]) -> bool:
    """Return whether all trained trajectories of a group have equal returns, so that comparing them teaches nothing."""
    returns = {t.total_reward for t in group if POLICIES[t.outcome].training != "drop"}
    return len({r for r in returns if math.isfinite(r)}) <= 1

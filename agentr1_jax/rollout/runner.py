"""Running many trajectories on one engine: groups of samples of one task row, handed out as they are complete."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from agentr1_jax.agents.base import Agent, Completion, Row
from agentr1_jax.agents.boundary import BoundaryError
from agentr1_jax.agents.isolation import AgentTimeout, Isolation
from agentr1_jax.agents.session import Identity, RecordedSession
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.engine import Engine, RequestError
from agentr1_jax.rollout.lines import Ticket
from agentr1_jax.rollout.sampling import Sampling
from agentr1_jax.trajectory import POLICIES, Outcome, Trajectory

RETRIED = (Outcome.TOOL_FAILURE, Outcome.ENV_FAILURE)
"""Failures of the infrastructure: the same row and seed may do better at the next attempt."""


@dataclasses.dataclass(frozen=True)
class Group:
    """A task row and its trajectories.

    Attributes:
      row: the task row, or what making it raised: then every trajectory ends in `env_failure`.
      identities: names and seeds of the trajectories.
    """

    row: Row | Exception
    identities: Sequence[Identity]


@dataclasses.dataclass(frozen=True)
class Limits:
    """When the runner gives up on a trajectory.

    Attributes:
      attempts: of a trajectory that ends in one of `RETRIED`; the last one stands.
      seconds: an attempt may take, tools and waiting for slots included; None for no limit. An agent may keep to limits
        of its own; this one also ends those that hang.
    """

    attempts: int = 1
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"rollout.attempts is {self.attempts}; it must be at least 1")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"rollout.seconds is {self.seconds}; it must be positive, or None")


class EngineSession(RecordedSession):
    """A session whose responses come from the engine."""

    def __init__(self, engine: Engine, ticket: Ticket, identity: Identity, sampling: Sampling) -> None:
        super().__init__(identity)
        self._engine = engine
        self._ticket = ticket
        self._sampling = sampling

    async def respond(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]]) -> Completion:
        key = np.random.SeedSequence([self.seed, len(self._steps)]).generate_state(2, np.uint32)
        return await self._engine.generate(
            self._ticket, prompt_ids, max_tokens, sampling=self._sampling, key=key, stop=stop
        )


def run_groups(
    engine: Engine, params: Params, agent: Agent, groups: Iterable[Group], *, policy_version: int, **options: Any
) -> Iterator[list[Trajectory]]:
    """Opens the engine, samples groups, and yields them as they become complete; see `sample_groups` for the rest.

    Args:
      engine: its lines are shared by all trajectories.
      params: decoder parameters on the engine's mesh.
      agent: the workflow of one trajectory.
      groups: rows and identities; taken as needed.
      policy_version: of the parameters; recorded in every step.
      **options: of `sample_groups`.
    """
    return engine.stream(params, lambda: sample_groups(engine, agent, groups, **options), policy_version)


async def sample_groups(
    engine: Engine,
    agent: Agent,
    groups: Iterable[Group],
    *,
    sampling: Sampling,
    wanted: int | None = None,
    keep: Callable[[Sequence[Trajectory]], bool] = lambda group: True,
    limits: Limits = Limits(),
    on_finish: Callable[[Trajectory], None] = lambda trajectory: None,
) -> AsyncIterator[list[Trajectory]]:
    """Samples a group of trajectories for each row, and yields the groups as they become complete.

    No group is ever broken off because others were faster: that would favour the short. Where `keep` refuses a group,
    the next one of `groups` is started in its place.

    Args:
      engine: with an open stream, in whose loop this runs.
      agent: the workflow of one trajectory.
      groups: rows and identities; taken as needed.
      sampling: the distribution of responses.
      wanted: how many groups to keep; None for all there are.
      keep: whether a complete group counts as one of those; it is yielded in any case.
      limits: of attempts and time.
      on_finish: called with each trajectory as it ends.

    Yields:
      complete groups, sorted by sample. What an agent, environment or tool raises ends its own trajectory only, as
      `env_failure` (`engine_failure` where the engine refused its request), with the error in `info`.
    """
    source = iter(groups)
    tasks: set[asyncio.Task[list[Trajectory]]] = set()
    isolation = Isolation()
    kept = 0

    def start(count: int | None) -> None:
        while count is None or count > 0:
            group = next(source, None)
            if group is None:
                return
            tasks.add(asyncio.create_task(run(group)))
            count = None if count is None else count - 1

    async def run(group: Group) -> list[Trajectory]:
        episodes = (episode(group.row, identity) for identity in group.identities)
        return sorted(await asyncio.gather(*episodes), key=lambda t: t.sample)

    async def episode(row: Row | Exception, identity: Identity) -> Trajectory:
        trajectory = await _episode(engine, isolation, agent, row, identity, sampling, limits)
        on_finish(trajectory)
        return trajectory

    try:
        start(wanted)
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: task.result()[0].group):
                tasks.discard(task)
                kept += keep(task.result())
                if wanted is not None:
                    start(wanted - kept - len(tasks))
                yield task.result()
    finally:
        await isolation.close(tasks)


async def _episode(
    engine: Engine,
    isolation: Isolation,
    agent: Agent,
    row: Row | Exception,
    identity: Identity,
    sampling: Sampling,
    limits: Limits,
) -> Trajectory:
    """One trajectory, tried again where the infrastructure failed it."""
    ticket = await engine.acquire((identity.group, identity.sample))
    try:
        failures: list[str] = []
        for attempt in range(limits.attempts):
            session = EngineSession(engine, ticket, identity, sampling)
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
        engine.release(ticket)


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
        if error is not None and not session.finished:
            if not session.steps:
                raise TimeoutError(f"no step within {seconds} s")
            session.abort(Outcome.TIME_LIMIT, str(error))
        return session.trajectory()
    except (RuntimeError, TimeoutError, BoundaryError) as fault:
        return session.fail(Outcome.ENV_FAILURE, fault)


def signal(group: Sequence[Trajectory]) -> bool:
    """Whether a group can teach anything to a scheme that compares its members: their returns differ."""
    returns = {t.total_reward for t in group if POLICIES[t.outcome].training != "drop"}
    return len({r for r in returns if math.isfinite(r)}) > 1


def outcome_counts(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """How often each outcome occurred."""
    return dict(collections.Counter(str(t.outcome) for t in trajectories))

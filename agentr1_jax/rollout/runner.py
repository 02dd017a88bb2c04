"""Runner of groups: an engine in a thread of its own, and the groups of trajectories that are sampled on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

import numpy as np
from absl import logging

from agentr1_jax.agents import event_loop
from agentr1_jax.agents.boundary import BoundaryError
from agentr1_jax.agents.session import Agent, Completion, Identity, Session
from agentr1_jax.envs.base import Row
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.config import AttemptLimits, SamplingConfig
from agentr1_jax.rollout.device import ResponseRequest
from agentr1_jax.rollout.engine import Engine, RequestError
from agentr1_jax.rollout.scheduler import Lease
from agentr1_jax.trajectory import POLICIES, Outcome, Trajectory

RETRIED = (Outcome.TOOL_FAILURE, Outcome.ENV_FAILURE)
"""Failures of the infrastructure, after which the same row and seed are tried again."""

ONE_ATTEMPT = AttemptLimits()

CLOSE_SECONDS = 10.0
"""Time in which user code has to leave the event loop at its end; more than `event_loop.end_task` takes."""
POLL_SECONDS = 0.2
"""Interval at which `wait` asks whether to stop."""

CANCELLED = "an environment, tool or agent has cancelled tasks that are not its own"

T = TypeVar("T")

Group = list[Trajectory]
"""Trajectories sampled from one task row, in order of sample."""


class BackgroundEngine(contextlib.AbstractContextManager["BackgroundEngine"]):
    """An open engine in a thread of its own, to which other threads give work.

    The parameters must not be donated elsewhere: the engine needs a copy of its own. Where the learner uses the same
    devices, its programs must go through `engine.dispatcher.call`.
    """

    def __init__(self, engine: Engine, params: Params, version: int) -> None:
        self.engine = engine
        self._unfinished: set[concurrent.futures.Future[Any]] = set()
        self._opened: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._aborts = False
        self._agents_ended, self._engine_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(params, version), name="rollouts", daemon=True)
        self._thread.start()
        self._loop = self._opened.result()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the loop of the engine.

        The future of its result raises the exception of the coroutine, or of the engine beneath it.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        async def run() -> None:
            try:
                future.set_result(await work)
            except asyncio.CancelledError:
                if self._aborts:
                    raise  # `_serve` tells the waiter why.
                future.set_exception(RuntimeError(CANCELLED))
            except BaseException as error:
                future.set_exception(error)
            self._unfinished.discard(future)

        self._unfinished.add(future)
        try:
            self._call(lambda: self._tasks.create_task(run()))
        except RuntimeError:
            work.close()
            raise
        return future

    def adopt(self, params: Params, version: int) -> None:
        """Sample with other parameters as `EngineConfig.adopt` says; see `Engine.adopt`."""
        self._call(lambda: self.engine.adopt(params, version))

    def _call(self, function: Callable[[], object]) -> None:
        """Call a function in the loop of the engine."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError as error:
            raise RuntimeError("the engine is closed; see the error of its earlier work") from error

    def close(self) -> None:
        """Abort the work in progress, and free the cache.

        Where user code blocks the event loop for `CLOSE_SECONDS`, the thread is left behind: the log says where it is,
        and the engine cannot be used again.
        """
        with contextlib.suppress(RuntimeError):  # It has ended.
            self._call(self._stop.set)
        if self._agents_ended.wait(CLOSE_SECONDS):
            self._engine_closed.wait()  # Device programs may take their time.
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            stack = traceback.format_stack(sys._current_frames().get(self._thread.ident or 0), limit=4)
            logging.error(
                "an environment, tool or agent blocks the event loop for %g s, and is left behind there:\n%s",
                *(CLOSE_SECONDS, "".join(stack).rstrip()),
            )

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self, params: Params, version: int) -> None:
        ended: BaseException = concurrent.futures.CancelledError("the engine was closed")
        try:
            event_loop.run(self._run(params, version))
        except asyncio.CancelledError:
            if not self._stop.is_set():
                ended = RuntimeError(CANCELLED)
        except BaseException as error:
            ended = error
        self._agents_ended.set()
        self._engine_closed.set()
        if not self._opened.done():
            self._opened.set_exception(ended)
        for future in list(self._unfinished):
            if not future.done():
                future.set_exception(ended)

    async def _run(self, params: Params, version: int) -> None:
        self._stop = asyncio.Event()
        async with contextlib.AsyncExitStack() as ends:  # What is entered last ends first.
            ends.callback(self._engine_closed.set)
            await ends.enter_async_context(self.engine.open(params, version))
            ends.callback(self._agents_ended.set)
            self._tasks = await ends.enter_async_context(asyncio.TaskGroup())
            ends.callback(setattr, self, "_aborts", True)
            self._opened.set_result(asyncio.get_running_loop())
            await self._stop.wait()
            raise asyncio.CancelledError  # Aborts the tasks of the group.


def wait(future: concurrent.futures.Future[T], stop: Callable[[], bool]) -> T | None:
    """Wait for the result of work in another thread; return None if `stop` returned True first."""
    while not stop():
        if concurrent.futures.wait([future], POLL_SECONDS).done:
            return future.result()
    return None


@dataclasses.dataclass(frozen=True)
class TaskGroup:
    """Group to be sampled.

    Attributes:
      row: the task row, or the exception of making it: then every trajectory ends in `env_failure`.
      identities: names and seeds of the trajectories.
    """

    row: Row | BaseException
    identities: Sequence[Identity]


class AgentTimeout(Exception):
    """An agent did not end within its time."""


class EngineSession(Session):
    """A session whose responses come from the engine."""

    def __init__(self, engine: Engine, lease: Lease, identity: Identity, sampling: SamplingConfig) -> None:
        super().__init__(identity)
        self._engine = engine
        self._lease = lease
        self._sampling = sampling

    async def respond(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]]) -> Completion:
        key = np.random.SeedSequence([self.seed, len(self._steps)]).generate_state(2, np.uint32)
        request = ResponseRequest(prompt_ids, max_tokens, self._sampling, key, stop)
        return await self._engine.generate(self._lease, request)


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


def is_zero_variance(group: Sequence[Trajectory]) -> bool:
    """Return whether all trained trajectories of a group have equal returns, so that comparing them teaches nothing."""
    returns = {t.total_reward for t in group if POLICIES[t.outcome].training != "drop"}
    return len({r for r in returns if math.isfinite(r)}) <= 1


def run_groups(
    engine: Engine,
    params: Params,
    agent: Agent,
    tasks: Sequence[TaskGroup],
    *,
    sampling: SamplingConfig,
    policy_version: int,
    limits: AttemptLimits = ONE_ATTEMPT,
) -> Generator[Group, None, None]:
    """Open the engine, sample groups, and yield each when it is complete; see `start_batch`."""
    complete: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
    with BackgroundEngine(engine, params, policy_version) as background:
        batch = GroupBatch(len(tasks), tasks)
        work = start_batch(background, agent, batch, sampling=sampling, limits=limits, on_complete=complete.put)
        work.add_done_callback(lambda _: complete.put(None))
        while (group := complete.get()) is not None:
            yield group
        work.result()


def start_batch(
    background: BackgroundEngine,
    agent: Agent,
    batch: GroupBatch,
    *,
    sampling: SamplingConfig,
    limits: AttemptLimits = ONE_ATTEMPT,
    on_complete: Callable[[Group], object] = lambda group: None,
) -> concurrent.futures.Future[list[Group]]:
    """Start sampling the missing groups of a batch on an engine that rolls out in the background.

    No group is ever aborted because others were faster, which would favour short trajectories. In place of each group
    that the batch does not accept, the next one of its tasks is started. What an agent, environment or tool raises ends
    its own trajectory only, as `env_failure` (`engine_failure` where the engine refused its request), with the error in
    `info`.

    Args:
      background: the engine.
      agent: workflow of one trajectory.
      batch: the groups; its `complete` grows as groups become complete, each sorted by sample.
      sampling: distribution of the responses.
      limits: attempts and seconds of each trajectory.
      on_complete: called with each complete group, in the thread of the engine.
    """

    async def sample_group(task: TaskGroup) -> Group:
        episodes = (
            _episode(background.engine, agent, task.row, identity, sampling, limits) for identity in task.identities
        )
        return sorted(await asyncio.gather(*episodes), key=lambda t: t.sample)

    async def sample() -> list[Group]:
        tasks = iter(batch.tasks)
        running: set[asyncio.Task[Group]] = set()
        try:
            while True:
                missing = batch.size - sum(map(batch.accept, batch.complete)) - len(running)
                running |= {asyncio.create_task(sample_group(t)) for t in itertools.islice(tasks, max(missing, 0))}
                if not running:
                    return batch.complete
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for group in sorted((task.result() for task in done), key=lambda group: group[0].group):
                    batch.complete.append(group)
                    on_complete(group)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    return background.start(sample())


async def _episode(
    engine: Engine,
    agent: Agent,
    row: Row | BaseException,
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
            trajectory = await attempt_episode(agent, session, row, limits.seconds)
            if POLICIES[trajectory.outcome].training != "drop":
                break
            failures.append(f"{trajectory.outcome}: {trajectory.info.get('error', 'no details')}")
            logging.warning("%s, attempt %d of %d: %s", identity.uid, attempt + 1, limits.attempts, failures[-1])
            if trajectory.outcome not in RETRIED:
                break
        if failures:
            trajectory = dataclasses.replace(trajectory, info={**trajectory.info, "failures": failures})
        if limits.failures == "zero" and trajectory.outcome in RETRIED and trajectory.steps:
            return dataclasses.replace(trajectory, outcome=Outcome.FAILURE_AS_ZERO, final_prompt_ids=None)
        return trajectory
    finally:
        engine.release(lease)


async def attempt_episode(
    agent: Agent, session: Session, row: Row | BaseException, seconds: float | None = None
) -> Trajectory:
    """Return the trajectory of one attempt, however it ends: a bad rollout is data, not a crash."""
    error = await _run_agent(agent, session, row, seconds)
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


async def _run_agent(
    agent: Agent, session: Session, row: Row | BaseException, seconds: float | None
) -> BaseException | None:
    """Return what an agent raised, or `AgentTimeout` after its time.

    It has a task of its own: an environment may raise anything, cancel its task, or ignore a cancellation.
    """

    async def run() -> BaseException | None:
        try:
            if isinstance(row, BaseException):
                raise row
            session.begin(row)
            await agent.run(session, row)
        except BaseException as error:  # A task would raise SystemExit in the loop.
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C.
            return error
        return None

    task = asyncio.create_task(run(), name=session.identity.uid)
    try:
        await asyncio.wait([task], timeout=seconds)
        in_time = task.done()
    finally:
        await event_loop.end_task(task)
    if not in_time:
        return AgentTimeout(f"no end within {seconds} s")
    return asyncio.CancelledError() if task.cancelled() else task.result()

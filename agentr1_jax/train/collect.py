"""Collect trajectories: demonstrations, documents, evaluations, and the batches of reinforcement learning.

The batches of a phase come from an object with three methods (`Batches`): examples that were made beforehand, rollouts
that are sampled when they are asked for, or rollouts that run ahead of the learner.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
from absl import logging

from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.envs.base import Row
from agentr1_jax.envs.curriculum import limit_steps
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.background import BackgroundEngine, wait
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.runner import Group, GroupBatch, TaskGroup, run_groups, start_batch
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.runtime.seeds import generator, seed_of
from agentr1_jax.train.metrics import policy_ages, rollout_metrics
from agentr1_jax.train.parts import Setup
from agentr1_jax.train.progress import Progress
from agentr1_jax.train.summary import draw_timeline
from agentr1_jax.trajectory import POLICIES, Outcome, Step, Trajectory

PRACTICE = "practice"
"""Split of a task for demonstrations alone, where it has one."""
K = TypeVar("K")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to roll out, over all processes.

    Attributes:
      name: part of the uids and seeds of the trajectories, e.g. `rl`.
      split: of the task.
      prompts: index of the task row of each group.
      samples: trajectories of each group.
      sampling: distribution of the responses.
      version: of the policy: updates that its parameters have seen.
      spare_prompts: further task rows, for dynamic sampling: groups in place of zero-variance groups.
    """

    name: str
    split: str
    prompts: Sequence[int]
    samples: int
    sampling: SamplingConfig
    version: int
    spare_prompts: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """This process's share of a batch, sorted by (group, sample).

    Attributes:
      trajectories: to be trained on.
      zero_variance: of groups that dynamic sampling replaced; kept for the record.
      prompts_used: task rows that the batch has used over all processes, replaced ones included.
      metrics: of the engine and the tools.
    """

    trajectories: Sequence[Trajectory]
    zero_variance: Sequence[Trajectory] = ()
    prompts_used: int = 0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


def process_shard(count: int) -> list[int]:
    """Return the indices, out of `count`, of the groups that this process samples."""
    return list(range(processes.process_index(), count, processes.process_count()))


def task_groups(setup: Setup, request: Request, positions: Sequence[int]) -> list[TaskGroup]:
    """Return the groups at some positions of a request.

    All rows are read at once: a row may come from a server, which nobody should wait for in the engine's loop.
    """
    prompts = [*request.prompts, *request.spare_prompts]
    return [
        TaskGroup(
            row=task_row(setup, request.split, prompts[position]),
            identities=identities(setup, request.name, position, prompts[position], request.samples),
        )
        for position in positions
    ]


def identities(setup: Setup, name: str, group: int, prompt: int, samples: int) -> list[Identity]:
    """Return the names and seeds of the trajectories of a group, keyed by its prompt index."""
    return [
        Identity(
            uid=f"{name}/{prompt:06d}/{sample}",
            group=group,
            sample=sample,
            task=setup.task.name,
            seed=seed_of(setup.settings.run.seed, name, prompt, sample),
        )
        for sample in range(samples)
    ]


def task_row(setup: Setup, split: str, prompt: int) -> Row | Exception:
    """Return a row of the task; one that is trained on with the steps that the curriculum allows.

    An exception stands for a row that cannot be made: its trajectories end in `env_failure`.
    """
    settings = setup.settings
    try:
        row = setup.task.row(split, prompt)
    except Exception as error:
        return error
    if split != "train" or not settings.stages:
        return row
    return limit_steps(row, settings.stages, prompt, settings.rollout.groups)


def make_demonstrations(setup: Setup) -> list[Trajectory]:
    """Make this process's share of the expert trajectories, some of them on the task's practice split."""
    c, seed = setup.settings.warm_start, setup.settings.run.seed
    practice = generator(seed, "practice").random(c.demonstrations) < c.practice

    async def play() -> list[Trajectory]:
        trajectories = []
        for index in process_shard(c.demonstrations):
            (identity,) = identities(setup, "demonstration", index, index, 1)
            row = setup.task.row(PRACTICE if practice[index] else "train", index)
            expert = setup.task.expert(row, identity.seed)
            session = ScriptedSession(identity, expert, setup.tokenizer, setup.agent.call_format)
            session.begin(row)
            await setup.agent.run(session, row)
            trajectories.append(session.trajectory())
        return trajectories

    return asyncio.run(play())


def make_documents(setup: Setup) -> list[Trajectory]:
    """Make this process's share of the task's texts, in pieces; each is a trajectory whose one response is the text.

    A piece begins and ends with the stop token, as a piece of a longer text does too.
    """
    c, stop = setup.settings.pretrain, setup.tokenizer.stop_id
    texts = setup.task.texts(c.texts)
    pieces = [
        np.asarray([*ids[at : at + c.tokens - 2], stop], np.int32)
        for ids in (setup.tokenizer.encode_data(texts[i]) for i in process_shard(len(texts)))
        for at in range(0, len(ids), c.tokens - 2)
    ]
    prompt = np.asarray([stop], np.int32)
    return [
        Trajectory(
            uid=f"text/{i:06d}",
            group=i,
            sample=0,
            task=setup.task.name,
            seed=0,
            steps=(Step(prompt, piece, np.zeros(len(piece), np.float32), reward=0.0),),
            outcome=Outcome.ENV_DONE,
        )
        for i, piece in enumerate(pieces)
    ]


def group_batch(setup: Setup, request: Request, complete: Sequence[Group] = ()) -> GroupBatch:
    """Return this process's share of a request, of which some groups may be complete already."""
    positions = process_shard(len(request.prompts))
    spare = [len(request.prompts) + i for i in process_shard(len(request.spare_prompts))]
    sampled = {group[0].group for group in complete}
    missing = [position for position in (*positions, *spare) if position not in sampled]
    replaces = bool(request.spare_prompts)
    return GroupBatch(len(positions), task_groups(setup, request, missing), replaces, list(complete))


def roll_out(
    setup: Setup,
    params: Params,
    request: Request,
    *,
    stop: processes.StopRequest | None = None,
    batch: GroupBatch | None = None,
    background: BackgroundEngine | None = None,
) -> GroupBatch | None:
    """Sample this process's share of the groups of a request, for training and evaluation alike. Collective.

    Args:
      setup: parts of the run.
      params: of the learner.
      request: what to roll out.
      stop: aborts the batch in all processes once any of them is asked to stop; None for never.
      batch: groups of the request, to which those that become complete are added, also if it is aborted; None for
        `group_batch`.
      background: an engine that is rolling out already, with these parameters; None opens the engine here.

    Returns:
      the complete batch; None if it was aborted.
    """
    batch = batch or group_batch(setup, request)
    with contextlib.ExitStack() as opened:
        if background is None:
            own_params = setup.rollout_params(params, setup.frozen)
            background = opened.enter_context(BackgroundEngine(setup.engine, own_params, request.version))
        limits = setup.settings.attempt_limits
        work = start_batch(background, setup.agent, batch, sampling=request.sampling, limits=limits)
        done = wait_or_stop(work, stop)
    return batch if done else None


def wait_or_stop(work: concurrent.futures.Future[list[Group]], stop: processes.StopRequest | None) -> bool:
    """Wait for a batch; return False in all processes if any of them is asked to stop. Collective."""
    if stop is None:
        work.result()
        return True
    done = wait(work, lambda: stop.requested) is not None
    return not stop.requested_anywhere() and done  # All processes ask, also one that was told to stop.


def add_greedy_returns(
    setup: Setup, params: Params, trajectories: Sequence[Trajectory], first_prompt: int, *, version: int
) -> list[Trajectory]:
    """Return the trajectories with the return of a greedy rollout of their row, where that did not fail.

    Each process samples those of its own groups. Collective.

    Args:
      setup: parts of the run.
      params: of the learner.
      trajectories: of this process.
      first_prompt: prompt index of group 0 of the batch.
      version: of the policy.
    """
    own_params = setup.rollout_params(params, setup.frozen)  # A program of all processes, also of one without groups.
    groups = sorted({t.group for t in trajectories})
    rows = [
        TaskGroup(
            row=task_row(setup, "train", first_prompt + group),
            identities=identities(setup, "greedy", group, first_prompt + group, 1),
        )
        for group in groups
    ]
    greedy = run_groups(
        setup.engine,
        own_params,
        setup.agent,
        rows,
        sampling=SamplingConfig(0.0),
        policy_version=version,
        count=len(groups),
        limits=setup.settings.attempt_limits,
    )
    returns = {t.group: t.total_reward for (t,) in greedy if POLICIES[t.outcome].reward == "use"}
    return [dataclasses.replace(t, greedy_return=returns.get(t.group)) for t in trajectories]


class Batches(Protocol):
    """Source of the batches of a phase.

    Attributes:
      background: the engine's stream, where one is open.
    """

    @property
    def background(self) -> BackgroundEngine | None: ...

    def next(self, params: Params, progress: Progress, stop: processes.StopRequest) -> Rollouts | None:
        """Return this process's share of the next batch; None in all processes if any is asked to stop. Collective."""
        ...

    def publish(self, params: Params, update: int) -> None:
        """Sample with the parameters after so many updates from now on."""
        ...

    def pending(self) -> Sequence[Trajectory]:
        """Return the trajectories of complete groups that are not trained yet: `publish` follows their train step."""
        ...


class Examples:
    """Batches of examples that were made beforehand: documents or demonstrations.

    Args:
      trajectories: of this process.
      size: trajectories of a batch, of this process.
      seed: of the run; keys the order.
    """

    background = None

    def __init__(self, trajectories: Sequence[Trajectory], size: int, seed: int) -> None:
        self._trajectories, self._size, self._seed = trajectories, size, seed

    def next(self, params: Params, progress: Progress, stop: processes.StopRequest) -> Rollouts:
        """Return the batch of an update: passes over the examples, each in an order of its own."""
        per_epoch = max(len(self._trajectories) // self._size, 1)
        epoch, place = divmod(progress.update, per_epoch)
        order = generator(self._seed, "demonstration order", epoch).permutation(len(self._trajectories))
        return Rollouts([self._trajectories[i] for i in order[place * self._size :][: self._size]])

    def publish(self, params: Params, update: int) -> None:
        """Do nothing: nothing is sampled."""

    def pending(self) -> Sequence[Trajectory]:
        """Return nothing."""
        return ()


class SynchronousRollouts:
    """Batches of RL, each sampled when it is asked for, by the policy that it then trains.

    Args:
      setup: parts of the run.
      pending: complete groups of the first batch, from before the run was stopped.
    """

    background = None

    def __init__(self, setup: Setup, pending: Sequence[Trajectory] = ()) -> None:
        c = setup.settings.rollout
        positions = [*process_shard(c.groups), *(c.groups + i for i in process_shard(c.dynamic_sampling_groups))]
        groups = complete_groups(pending, c.samples, lambda t: t.group)
        self._setup = setup
        self._complete = [groups[position] for position in sorted(positions) if position in groups]

    def next(self, params: Params, progress: Progress, stop: processes.StopRequest) -> Rollouts | None:
        """See `Batches.next`."""
        setup, c = self._setup, self._setup.settings.rollout
        setup.engine.reset_counters()
        setup.tool_metrics.reset()
        last = progress.update + 1 == setup.settings.run.updates
        setup.engine.record_timeline = last and processes.process_index() == 0
        first, end = progress.prompt_index, progress.prompt_index + c.groups
        request = Request(
            name="rl",
            split="train",
            prompts=range(first, end),
            samples=c.samples,
            sampling=setup.settings.sampling,
            version=progress.update,
            spare_prompts=range(end, end + c.dynamic_sampling_groups),
        )
        batch = group_batch(setup, request, self._complete)
        self._complete = batch.complete
        done = roll_out(setup, params, request, stop=stop, batch=batch)
        setup.engine.record_timeline = False
        if done is None:
            return None
        draw_timeline(setup)
        metrics = rollout_metrics(setup.engine, setup.tool_metrics)
        trajectories, zero_variance = batch.trajectories()
        spare_used = max((t.group - c.groups + 1 for t in (*trajectories, *zero_variance)), default=0)
        spare_used = max(processes.all_gather_json(max(spare_used, 0)))
        if setup.settings.scheme.needs_greedy:
            trajectories = add_greedy_returns(setup, params, trajectories, first, version=progress.update)
        return Rollouts(
            trajectories=trajectories,
            zero_variance=zero_variance,
            prompts_used=c.groups + spare_used,
            metrics={**metrics, "batch/dynamic_sampling_groups": float(spare_used)},
        )

    def publish(self, params: Params, update: int) -> None:
        """See `Batches.publish`; the next batch is sampled with the parameters that `next` is given."""
        self._complete = []

    def pending(self) -> Sequence[Trajectory]:
        """See `Batches.pending`."""
        return [t for group in self._complete for t in group]


class AsynchronousRollouts:
    """Batches of RL, sampled up to `rollout.staleness` batches ahead of the learner, always with its newest parameters.

    The groups of a batch are settled beforehand, so that none is favoured because it was short; a batch waits for its
    slowest group, while those after it go on.

    Args:
      setup: parts of the run.
      params: of the learner.
      update: RL updates so far: the number of the batch that is trained next.
      pending: complete groups that are not trained yet, from before the run was stopped.
    """

    def __init__(self, setup: Setup, params: Params, update: int, pending: Sequence[Trajectory] = ()) -> None:
        c = setup.settings.rollout
        self._setup = setup
        self._pending = complete_groups(pending, c.samples, lambda t: (_batch_number(t, c.groups), t.group))
        self.background = BackgroundEngine(setup.engine, setup.rollout_params(params, setup.frozen), update)
        self._batches: dict[int, tuple[GroupBatch, concurrent.futures.Future[list[Group]]]] = {}
        self._since = time.perf_counter()
        self._start_up_to(update)

    def next(self, params: Params, progress: Progress, stop: processes.StopRequest) -> Rollouts | None:
        """See `Batches.next`; the parameters are known since `publish`."""
        setup = self._setup
        batch, work = self._batches[progress.update]
        if not wait_or_stop(work, stop):
            return None
        trajectories, _ = batch.trajectories()
        now = time.perf_counter()
        setup.engine.counters.seconds, self._since = now - self._since, now
        return Rollouts(
            trajectories=trajectories,
            prompts_used=setup.settings.rollout.groups,
            metrics={
                **rollout_metrics(setup.engine, setup.tool_metrics),
                **policy_ages(trajectories, progress.update, setup.settings.rollout.staleness),
                "batch/dynamic_sampling_groups": 0.0,
            },
        )

    def publish(self, params: Params, update: int) -> None:
        """See `Batches.publish`; one more batch may begin."""
        setup = self._setup
        del self._batches[update - 1]
        setup.engine.reset_counters()
        setup.tool_metrics.reset()
        self.background.adopt(setup.dispatch(setup.rollout_params, params, setup.frozen), update)
        self._start_up_to(update)

    def pending(self) -> Sequence[Trajectory]:
        """See `Batches.pending`."""
        return [t for _, (batch, _) in sorted(self._batches.items()) for group in list(batch.complete) for t in group]

    def close(self) -> None:
        """Abort what is under way."""
        self.background.close()

    def _start_up_to(self, update: int) -> None:
        settings = self._setup.settings
        for number in range(update, min(update + settings.rollout.staleness + 1, settings.run.updates)):
            if number not in self._batches:
                self._batches[number] = self._start(number)

    def _start(self, number: int) -> tuple[GroupBatch, concurrent.futures.Future[list[Group]]]:
        setup, c = self._setup, self._setup.settings.rollout
        prompts = range(number * c.groups, (number + 1) * c.groups)
        request = Request("rl", "train", prompts, c.samples, setup.settings.sampling, version=number)
        complete = [self._pending[number, p] for p in process_shard(c.groups) if (number, p) in self._pending]
        batch, limits = group_batch(setup, request, complete), setup.settings.attempt_limits
        return batch, start_batch(self.background, setup.agent, batch, sampling=request.sampling, limits=limits)


def complete_groups(trajectories: Sequence[Trajectory], samples: int, key: Callable[[Trajectory], K]) -> dict[K, Group]:
    """Return the groups that have all their samples, by a key of their members."""
    groups: dict[K, Group] = collections.defaultdict(list)
    for t in sorted(trajectories, key=lambda t: t.sample):
        groups[key(t)].append(t)
    return {k: group for k, group in groups.items() if len(group) == samples}


def _batch_number(trajectory: Trajectory, groups: int) -> int:
    """Return the batch of a trajectory, which its uid tells by the prompt index: `rl/000012/3`."""
    return int(trajectory.uid.split("/")[1]) // groups


@contextlib.contextmanager
def open_rollouts(setup: Setup, params: Params, progress: Progress, folder: RunFolder) -> Iterator[Batches]:
    """Open the source of RL batches from the present progress on, with the pending rollouts of an earlier start."""
    if processes.process_index() == 0:
        folder.remove_pending_after(progress.checkpoint)
    pending = folder.read_pending(progress.checkpoint)
    if pending:
        logging.info("%d pending trajectories are trained before others are sampled", len(pending))
    if not setup.settings.rollout.staleness:
        yield SynchronousRollouts(setup, pending)
        return
    with contextlib.closing(AsynchronousRollouts(setup, params, progress.update, pending)) as rollouts:
        yield rollouts

"""Collect trajectories: roll out task rows for evaluations, and for the batches of reinforcement learning.

A source of batches has

    next(params, progress, stop)    this process's share of the next batch; None in all processes if any is to stop
    publish(params, update)         the train step is taken: sample with the parameters after so many updates
    pending()                       trajectories of complete groups that are not trained yet
    background                      the engine's open stream, or None
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from absl import logging

from agentr1_jax.agents.session import Identity
from agentr1_jax.envs.base import Row
from agentr1_jax.envs.mixture import limit_steps
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.runner import BackgroundEngine, Group, GroupBatch, TaskGroup, start_batch, wait
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.runtime.seeds import seed_of
from agentr1_jax.train.build import Setup
from agentr1_jax.train.progress import Progress
from agentr1_jax.train.summary import draw_timeline
from agentr1_jax.trajectory import POLICIES, Trajectory

Work = concurrent.futures.Future[list[Group]]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to roll out, over all processes.

    Attributes:
      name: part of the uids and seeds of the trajectories, e.g. `rl`.
      prompts: index of the task row of each group.
      samples: trajectories of each group.
      version: of the policy: updates that its parameters have seen.
      spare_prompts: further task rows, for dynamic sampling: groups in place of zero-variance groups.
      failures: see `AttemptLimits`; those of an evaluation are dropped.
    """

    name: str
    split: str
    prompts: Sequence[int]
    samples: int
    sampling: SamplingConfig
    version: int
    spare_prompts: Sequence[int] = ()
    failures: Literal["drop", "zero"] = "drop"


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


def task_row(setup: Setup, split: str, prompt: int) -> Row | BaseException:
    """Return a row of the task; one that is trained on with the steps that the curriculum allows.

    An exception stands for a row that cannot be made: its trajectories end in `env_failure`.
    """
    settings = setup.settings
    try:
        row = setup.task.row(split, prompt)
        if split != "train" or not settings.stages:
            return row
        return limit_steps(row, settings.stages, prompt, settings.rollout.groups)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Also SystemExit, by which a run would end as if it were done.
        return error


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


def group_batch(setup: Setup, request: Request, complete: Sequence[Group] = ()) -> GroupBatch:
    """Return this process's share of a request, of which some groups may be complete already."""
    positions = process_shard(len(request.prompts))
    spare = [len(request.prompts) + i for i in process_shard(len(request.spare_prompts))]
    sampled = {group[0].group for group in complete}
    missing = [position for position in (*positions, *spare) if position not in sampled]
    replaces = bool(request.spare_prompts)
    return GroupBatch(len(positions), task_groups(setup, request, missing), replaces, list(complete))


def start(setup: Setup, background: BackgroundEngine, request: Request, batch: GroupBatch) -> Work:
    """Start sampling the groups of a request that its batch lacks; the future is done when the batch is complete."""
    limits = dataclasses.replace(setup.settings.attempt_limits, failures=request.failures)
    return start_batch(background, setup.agent, batch, sampling=request.sampling, limits=limits)


def wait_or_stop(work: concurrent.futures.Future[Any], stop: processes.StopRequest | None) -> bool:
    """Wait for work; return False in all processes if any of them is asked to stop. Collective."""
    if stop is None:
        work.result()
        return True
    done = wait(work, lambda: stop.requested) is not None
    return not stop.requested_anywhere() and done  # All processes ask, also one that was told to stop.


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
        done = wait_or_stop(start(setup, background, request, batch), stop)
    return batch if done else None


def add_greedy_returns(
    setup: Setup,
    params: Params,
    trajectories: Sequence[Trajectory],
    first_prompt: int,
    *,
    version: int,
    stop: processes.StopRequest | None = None,
) -> list[Trajectory] | None:
    """Return this process's trajectories with the return of a greedy rollout of their row, where that did not fail.

    `first_prompt` is the prompt index of group 0 of the batch, `version` that of the policy; `stop` and None are those
    of `roll_out`. Collective.
    """
    groups = sorted({t.group for t in trajectories})
    prompts = range(first_prompt, first_prompt + max(groups, default=-1) + 1)
    failures = setup.settings.rollout.failures
    request = Request("greedy", "train", prompts, 1, SamplingConfig(0.0), version, failures=failures)
    batch = roll_out(
        setup, params, request, stop=stop, batch=GroupBatch(len(groups), task_groups(setup, request, groups))
    )
    if batch is None:
        return None
    returns = {t.group: t.total_reward for (t,) in batch.complete if POLICIES[t.outcome].reward != "none"}
    return [dataclasses.replace(t, greedy_return=returns.get(t.group)) for t in trajectories]


def policy_ages(trajectories: Sequence[Trajectory], update: int, staleness: int) -> dict[str, float]:
    """Return the share of sampled tokens by age: updates since the policy that sampled them. Collective."""
    counts = [0] * (staleness + 1)
    for t in trajectories:
        for step in t.steps:
            for version, tokens in step.tokens_by_version().items():
                counts[update - version] += tokens
    total = [sum(of_age) for of_age in zip(*processes.all_gather_json(counts), strict=True)]
    return {f"rollout/age_{age}": count / max(sum(total), 1) for age, count in enumerate(total)}


class SynchronousRollouts:
    """Batches of RL, each sampled when it is asked for, by the policy that it then trains.

    `pending` has complete groups of the first batch, from before the run was stopped.
    """

    background = None

    def __init__(self, setup: Setup, pending: Sequence[Trajectory] = ()) -> None:
        c = setup.settings.rollout
        positions = {*process_shard(c.groups), *(c.groups + i for i in process_shard(c.dynamic_sampling_groups))}
        groups = complete_groups(pending, c.samples, lambda t: t.group)
        self._setup = setup
        self._complete = [group for position, group in sorted(groups.items()) if position in positions]

    def next(self, params: Params, progress: Progress, stop: processes.StopRequest) -> Rollouts | None:
        """See the module."""
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
            failures=c.failures,
        )
        batch = group_batch(setup, request, self._complete)
        self._complete = batch.complete
        done = roll_out(setup, params, request, stop=stop, batch=batch)
        setup.engine.record_timeline = False
        if done is None:
            return None
        draw_timeline(setup)
        metrics = {**setup.tool_metrics.metrics(), **setup.engine.counters.metrics()}
        trajectories, zero_variance = batch.trajectories()
        spare_used = max((t.group - c.groups + 1 for t in (*trajectories, *zero_variance)), default=0)
        spare_used = max(processes.all_gather_json(max(spare_used, 0)))
        if setup.settings.scheme.needs_greedy:
            compared = add_greedy_returns(setup, params, trajectories, first, version=progress.update, stop=stop)
            if compared is None:
                return None
            trajectories = compared
        return Rollouts(
            trajectories=trajectories,
            zero_variance=zero_variance,
            prompts_used=c.groups + spare_used,
            metrics={**metrics, "batch/dynamic_sampling_groups": float(spare_used)},
        )

    def publish(self, params: Params, update: int) -> None:
        """See the module; the next batch is sampled with the parameters that `next` is given."""
        self._complete = []

    def pending(self) -> Sequence[Trajectory]:
        """See the module."""
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
        self._setup = setup
        self._pending = complete_groups(pending, setup.settings.rollout.samples, _prompt_index)
        self.background = BackgroundEngine(setup.engine, setup.rollout_params(params, setup.frozen), update)
        self._batches: dict[int, tuple[GroupBatch, Work]] = {}
        self._since = time.perf_counter()
        self._start_up_to(update)

    def next(self, params: Params, progress: Progress, stop: processes.StopRequest) -> Rollouts | None:
        """See the module; the parameters are known since `publish`."""
        setup, c = self._setup, self._setup.settings.rollout
        batch, work = self._batches[progress.update]
        if not wait_or_stop(work, stop):
            return None
        trajectories, _ = batch.trajectories()
        now = time.perf_counter()
        setup.engine.counters.seconds, self._since = now - self._since, now
        metrics = {**setup.tool_metrics.metrics(), **setup.engine.counters.metrics()}
        metrics |= policy_ages(trajectories, progress.update, c.staleness)
        return Rollouts(trajectories, prompts_used=c.groups, metrics={**metrics, "batch/dynamic_sampling_groups": 0.0})

    def publish(self, params: Params, update: int) -> None:
        """See the module; one more batch may begin."""
        setup = self._setup
        del self._batches[update - 1]
        setup.engine.reset_counters()
        setup.tool_metrics.reset()
        self.background.adopt(setup.dispatch(setup.rollout_params, params, setup.frozen), update)
        self._start_up_to(update)

    def pending(self) -> Sequence[Trajectory]:
        """See the module."""
        return [t for _, (batch, _) in sorted(self._batches.items()) for group in list(batch.complete) for t in group]

    def close(self) -> None:
        """Abort what is under way."""
        self.background.close()

    def _start_up_to(self, update: int) -> None:
        settings, c = self._setup.settings, self._setup.settings.rollout
        for number in range(update, min(update + c.staleness + 1, settings.run.updates)):
            if number not in self._batches:
                prompts = range(number * c.groups, (number + 1) * c.groups)
                request = Request(
                    "rl", "train", prompts, c.samples, settings.sampling, version=number, failures=c.failures
                )
                own = [prompts[position] for position in process_shard(c.groups)]
                complete = [self._pending[prompt] for prompt in own if prompt in self._pending]
                batch = group_batch(self._setup, request, complete)
                self._batches[number] = batch, start(self._setup, self.background, request, batch)


def complete_groups(
    trajectories: Sequence[Trajectory], samples: int, key: Callable[[Trajectory], int]
) -> dict[int, Group]:
    """Return the groups that have all their samples, by a key of their members."""
    groups: dict[int, Group] = collections.defaultdict(list)
    for t in sorted(trajectories, key=lambda t: t.sample):
        groups[key(t)].append(t)
    return {k: group for k, group in groups.items() if len(group) == samples}


def _prompt_index(t: Trajectory) -> int:
    """Return the prompt index, which the uid tells: `rl/000012/3`."""
    return int(t.uid.split("/")[1])


@contextlib.contextmanager
def open_rollouts(
    setup: Setup, params: Params, progress: Progress, folder: RunFolder
) -> Iterator[SynchronousRollouts | AsynchronousRollouts]:
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

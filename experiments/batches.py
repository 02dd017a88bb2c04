"""Where RL gets its batches from: sampled when they are asked for, or while the learner is still at those before.

With `rollout.staleness` = k the engine works on the batches up to k ahead of the one that is trained next, in a thread
of its own, always with the newest parameters. Which groups make up a batch is settled beforehand, so that none is
favoured because it was short; a batch waits for its slowest group, while those after it go on.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.background import BackgroundEngine, wait
from agentr1_jax.rollout.runner import Group, GroupBatch, start_batch
from agentr1_jax.runtime import processes
from agentr1_jax.trajectory import Trajectory
from experiments import build, circle
from experiments.circle import Run
from experiments.journal import Journal

K = TypeVar("K")
Taken = tuple[list[Trajectory], list[Trajectory]] | None


class Batches(Protocol):
    """What the circle asks for its batches.

    Attributes:
      background: the engine's stream, where one is open.
    """

    @property
    def background(self) -> BackgroundEngine | None: ...

    def take(self, params: Params, update: int, visits: range, stop: Callable[[], bool]) -> Taken:
        """This process's share of the batch of an update: trajectories sorted by (group, sample), and those of groups
        without signal that others replace. None where `stop` says so before it is whole."""
        ...

    def learnt(self, params: Params, update: int) -> None:
        """So many updates are done, and gave these parameters: they sample from now on."""
        ...

    def unused(self) -> Sequence[Trajectory]:
        """Complete groups of batches that were not taken yet."""
        ...


class Ahead:
    """Batches of RL, `rollout.staleness` ahead of the learner.

    Args:
      run: the run's parts.
      params: of the learner.
      update: updates of RL so far, which is the number of the batch that is trained next.
      finished: complete groups of this process that are not trained yet, from before the run was stopped.
    """

    def __init__(self, run: Run, params: Params, update: int, finished: Sequence[Trajectory] = ()) -> None:
        self._run = run
        c = run.config.rollout
        self._finished = whole_groups(finished, c.samples, lambda t: (_batch_of(t, c.groups), t.group))
        self.background = BackgroundEngine(run.engine, run.view(params, run.frozen), update)
        self._batches: dict[int, tuple[GroupBatch, concurrent.futures.Future[list[Group]]]] = {}
        self._since = time.perf_counter()
        self._begin_up_to(update)

    def take(self, params: Params, update: int, visits: range, stop: Callable[[], bool]) -> Taken:
        """See `Batches.take`; the parameters are known since `learnt`."""
        batch, future = self._batches[update]
        if wait(future, stop) is None:
            return None
        del self._batches[update]
        now = time.perf_counter()
        self._run.engine.counters.seconds, self._since = now - self._since, now
        return batch.trajectories()

    def learnt(self, params: Params, update: int) -> None:
        """See `Batches.learnt`: one more batch may begin."""
        circle.count_anew(self._run)
        self.background.adopt(processes.call(self._run.view, params, self._run.frozen), update)
        self._begin_up_to(update)

    def unused(self) -> Sequence[Trajectory]:
        """See `Batches.unused`."""
        return [t for _, (batch, _) in sorted(self._batches.items()) for group in list(batch.complete) for t in group]

    def close(self) -> None:
        """Breaks off what is under way."""
        self.background.close()

    def _begin_up_to(self, update: int) -> None:
        c = self._run.config
        for number in range(update, min(update + c.rollout.staleness + 1, c.updates)):
            if number not in self._batches:
                self._batches[number] = self._begin(number)

    def _begin(self, number: int) -> tuple[GroupBatch, concurrent.futures.Future[list[Group]]]:
        run, c = self._run, self._run.config.rollout
        places = build.dealt(c.groups)
        known = [self._finished[number, place] for place in places if (number, place) in self._finished]
        missing = [place for place in places if (number, place) not in self._finished]
        visits = range(number * c.groups, (number + 1) * c.groups)
        groups = circle.groups_of(run, "rl", "train", missing, [visits[place] for place in missing], c.samples)
        batch = GroupBatch(len(places), groups, complete=known)
        sampling, limits = build.sampling(run.config), build.limits(run.config)
        return batch, start_batch(self.background, run.agent, batch, sampling=sampling, limits=limits)


def whole_groups(
    trajectories: Sequence[Trajectory], samples: int, key: Callable[[Trajectory], K]
) -> dict[K, list[Trajectory]]:
    """Those groups of so many samples that are whole, by a key of their members."""
    groups: dict[K, list[Trajectory]] = collections.defaultdict(list)
    for t in sorted(trajectories, key=lambda t: t.sample):
        groups[key(t)].append(t)
    return {k: group for k, group in groups.items() if len(group) == samples}


def _batch_of(trajectory: Trajectory, groups: int) -> int:
    """Its number, which its name tells by the visit: `rl/000012/3`."""
    return int(trajectory.uid.split("/")[1]) // groups


def ages(trajectories: Sequence[Trajectory], update: int, staleness: int) -> dict[str, float]:
    """Shares of the sampled tokens of all processes by age: updates since the policy that sampled them.

    Empty without staleness, where all are 0.
    """
    if not staleness:
        return {}
    counts = [0] * (staleness + 1)
    for t in trajectories:
        for step in t.steps:
            counts[update - step.policy_version] += len(step.response_ids)
    total = [sum(of_age) for of_age in zip(*processes.all_gather_json(counts), strict=True)]
    return {f"rollout/age_{age}": count / max(sum(total), 1) for age, count in enumerate(total)}


class InTurn:
    """Batches of RL, each sampled when it is asked for, by the policy that it then trains.

    Args:
      run: the run's parts.
      finished: complete groups of the first batch, from before the run was stopped.
    """

    background = None

    def __init__(self, run: Run, finished: Sequence[Trajectory] = ()) -> None:
        c = run.config.rollout
        mine = {*build.dealt(c.groups), *(c.groups + i for i in build.dealt(c.dynamic_sampling_groups))}
        groups = whole_groups(finished, c.samples, lambda t: t.group)
        self._complete = [groups[place] for place in sorted(mine & groups.keys())]
        self._run = run

    def take(self, params: Params, update: int, visits: range, stop: Callable[[], bool]) -> Taken:
        """See `Batches.take`."""
        c = self._run.config.rollout
        circle.count_anew(self._run)
        taken = circle.roll_out(
            self._run,
            params,
            "rl",
            "train",
            visits,
            samples=c.samples,
            sampling=build.sampling(self._run.config),
            version=update,
            refills=range(visits.stop, visits.stop + c.dynamic_sampling_groups),
            complete=self._complete,
            stop=stop,
        )
        if taken is not None:
            self._complete = []
        return taken

    def learnt(self, params: Params, update: int) -> None:
        """Nothing is sampled meanwhile."""

    def unused(self) -> Sequence[Trajectory]:
        """See `Batches.unused`: there are some where a batch was broken off."""
        return [t for group in self._complete for t in group]


@contextlib.contextmanager
def sampler(run: Run, journal: Journal, params: Params) -> Iterator[Batches]:
    """Where the batches of a run come from, from its present position on."""
    position = journal.position
    number = position.first_checkpoint + position.update
    if processes.process_index() == 0:
        journal.folder.remove_pending_after(number)
    finished = journal.folder.read_pending(number)
    if not run.config.rollout.staleness:
        yield InTurn(run, finished)
        return
    ahead = Ahead(run, params, position.update, finished)
    with contextlib.closing(ahead):
        yield ahead

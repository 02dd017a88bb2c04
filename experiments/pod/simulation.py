"""Three ways to roll out on many hosts, and the cycle of rollouts and updates that each makes.

    per_process   an engine on each host, at its own pace; hosts meet at the update
    lockstep      one engine over all hosts: each waits for the slowest in every decode iteration and prefill call, and
                  a slot stays idle while its trajectory's tools are at work
    rounds        all trajectories sample a step, on each host as slots become free; then all tools are called and the
                  slowest one is waited for; then the next step

The learner works on the same devices as the engines: an update is one program of all hosts, during which nothing is
decoded, though tools go on. Batch b is trained at version b, the number of updates before it. With staleness s its
groups may begin once version b - s is there: with 1, while the stragglers of the batch before are under way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from experiments.pod.engine import Counters, Engine
from experiments.pod.model import Job, Latency, Shape, Speeds, Work, deal, draw_batch

Batch = Sequence[Sequence[Job]]
"""The trajectories of each host."""


class Cycle(NamedTuple):
    """How things stood when an update was over.

    Attributes:
      end: seconds since the start.
      counters: of all engines.
      learned: seconds of updates so far.
      trajectories, tokens: that the updates so far have learned from, and those sampled in them.
    """

    end: float
    counters: Counters
    learned: float
    trajectories: int
    tokens: int

    def next(self, end: float, counters: Counters, speeds: Speeds, batch: Batch) -> Cycle:
        """After one update more."""
        jobs = [job for share in batch for job in share]
        tokens = sum(sum(job.work.response) for job in jobs)
        seconds = update_seconds(speeds, batch) - speeds.transfer
        return Cycle(end, counters, self.learned + seconds, self.trajectories + len(jobs), self.tokens + tokens)


START = Cycle(0.0, Counters(), 0.0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Means over the cycles of one simulation.

    Attributes:
      cycle_seconds: from the end of an update to that of the next.
      trajectories_per_s: learned from, of all hosts.
      decode_tokens_per_s: sampled in them, of one host.
      occupancy: live slots over slots, in decode iterations.
      utilisation: share of the hosts' time for useful tokens: decode iterations as far as their slots are live, prompt
        tokens without padding, and updates.
      stale: share of the sampled tokens whose weights had not seen every update before their batch's.
    """

    cycle_seconds: float
    trajectories_per_s: float
    decode_tokens_per_s: float
    occupancy: float
    utilisation: float
    stale: float


def update_seconds(speeds: Speeds, batch: Batch) -> float:
    """An update with the trajectories of all hosts, spread evenly over their devices, and the new weights' way."""
    tokens = sum(job.work.tokens for jobs in batch for job in jobs)
    return speeds.update + speeds.learner_token * tokens / len(batch) + speeds.transfer


def _added(counters: Sequence[Counters]) -> Counters:
    """Sums over engines."""
    total = Counters()
    for field in dataclasses.fields(Counters):
        setattr(total, field.name, sum(getattr(c, field.name) for c in counters))
    return total


def _cycles(engines: Sequence[Engine], speeds: Speeds, batches: Sequence[Batch], staleness: int) -> list[Cycle]:
    """Batches that are sampled by engines, each its share or, of one engine, all."""

    def submit(number: int) -> None:
        if number < len(batches):
            shares = batches[number] if len(engines) > 1 else [[job for jobs in batches[number] for job in jobs]]
            for engine, jobs in zip(engines, shares, strict=True):
                engine.submit(jobs, number)

    out = [START]
    for number in range(staleness):
        submit(number)
    for number, batch in enumerate(batches):
        submit(number + staleness)
        for engine in engines:
            engine.finish(number)
        complete = max(engine.now for engine in engines)
        for engine in engines:
            engine.advance(complete)
        # Whoever is within a turn ends it first.
        end = max(engine.now for engine in engines) + update_seconds(speeds, batch)
        for engine in engines:
            engine.adopt(end)
        out.append(out[-1].next(end, _added([engine.counters for engine in engines]), speeds, batch))
    return out[1:]


def per_process(
    shape: Shape, speeds: Speeds, batches: Sequence[Batch], staleness: int, seed: Sequence[int]
) -> list[Cycle]:
    """An engine on each host."""
    engines = [Engine(shape, speeds, seed=(*seed, host)) for host in range(len(batches[0]))]
    return _cycles(engines, speeds, batches, staleness)


def lockstep(
    shape: Shape, speeds: Speeds, batches: Sequence[Batch], staleness: int, seed: Sequence[int]
) -> list[Cycle]:
    """One engine over all hosts, with one queue of trajectories.

    Its chunks are not left early: with many hosts some response ends in every iteration, and a turn costs the prefill
    of the host that has most to do.
    """
    shape = dataclasses.replace(shape, leave_after=0)
    engine = Engine(shape, speeds, hosts=len(batches[0]), parks=False, seed=seed)
    return _cycles([engine], speeds, batches, staleness)


def rounds(shape: Shape, speeds: Speeds, batches: Sequence[Batch], staleness: int, seed: Sequence[int]) -> list[Cycle]:
    """Generation of a step by all, then tools for all. With staleness 1 the update fills the first wait for tools.

    Caches are kept from round to round, also of trajectories that exceed slots and parking lines.
    """
    now, pending = 0.0, None
    done, out = [Counters()], [START]
    for number, batch in enumerate(batches):
        left = [list(jobs) for jobs in batch]
        index, void = 0, False
        while any(left):
            generated = 0.0
            for host, jobs in enumerate(left):
                engine = Engine(shape, speeds, parks=False, seed=(*seed, number, index, host))
                engine.submit([Job(job.work.steps[index][void], (0.0,)) for job in jobs], 0)
                engine.finish(0)
                generated = max(generated, engine.now)
                engine.counters.trajectories = sum(len(job.work.response) == index + 1 for job in jobs)
                engine.counters.stale_tokens = 0 if pending is None else engine.counters.tokens
                done.append(engine.counters)
            done = [_added(done)]
            wait = max((job.waits[index] for jobs in left for job in jobs), default=0.0)
            now += generated + max(wait, pending or 0.0)
            if pending is not None:
                out.append(out[-1].next(now, done[0], speeds, batches[number - 1]))
            void, pending = pending is not None, None
            index += 1
            left = [[job for job in jobs if len(job.work.response) > index] for jobs in left]
        if staleness:
            pending = update_seconds(speeds, batch)
        else:
            now += update_seconds(speeds, batch)
            out.append(out[-1].next(now, done[0], speeds, batch))
    return out[1:]


WAYS: Mapping[str, Callable[[Shape, Speeds, Sequence[Batch], int, Sequence[int]], list[Cycle]]] = {
    "per_process": per_process,
    "lockstep": lockstep,
    "rounds": rounds,
}


def batches_needed(updates: int, staleness: int) -> range:
    """Numbers of the batches to simulate for so many cycles; see `figures`."""
    return range(0, updates + 2) if staleness else range(1, updates + 1)


def figures(cycles: Sequence[Cycle], hosts: int, staleness: int, updates: int) -> Figures:
    """Means over `updates` cycles.

    With staleness 1 the first one is left out, since no batch before it had stragglers, and the last one, since no
    batch after it begins. Shares of nothing are 0: in a short time it may be that nothing is decoded.
    """
    begin, end = (cycles[0], cycles[updates]) if staleness else (START, cycles[updates - 1])
    seconds = end.end - begin.end
    did = {
        f.name: getattr(end.counters, f.name) - getattr(begin.counters, f.name) for f in dataclasses.fields(Counters)
    }
    return Figures(
        cycle_seconds=seconds / updates,
        trajectories_per_s=(end.trajectories - begin.trajectories) / seconds,
        decode_tokens_per_s=(end.tokens - begin.tokens) / seconds / hosts,
        occupancy=did["tokens"] / max(did["slot_steps"], 1),
        utilisation=did["useful_seconds"] / hosts / seconds + (end.learned - begin.learned) / seconds,
        stale=did["stale_tokens"] / max(did["tokens"], 1),
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all simulations of a comparison share.

    Attributes:
      recorded: groups to draw from.
      groups: of a batch, for each host, or of all hosts where `strong`.
      updates: cycles that count.
    """

    recorded: Sequence[Sequence[Work]]
    shape: Shape
    speeds: Speeds
    groups: int
    strong: bool
    updates: int


@dataclasses.dataclass(frozen=True)
class Cell:
    """One simulation."""

    latency: Latency
    way: str
    staleness: int
    hosts: int
    seed: int


def simulate(setting: Setting, cell: Cell) -> Figures:
    """The figures of one simulation; ways and numbers of hosts of one seed share their trajectories and latencies."""
    count = setting.groups * (1 if setting.strong else cell.hosts)
    batches = [
        deal(draw_batch(setting.recorded, count, cell.latency, cell.seed, number), cell.hosts)
        for number in batches_needed(setting.updates, cell.staleness)
    ]
    cycles = WAYS[cell.way](setting.shape, setting.speeds, batches, cell.staleness, (cell.seed,))
    return figures(cycles, cell.hosts, cell.staleness, setting.updates)

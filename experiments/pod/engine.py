"""One engine, event by event: seats, prefill, chunks of decoding, tools; the rules of `agentr1_jax/rollout/engine.py`.

Time passes in turns. Between two ends of responses every decode iteration is like the one before, so they are taken in
one leap; a response costs two heap operations however long it is.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Iterable

import numpy as np

from experiments.pod.model import Job, Shape, Speeds


@dataclasses.dataclass
class Counters:
    """What an engine did; seconds are those of all its hosts added up.

    Attributes:
      tokens: sampled.
      slot_steps: slots x decode iterations.
      iterations: of the decode loop.
      prefill_tokens: prompt tokens computed, `prefill_padded` with the padding of their calls.
      useful_seconds: of decode iterations, as far as their slots were live, and of prompt tokens without padding.
      stale_tokens: sampled by weights that had not seen all updates before the batch.
      trajectories: finished.
    """

    tokens: int = 0
    slot_steps: int = 0
    iterations: int = 0
    turns: int = 0
    prefill_tokens: int = 0
    prefill_padded: int = 0
    useful_seconds: float = 0.0
    stale_tokens: int = 0
    trajectories: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class _Open:
    """An admitted trajectory.

    Attributes:
      step: whose response comes next or is being sampled.
      host: of its slot; None while it has none: not seated yet, or parked.
      version: of the weights that its cache was computed with.
      idle: it keeps its slot while its tools are at work.
    """

    job: Job
    batch: int
    step: int = 0
    host: int | None = None
    version: int = 0
    idle: bool = False


class Engine:
    """Slots of one program over one or several hosts.

    Args:
      shape: of each host.
      speeds: of each host.
      hosts: that run the program in lockstep: each waits for the slowest in every prefill and decode iteration.
      parks: whether a trajectory whose tools are at work gives its slot to another; only with one host.
      seed: of the jitter.

    Attributes:
      now: seconds.
      version: updates that the weights in use have seen.
      unfinished: trajectories of each batch that have not ended.
    """

    def __init__(
        self, shape: Shape, speeds: Speeds, *, hosts: int = 1, parks: bool = True, seed: Iterable[int] = (0,)
    ) -> None:
        if parks and hosts > 1:
            raise ValueError("a cache line is moved within a host only: no parking with several hosts")
        self.now = 0.0
        self.version = self._newest = 0
        self.unfinished: dict[int, int] = {}
        self.counters = Counters()
        self._shape, self._speeds, self._hosts, self._parks = shape, speeds, hosts, parks
        self._room = hosts * shape.slots + (shape.parking if parks else 0)
        self._queue: collections.deque[_Open] = collections.deque()
        self._waiting: list[_Open] = []
        self._free = collections.deque(host for host in range(hosts) for _ in range(shape.slots))
        self._idle: list[_Open] = []  # Who went to its tools last is at the end; some have come back since.
        self._away: list[tuple[float, int, _Open]] = []
        self._ends: list[tuple[int, int, _Open]] = []
        self._live = [0] * hosts
        self._pushed = 0
        self._rng = np.random.default_rng([*seed, 2])

    def submit(self, jobs: Iterable[Job], batch: int) -> None:
        """Adds the trajectories of a batch behind those that wait for a line."""
        entering = [_Open(job, batch) for job in jobs]
        self.unfinished[batch] = len(entering)
        self._queue.extend(entering)
        self._admit()

    def finish(self, batch: int) -> None:
        """Goes on until every trajectory of a batch has ended."""
        while self.unfinished[batch]:
            if not self._turn() and self.unfinished[batch]:
                if not self._away:
                    raise RuntimeError(f"batch {batch}: {self.unfinished[batch]} trajectories wait for nothing")
                self.now = max(self.now, self._away[0][0])

    def advance(self, until: float) -> None:
        """Goes on until a time, or to the end of the turn under way then."""
        while self.now < until:
            if not self._turn():
                self.now = min(max(self.now, self._away[0][0]), until) if self._away else until

    def adopt(self, at: float) -> None:
        """Stands still until `at`, when newer weights are there; they are in use once no response is in flight."""
        self.now, self._newest = at, self._newest + 1

    def _admit(self) -> None:
        while self._room and self._queue:
            self._room -= 1
            self._waiting.append(self._queue.popleft())

    def _turn(self) -> bool:
        """Seats, prefill, a chunk, completions; False where nobody has a slot."""
        while self._away and self._away[0][0] <= self.now:
            self._go_on(heapq.heappop(self._away)[2])
        if not self._ends:
            self.version = self._newest
        # Responses in flight end under the weights that they began with; until then nobody begins one.
        rows = self._seat() if self.version == self._newest else {}
        if not self._ends:
            return False
        prefill = self._prefill(rows)
        decode, ended = self._decode()
        by_host = [0] * self._hosts
        for trajectory in ended:
            by_host[trajectory.host or 0] += 1
        seconds = self._speeds.turn + prefill + decode + self._speeds.response * max(by_host)
        if self._speeds.jitter:
            sigma = self._speeds.jitter
            seconds *= math.exp(sigma * max(self._rng.standard_normal(self._hosts).tolist()) - sigma**2 / 2)
        self.now += seconds
        self.counters.turns += 1
        for trajectory in ended:
            wait = trajectory.job.waits[trajectory.step]
            trajectory.step += 1
            if wait <= 0:
                self._go_on(trajectory)
                continue
            self._pushed += 1
            heapq.heappush(self._away, (self.now + wait, self._pushed, trajectory))
            if self._parks:
                trajectory.idle = True
                self._idle.append(trajectory)
        return True

    def _go_on(self, trajectory: _Open) -> None:
        """After its tools: the next response, or the end."""
        trajectory.idle = False
        if trajectory.step < len(trajectory.job.work.response):
            self._waiting.append(trajectory)
            return
        if trajectory.host is not None:
            self._free.append(trajectory.host)
        self.unfinished[trajectory.batch] -= 1
        self.counters.trajectories += 1
        self._room += 1
        self._admit()

    def _seat(self) -> dict[int, int]:
        """Gives slots to who waits, longest first; returns the prefill rows of each host."""
        rows: dict[int, int] = {}
        unseated = []
        for trajectory in self._waiting:
            if trajectory.host is None:
                trajectory.host = self._slot()
                if trajectory.host is None:
                    unseated.append(trajectory)
                    continue
            work, step = trajectory.job.work, trajectory.step
            void = step > 0 and trajectory.version != self.version
            trajectory.version = self.version
            tokens = (work.again if void else work.prefill)[step]
            self.counters.prefill_tokens += tokens
            self.counters.useful_seconds += tokens * self._speeds.prefill_token
            if self.version < trajectory.batch:
                self.counters.stale_tokens += work.response[step]
            if tokens:
                rows[trajectory.host] = rows.get(trajectory.host, 0) + self._shape.rows(tokens)
            self._live[trajectory.host] += 1
            self._pushed += 1
            heapq.heappush(self._ends, (self.counters.iterations + work.response[step], self._pushed, trajectory))
        self._waiting = unseated
        return rows

    def _slot(self) -> int | None:
        """A free slot's host, or that of the trajectory that went to its tools last, which is parked."""
        if self._free:
            return self._free.popleft()
        while self._idle:
            victim = self._idle.pop()
            if victim.idle and victim.host is not None:
                host, victim.host = victim.host, None
                return host
        return None

    def _prefill(self, rows: dict[int, int]) -> float:
        padded = [self._shape.padded(count) for count in rows.values()]
        self.counters.prefill_padded += sum(padded)
        return self._speeds.prefill_token * max(padded, default=0)

    def _decode(self) -> tuple[float, list[_Open]]:
        """A chunk: its seconds, and whose response ended."""
        count, slots = self.counters, self._shape.slots
        enough = self._shape.leave_after or math.inf
        last = count.iterations + self._shape.chunk
        seconds, ended = 0.0, list[_Open]()
        while self._ends and count.iterations < last and len(ended) < enough:
            steps = min(self._ends[0][0], last) - count.iterations
            took = steps * (self._speeds.step + self._speeds.slot * max(self._live))
            seconds += took
            count.iterations += steps
            count.tokens += steps * len(self._ends)
            count.slot_steps += steps * slots * self._hosts
            count.useful_seconds += took * len(self._ends) / slots
            while self._ends and self._ends[0][0] == count.iterations:
                trajectory = heapq.heappop(self._ends)[2]
                assert trajectory.host is not None
                self._live[trajectory.host] -= 1
                ended.append(trajectory)
        return seconds, ended

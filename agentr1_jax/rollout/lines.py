"""Host bookkeeping of the cache's lines: whose each is, which ids it holds, and what a prompt needs computed.

Nothing here touches the device; `Engine` turns moves and rows into calls of the compiled programs, in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from agentr1_jax.rollout.config import EngineConfig


@dataclasses.dataclass(eq=False)
class Ticket:
    """A trajectory's right to a line, for as long as it is open.

    Attributes:
      order: (group, sample), which breaks ties.
      shard: data shard of its line; None until its first response.
      line: its line; None until its first response has a slot.
      idle_since: turn of the engine in which its last response ended; None while one is asked for.
    """

    order: tuple[int, ...]
    shard: int | None = None
    line: int | None = None
    idle_since: int | None = None


@dataclasses.dataclass(frozen=True)
class Move:
    """The first `tokens` ids of a line, copied to another of the same shard."""

    source: int
    target: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """Ids to compute: those of `ids` from `start` on, in a line that holds the ones before."""

    line: int
    ids: np.ndarray
    start: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """Copies, then prefill rows that need them; the next stage may need both."""

    moves: list[Move]
    rows: list[NewTokens]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many ids two sequences share from their start."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


class Lines:
    """Who has which line of the cache, and which ids lie in it.

    Lines are counted over all shards: shard s owns `per_shard` of them, of which the first `slots_per_shard` are slots.

    Attributes:
      spare: for each shard the line that is nobody's and holds nothing: the next one to be parked goes there, and the
        padding of prefill calls.
    """

    def __init__(self, config: EngineConfig, shards: int) -> None:
        self.shards = shards
        self.slots_per_shard = config.slots // shards
        self.per_shard = config.lines(shards) // shards
        self._reuse = config.reuse
        self._together = config.together(shards)
        self._worth_copying = max(config.prefill_width // 2, 1)
        self._ids = np.zeros((config.lines(shards), config.length), np.int32)
        self._count = np.zeros(config.lines(shards), np.int32)
        self._owner: list[Ticket | None] = [None] * len(self._count)
        self._open = [0] * shards
        self.spare = [shard * self.per_shard + self.per_shard - 1 for shard in range(shards)]

    def close(self, ticket: Ticket) -> None:
        """Gives the line back. What it holds stays, for whoever comes with a prompt that begins alike."""
        if ticket.shard is not None:
            self._open[ticket.shard] -= 1
        if ticket.line is not None:
            self._owner[ticket.line] = None
            ticket.line = None

    def is_slot(self, line: int) -> bool:
        """Whether responses can be sampled in a line."""
        return line % self.per_shard < self.slots_per_shard

    def slot_of(self, line: int) -> int:
        """Slots are counted over all shards too."""
        return line // self.per_shard * self.slots_per_shard + line % self.per_shard

    def line_of(self, slot: int) -> int:
        """The inverse of `slot_of`."""
        return slot // self.slots_per_shard * self.per_shard + slot % self.slots_per_shard

    def idle_slots(self) -> set[int]:
        """Slots kept by trajectories whose tool is at work."""
        kept = [line for line, owner in enumerate(self._owner) if owner is not None and owner.idle_since is not None]
        return {self.slot_of(line) for line in kept if self.is_slot(line)}

    def held(self, line: int) -> np.ndarray:
        """The ids whose keys and values a line holds."""
        return self._ids[line, : self._count[line]]

    def hold(self, line: int, ids: np.ndarray) -> None:
        """Notes what a line holds from now on."""
        self._ids[line, : len(ids)] = ids
        self._count[line] = len(ids)

    def forget(self) -> None:
        """No line holds anything that may be used again."""
        self._count[:] = 0

    def seat(self, ticket: Ticket, prompt: np.ndarray) -> list[Move] | None:
        """Puts a trajectory on a slot: its own, a free one, or that of one whose tool is at work, which is parked.

        Returns:
          the moves that this takes, or None if every slot of its shard is decoding.
        """
        if ticket.line is not None and self.is_slot(ticket.line):
            return []
        if ticket.shard is None:
            # Not earlier: who left before this turn must have been closed, or a shard would get more than it can hold.
            ticket.shard = int(np.argmin(self._open))
            self._open[ticket.shard] += 1
        first = ticket.shard * self.per_shard
        slots = range(first, first + self.slots_per_shard)
        free = [line for line in slots if self._owner[line] is None]
        if free:
            return self._take(ticket, min(free, key=lambda line: self._stretch(line, len(prompt))))
        idle = [(line, o) for line in slots if (o := self._owner[line]) is not None and o.idle_since is not None]
        if not idle:
            return None
        # Who went to its tool last is likely the last to come back.
        _, victim = min(idle, key=lambda seat: (self._stretch(seat[0], len(prompt)), -(seat[1].idle_since or 0)))
        return self._replace(ticket, victim)

    def _stretch(self, line: int, tokens: int) -> int:
        """How badly so many tokens fit beside the lines that attention reads together with this slot."""
        first = line - line % self.per_shard % self._together
        others = [at for at in range(first, first + self._together) if at != line and self._owner[at] is not None]
        return abs(tokens - max((int(self._count[at]) for at in others), default=tokens))

    def _take(self, ticket: Ticket, line: int) -> list[Move]:
        moves = []
        if ticket.line is not None:
            moves = self._move(ticket.line, line)
            self._owner[ticket.line] = None
        self._owner[line] = ticket
        ticket.line = line
        return moves

    def _replace(self, ticket: Ticket, victim: Ticket) -> list[Move]:
        """The victim's slot goes to the ticket, and the victim to the spare line; a line that becomes free is spare."""
        slot, parked = victim.line, ticket.line
        assert slot is not None
        shard = slot // self.per_shard
        to = self.spare[shard]
        moves = self._move(slot, to)
        if parked is None:
            parking = range(shard * self.per_shard + self.slots_per_shard, (shard + 1) * self.per_shard)
            parked = next(line for line in parking if self._owner[line] is None and line != to)
        else:
            moves += self._move(parked, slot)
            self._owner[parked] = None
        self._count[parked] = 0
        self.spare[shard] = parked
        self._owner[slot], self._owner[to] = ticket, victim
        ticket.line, victim.line = slot, to
        return moves

    def _move(self, source: int, target: int) -> list[Move]:
        ids = self.held(source).copy()
        self.hold(target, ids)
        return [Move(source, target, len(ids))] if len(ids) else []

    def plan(self, wanted: Sequence[tuple[int, np.ndarray]]) -> tuple[list[Stage], int]:
        """What makes each line hold the ids wanted of it, where each shared prefix is computed once.

        Args:
          wanted: lines, each once, and the ids it is to hold.

        Returns:
          stages to carry out in order, and the tokens that need not be computed since some line holds them.
        """
        stages, saved, todo = [], 0, list(wanted)
        while todo:
            moves: list[Move] = []
            rows: list[NewTokens] = []
            later: list[tuple[int, np.ndarray]] = []
            leaders: list[tuple[int, np.ndarray]] = []
            for line, ids in todo:
                own = 0 if self._reuse == "none" else common_prefix(self.held(line), ids)
                source, shared = self._best_source(line, ids, {at for at, _ in leaders})
                shard = line // self.per_shard
                same = [other for at, other in leaders if at // self.per_shard == shard and self._reuse == "all"]
                promised = max((common_prefix(ids, other) for other in same), default=0)
                if promised >= max(own, shared) + self._worth_copying:
                    later.append((line, ids))
                    continue
                if shared >= own + self._worth_copying:
                    moves.append(Move(source, line, shared))
                    own = shared
                saved += own
                if own < len(ids):
                    rows.append(NewTokens(line, ids, own))
                leaders.append((line, ids))
            for line, ids in leaders:
                self.hold(line, ids)
            stages.append(Stage(moves, rows))
            todo = later
        return stages, saved

    def _best_source(self, line: int, ids: np.ndarray, unfit: set[int]) -> tuple[int, int]:
        """The other line of the shard that shares most with some ids, and how much. `unfit` are being rewritten."""
        first = line // self.per_shard * self.per_shard
        if self._reuse != "all":
            return line, 0
        lines = [at for at in range(first, first + self.per_shard) if at != line and at not in unfit]
        if not lines or not len(ids):
            return line, 0
        count = np.minimum(self._count[lines], len(ids))
        n = int(count.max())
        differs = self._ids[lines, :n] != ids[:n]
        shared = np.minimum(np.where(differs.any(1), differs.argmax(1) if n else 0, n), count)
        best = int(np.argmax(shared))
        return lines[best], int(shared[best])

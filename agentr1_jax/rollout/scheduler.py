"""Scheduler of the KV slots: which sequence has which slot, which ids a slot holds, and what a prompt needs computed.

It lives on the host and never touches the device: `Engine` turns its cache copies and prefill plans into calls of the
compiled programs, in order.

Each data shard has `kv_slots_per_shard` KV slots: decode slots first, then swap slots, of which one is spare. KV slots
are numbered over all shards, and so are decode slots; `decode_slot` and `kv_slot` convert between the two numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from agentr1_jax.rollout.config import EngineConfig


@dataclasses.dataclass(eq=False)
class Lease:
    """Right of a trajectory to one KV slot, or with pages to its pages, from its admission to its release.

    Attributes:
      order: (group, sample), which breaks ties.
      shard, kv_slot: its KV slot and the data shard of that; None before its first response.
      era: number of times that the cache was sealed before its first response; None before that.
      idle_since: cycle of the engine in which its last response ended; None while a response is requested.
    """

    order: tuple[int, ...]
    shard: int | None = None
    kv_slot: int | None = None
    era: int | None = None
    idle_since: int | None = None


@dataclasses.dataclass(frozen=True)
class CacheCopy:
    """Copy of the first `tokens` tokens of a KV slot to another one of the same shard."""

    source: int
    target: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Tokens to compute: `ids[start:]`, in a slot that holds `ids[:start]`: a KV slot, or with pages a decode slot."""

    slot: int
    ids: np.ndarray
    start: int


@dataclasses.dataclass(frozen=True)
class PrefillPass:
    """Cache copies, then prefills of KV slots that may need these copies."""

    copies: list[CacheCopy]
    prefills: list[Prefill]


class Advance(NamedTuple):
    """What prefill is to do now.

    Attributes:
      passes: to dispatch, in order.
      ready: decode slots whose prompts are whole after that.
      saved: prompt tokens that need not be computed, of the responses assigned since the last call.
    """

    passes: list[PrefillPass]
    ready: list[int]
    saved: int


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of ids that two sequences share from their start."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


class Scheduler:
    """Assignment of KV slots to sequences, and the ids whose keys and values each slot holds.

    Attributes:
      spare: for each shard, the KV slot that belongs to no sequence and holds nothing: the target of the next swap, and
        of the padding of prefill calls.
      table: None; see `PageScheduler`.
    """

    table = None

    def __init__(self, config: EngineConfig, shards: int) -> None:
        self.shards = shards
        self.decode_slots_per_shard = config.slots // shards
        self.kv_slots_per_shard = config.kv_slots(shards) // shards
        self._prefix_reuse = config.prefix_reuse
        self._group_size = config.attention_group_size(shards)
        self._min_copy = max(config.prefill_width // 2, 1)
        self._ids = np.zeros((config.kv_slots(shards), config.slot_tokens), np.int32)
        self._count = np.zeros(config.kv_slots(shards), np.int32)
        self._leases: list[Lease | None] = [None] * len(self._count)
        self._era = 0
        self._eras = np.zeros(len(self._count), np.int32)  # Of what each slot holds.
        self._open = [0] * shards
        self._copies: list[CacheCopy] = []  # Of new assignments, not taken by `advance` yet; as are the prompts.
        self._prompts: dict[int, np.ndarray] = {}
        self.spare = [shard * self.kv_slots_per_shard + self.kv_slots_per_shard - 1 for shard in range(shards)]

    def release(self, lease: Lease) -> None:
        """End a lease. The slot keeps its ids, for prompts that begin with them."""
        if lease.shard is not None:
            self._open[lease.shard] -= 1
        if lease.kv_slot is not None:
            self._leases[lease.kv_slot] = None
            lease.kv_slot = None

    def is_decode_slot(self, kv_slot: int) -> bool:
        """Return whether responses can be decoded in a KV slot."""
        return kv_slot % self.kv_slots_per_shard < self.decode_slots_per_shard

    def decode_slot(self, kv_slot: int) -> int:
        """Decode slot, numbered over all shards, of a KV slot."""
        return kv_slot // self.kv_slots_per_shard * self.decode_slots_per_shard + kv_slot % self.kv_slots_per_shard

    def kv_slot(self, decode_slot: int) -> int:
        """KV slot of a decode slot."""
        shard, place = divmod(decode_slot, self.decode_slots_per_shard)
        return shard * self.kv_slots_per_shard + place

    def tool_slots(self) -> set[int]:
        """Decode slots of sequences whose tool is running."""
        idle = [slot for slot, lease in enumerate(self._leases) if lease is not None and lease.idle_since is not None]
        return {self.decode_slot(slot) for slot in idle if self.is_decode_slot(slot)}

    def cached_ids(self, kv_slot: int) -> np.ndarray:
        """Ids whose keys and values a KV slot holds."""
        return self._ids[kv_slot, : self._count[kv_slot]]

    def set_cached_ids(self, kv_slot: int, ids: np.ndarray) -> None:
        """Record the ids that a KV slot holds from now on."""
        self._ids[kv_slot, : len(ids)] = ids
        self._count[kv_slot] = len(ids)

    def seal(self) -> None:
        """Keep what there is for the trajectories that have begun: those that begin later share nothing with them."""
        self._era += 1

    def invalidate(self) -> None:
        """Mark all KV slots as empty, because new weights make their contents void."""
        self._count[:] = 0

    @property
    def padding(self) -> list[int]:
        """For each shard the slot that padding of a prefill call writes, numbered within the shard."""
        return [slot % self.kv_slots_per_shard for slot in self.spare]

    @property
    def queue_length(self) -> int:
        """Number of decode slots whose prompt is not computed yet."""
        return len(self._prompts)

    def assign(self, lease: Lease, ids: np.ndarray, room: int) -> int | None:
        """Assign a decode slot: its own, a free one, or that of a sequence whose tool is running, which is swapped out.

        Sets `shard` and `kv_slot` of the lease.

        Args:
          lease: of the sequence.
          ids: int32, the prompt without its last id, which decoding feeds.
          room: positions that it needs at once; a KV slot has them all.

        Returns:
          the decode slot; None if every slot of its shard is decoding.
        """
        copies = self._take_slot(lease, ids)
        if copies is None or lease.kv_slot is None:
            return None
        if self._eras[lease.kv_slot] != lease.era:
            self._count[lease.kv_slot] = 0
            self._eras[lease.kv_slot] = lease.era or 0
        self._copies += copies
        self._prompts[lease.kv_slot] = ids
        return self.decode_slot(lease.kv_slot)

    def extend(self, slot: int, room: int) -> bool:
        """Return True: a KV slot has room for every position."""
        return True

    def by_age(self, slots: Iterable[int]) -> list[int]:
        """Return decode slots in any order: none needs to give way."""
        return list(slots)

    def advance(self) -> Advance:
        """Return the passes that bring each new decode slot to hold its prompt."""
        copies, self._copies = self._copies, []
        prompts, self._prompts = self._prompts, {}
        passes, saved = self._plan_prefill(prompts)
        return Advance([PrefillPass(copies, []), *passes], [self.decode_slot(slot) for slot in prompts], saved)

    def finish(self, slot: int, ids: np.ndarray | None) -> None:
        """End the response of a decode slot, which its sequence keeps.

        Args:
          ids: ids whose keys and values it holds; None where the response was dropped: those of the prompt.
        """
        if ids is not None:
            self.set_cached_ids(self.kv_slot(slot), ids)

    def _take_slot(self, lease: Lease, prompt: np.ndarray) -> list[CacheCopy] | None:
        """Assign a KV slot; return the cache copies that this needs, or None if every slot of its shard is decoding."""
        if lease.kv_slot is not None and self.is_decode_slot(lease.kv_slot):
            return []
        if lease.shard is None:
            # Not earlier: leases released before this cycle must have ended, or a shard would exceed its slots.
            lease.shard = int(np.argmin(self._open))
            self._open[lease.shard] += 1
            lease.era = self._era
        first = lease.shard * self.kv_slots_per_shard
        slots = range(first, first + self.decode_slots_per_shard)
        free = [slot for slot in slots if self._leases[slot] is None]
        if free:
            return self._resume_in(min(free, key=lambda slot: self._mismatch(slot, len(prompt))), lease)
        idle = [(slot, own) for slot in slots if (own := self._leases[slot]) is not None and own.idle_since is not None]
        if not idle:
            return None
        # The sequence that began its tool call last is likely the last to resume.
        _, victim = min(idle, key=lambda pair: (self._mismatch(pair[0], len(prompt)), -(pair[1].idle_since or 0)))
        return self._swap(victim, lease)

    def _mismatch(self, kv_slot: int, tokens: int) -> int:
        """Difference between a length and the longest other sequence in the attention group of a slot."""
        first = kv_slot - kv_slot % self.kv_slots_per_shard % self._group_size
        group = range(first, first + self._group_size)
        others = [slot for slot in group if slot != kv_slot and self._leases[slot] is not None]
        return abs(tokens - max((int(self._count[slot]) for slot in others), default=tokens))

    def _resume_in(self, kv_slot: int, lease: Lease) -> list[CacheCopy]:
        """Give a free slot to a sequence that has none or is swapped out."""
        copies = []
        if lease.kv_slot is not None:
            copies = self._copy(lease.kv_slot, kv_slot)
            self._leases[lease.kv_slot] = None
        self._leases[kv_slot] = lease
        lease.kv_slot = kv_slot
        return copies

    def _swap(self, victim: Lease, lease: Lease) -> list[CacheCopy]:
        """Swap the victim out to the spare slot and give its slot to the lease; a slot that becomes free is spare."""
        slot, swapped = victim.kv_slot, lease.kv_slot
        assert slot is not None
        shard = slot // self.kv_slots_per_shard
        target = self.spare[shard]
        copies = self._copy(slot, target)
        if swapped is None:
            first = shard * self.kv_slots_per_shard
            swap_slots = range(first + self.decode_slots_per_shard, first + self.kv_slots_per_shard)
            swapped = next(other for other in swap_slots if self._leases[other] is None and other != target)
        else:
            copies += self._copy(swapped, slot)
            self._leases[swapped] = None
        self._count[swapped] = 0
        self.spare[shard] = swapped
        self._leases[slot], self._leases[target] = lease, victim
        lease.kv_slot, victim.kv_slot = slot, target
        return copies

    def _copy(self, source: int, target: int) -> list[CacheCopy]:
        ids = self.cached_ids(source).copy()
        self.set_cached_ids(target, ids)
        self._eras[target] = self._eras[source]
        return [CacheCopy(source, target, len(ids))] if len(ids) else []

    def _plan_prefill(self, prompts: Mapping[int, np.ndarray]) -> tuple[list[PrefillPass], int]:
        """Plan passes after which each KV slot of `prompts` holds its ids; a shared prefix is computed once.

        Also return the number of tokens that need not be computed.
        """
        passes, saved = [], 0
        while prompts:
            this = PrefillPass([], [])
            planned: dict[int, np.ndarray] = {}
            for slot, ids in prompts.items():
                own = 0 if self._prefix_reuse == "none" else common_prefix(self.cached_ids(slot), ids)
                source, shared = self._longest_prefix(slot, ids, planned)
                if self._longest_planned_prefix(slot, ids, planned) >= max(own, shared) + self._min_copy:
                    continue  # The next pass copies it.
                if shared >= own + self._min_copy:
                    this.copies.append(CacheCopy(source, slot, shared))
                    own = shared
                if own < len(ids):
                    this.prefills.append(Prefill(slot, ids, own))
                saved += own
                planned[slot] = ids
            for slot, ids in planned.items():
                self.set_cached_ids(slot, ids)
            this.prefills.sort(key=lambda p: len(p.ids))  # Sequences of similar length attend alike.
            passes.append(this)
            prompts = {slot: ids for slot, ids in prompts.items() if slot not in planned}
        return passes, saved

    def _longest_planned_prefix(self, kv_slot: int, ids: np.ndarray, planned: Mapping[int, np.ndarray]) -> int:
        """Length of the longest prefix that some ids share with those planned in the shard of a slot."""
        if self._prefix_reuse != "all":
            return 0
        shard = kv_slot // self.kv_slots_per_shard
        slots = (s for s in planned if s // self.kv_slots_per_shard == shard and self._eras[s] == self._eras[kv_slot])
        return max((common_prefix(ids, planned[slot]) for slot in slots), default=0)

    def _longest_prefix(self, kv_slot: int, ids: np.ndarray, excluded: Container[int]) -> tuple[int, int]:
        """Other slot of the shard, not excluded, that shares the longest prefix with some ids, and its length."""
        first = kv_slot // self.kv_slots_per_shard * self.kv_slots_per_shard
        shard = range(first, first + self.kv_slots_per_shard)
        same = (slot for slot in shard if slot != kv_slot and self._eras[slot] == self._eras[kv_slot])
        slots = [slot for slot in same if slot not in excluded]
        if self._prefix_reuse != "all" or not slots:
            return kv_slot, 0
        count = np.minimum(self._count[slots], len(ids))
        n = int(count.max())
        differs = np.pad(self._ids[slots, :n] != ids[:n], ((0, 0), (0, 1)), constant_values=True)
        shared = np.minimum(differs.argmax(1), count)
        best = int(np.argmax(shared))
        return slots[best], int(shared[best])

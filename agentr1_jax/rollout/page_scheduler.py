"""Scheduler of pages: who reads which pages of the pool, and what a prompt needs computed.

It lives on the host and never touches the device, as does `scheduler.Scheduler`, whose methods it has.

Each data shard has its own pages. Full pages form a tree: a page hangs below the page that holds the ids before its
own, so that a prompt finds what it shares with others by walking down. What a trajectory has beyond full pages is its
own. A page that no trajectory holds stays in the tree until its place is needed.

New weights in flight seal the tree: a trajectory goes on with what the old ones computed, and shares it with those of
its time only.

Where pages run out, those in use by nobody go first, the longest unused first. Then the trajectory admitted last among
those at their tools loses its pages, and computes its context again when it comes back. Then a response waits; one in
progress, which cannot, makes the engine take the decode slot of the trajectory admitted last.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from agentr1_jax.rollout.config import EngineConfig
from agentr1_jax.rollout.scheduler import Advance, Lease, Prefill, PrefillPass, common_prefix

NO_IDS = np.zeros(0, np.int32)


@dataclasses.dataclass(eq=False)
class Node:
    """A full page in the tree of a shard.

    Attributes:
      page: its number; 0 for the root, which stands for an empty context.
      ids: bytes of its ids, the key below its parent.
      holders: trajectories that hold it. They hold all pages above it, too.
    """

    page: int
    ids: bytes
    parent: Node | None
    children: dict[bytes, Node] = dataclasses.field(default_factory=dict)
    holders: int = 0


class Pool:
    """Pages of one data shard: the free ones, and the tree of the full ones."""

    def __init__(self, pages: int) -> None:
        self.root = Node(0, b"", None)
        self.free = list(range(pages - 1, 0, -1))
        # Held by nobody, longest unused first. A page is let go after those below it, and held when one of them is: so
        # the first one always is a leaf.
        self.unused: dict[Node, None] = {}

    def find(self, root: Node, pages: list[bytes]) -> list[Node]:
        """Return the nodes of the longest known beginning of a sequence of full pages."""
        found, node = [], root
        for ids in pages:
            child = node.children.get(ids)
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def add(self, parent: Node, ids: bytes, page: int) -> Node:
        """Enter a full page below a node, and hold it.

        Where a page of the same ids is there already it is held instead, and the given one is free.
        """
        node = parent.children.get(ids)
        if node is None:
            node = parent.children[ids] = Node(page, ids, parent)
        else:
            self.free.append(page)
        self.hold([node])
        return node

    def hold(self, nodes: list[Node]) -> None:
        """Count one more trajectory that holds these nodes."""
        for node in nodes:
            node.holders += 1
            self.unused.pop(node, None)

    def let_go(self, nodes: list[Node]) -> None:
        """Count one trajectory less that holds these nodes, given from the root down."""
        for node in reversed(nodes):
            node.holders -= 1
            if not node.holders:
                self.unused[node] = None

    def evict(self) -> bool:
        """Free the page that nobody has held for the longest time; return False if there is none."""
        if not self.unused:
            return False
        node = next(iter(self.unused))
        assert node.parent is not None and not node.children
        del self.unused[node], node.parent.children[node.ids]
        self.free.append(node.page)
        return True


@dataclasses.dataclass(eq=False)
class Holding:
    """What a trajectory holds.

    Attributes:
      order: number of its first assignment: the lower, the older.
      root: of the tree in which it finds pages; see `PageScheduler.seal`.
      shared: full pages, from the root down.
      own: further pages, which it alone writes.
      ids: ids whose keys and values these pages hold, or will once its prefill has run.
      computed: how many of them do.
      slot: decode slot, numbered over all shards; None while it decodes nothing.
      queued: whether its prefill was not dispatched whole. Others may rely on the pages that it fills: whatever becomes
        of the trajectory, they are filled first.
      dropped: whether, while queued, its response was given up.
      released: whether, while queued, its lease ended.
    """

    shard: int
    order: int
    root: Node
    shared: list[Node] = dataclasses.field(default_factory=list)
    own: list[int] = dataclasses.field(default_factory=list)
    ids: np.ndarray = dataclasses.field(default_factory=lambda: NO_IDS)
    computed: int = 0
    slot: int | None = None
    queued: bool = False
    dropped: bool = False
    released: bool = False


class PageScheduler:
    """Assignment of decode slots and pages to trajectories.

    Attributes:
      table: int32 [slots, pages of a slot], page of each stretch of positions of a decode slot; 0 where it has none.
      padding: for each shard the slot that padding of a prefill call names: one that does not exist, and has no pages.
    """

    def __init__(self, config: EngineConfig, shards: int) -> None:
        self.table = np.zeros((config.slots, config.slot_tokens // config.page_tokens), np.int32)
        self.page_tokens = config.page_tokens
        self.decode_slots_per_shard = config.slots // shards
        self.padding = [self.decode_slots_per_shard] * shards
        self._rows, self._width = config.prefill_rows[-1], config.prefill_width
        self._pools = [Pool(config.page_count(shards) // shards) for _ in range(shards)]
        self._holdings: dict[Lease, Holding] = {}
        self._slots: list[Holding | None] = [None] * config.slots
        self._queues: list[collections.deque[Holding]] = [collections.deque() for _ in range(shards)]
        self._orders = itertools.count()
        self._saved = 0

    @property
    def queue_length(self) -> int:
        """Number of decode slots whose prompt is not computed yet."""
        return sum(map(len, self._queues))

    def tool_slots(self) -> set[int]:
        """Decode slots of sequences whose tool is running: none, they give theirs up."""
        return set()

    def invalidate(self) -> None:
        """Forget all pages, because new weights make their contents void; no response is in progress."""
        for holding in self._holdings.values():
            self._lose_pages(holding)
        for pool in self._pools:
            while pool.evict():
                pass

    def seal(self) -> None:
        """Keep what there is for the trajectories that have begun: those that begin later have a tree of their own."""
        for pool in self._pools:
            pool.root = Node(0, b"", None)

    def release(self, lease: Lease) -> None:
        """End a lease. Its full pages stay in the tree, for prompts that begin with them."""
        holding = self._holdings.pop(lease, None)
        if holding is None:
            return
        if holding.queued:
            holding.dropped = holding.released = True
        else:
            assert holding.slot is None
            self._lose_pages(holding)

    def assign(self, lease: Lease, ids: np.ndarray, room: int) -> int | None:
        """Assign a decode slot and pages to a prompt, and queue what is not computed.

        Args:
          ids: int32, the prompt without its last id, which decoding feeds.
          room: positions to have pages for at once, at least `len(ids)`.

        Returns:
          the decode slot; None if no slot of its shard is free, or there are too few pages.
        """
        holding = self._holdings.get(lease)
        if holding is None:
            count = collections.Counter(each.shard for each in self._holdings.values())
            shard = min(range(len(self._pools)), key=lambda i: count[i])
            holding = self._holdings[lease] = Holding(shard, next(self._orders), self._pools[shard].root)
        first = holding.shard * self.decode_slots_per_shard
        slots = range(first, first + self.decode_slots_per_shard)
        slot = next((slot for slot in slots if self._slots[slot] is None), None)
        if holding.queued or slot is None:
            return None
        pages = self._split(ids)
        self._take_prefix(holding, ids, pages)
        missing = -(-room // self.page_tokens) - len(holding.shared) - len(holding.own)
        if not self._make_room(holding, missing):
            return None
        pool = self._pools[holding.shard]
        holding.own += [pool.free.pop() for _ in range(missing)]
        self._saved += len(holding.ids)
        holding.computed, holding.ids = len(holding.ids), ids
        self._share(holding, pages)
        self._slots[slot], holding.slot, holding.queued = holding, slot, True
        self._queues[holding.shard].append(holding)
        self._write_table(holding)
        return slot

    def extend(self, slot: int, room: int) -> bool:
        """Give the sequence of a decode slot pages for so many positions; return False if there are too few."""
        holding = self._holding(slot)
        missing = -(-room // self.page_tokens) - len(holding.shared) - len(holding.own)
        if missing > 0:
            if not self._make_room(holding, missing):
                return False
            holding.own += [self._pools[holding.shard].free.pop() for _ in range(missing)]
            self._write_table(holding)
        return True

    def by_age(self, slots: Iterable[int]) -> list[int]:
        """Return decode slots in the order in which their trajectories were admitted."""
        return sorted(slots, key=lambda slot: self._holding(slot).order)

    def advance(self) -> Advance:
        """Return the tokens of the next prefill call, and the decode slots whose prompts are whole after it.

        Rows are filled first come first served: a page is computed before, or in the same call as, what relies on it.
        """
        prefills, ready = [], []
        for queue in self._queues:
            rows = self._rows
            while queue:
                holding = queue[0]
                new = min(len(holding.ids) - holding.computed, rows * self._width)
                if new:
                    end = holding.computed + new
                    prefills.append(Prefill(self._slot(holding), holding.ids[:end], holding.computed))
                    holding.computed = end
                    rows -= -(-new // self._width)
                # The pages of a dropped one are in the table until the call that fills them is dispatched.
                if holding.computed < len(holding.ids) or (new and holding.dropped):
                    break
                queue.popleft()
                holding.queued = False
                if not holding.dropped:
                    ready.append(self._slot(holding))
                    continue
                holding.dropped = False
                self.finish(self._slot(holding), None)
                if holding.released:
                    self._lose_pages(holding)
        saved, self._saved = self._saved, 0
        return Advance([PrefillPass([], prefills)] if prefills else [], ready, saved)

    def finish(self, slot: int, ids: np.ndarray | None) -> None:
        """End the response of a decode slot, which is free from then on; its trajectory keeps the pages.

        Args:
          ids: ids whose keys and values are in the pages; None where it was dropped: those of the prompt.
        """
        holding = self._holding(slot)
        if holding.queued:
            holding.dropped = True
            return
        if ids is not None:
            holding.ids = ids
            self._share(holding, self._split(ids))
        used = -(-len(holding.ids) // self.page_tokens) - len(holding.shared)
        self._pools[holding.shard].free += holding.own[used:]
        del holding.own[used:]
        self._slots[slot] = holding.slot = None
        self.table[slot] = 0

    def _holding(self, slot: int) -> Holding:
        holding = self._slots[slot]
        assert holding is not None
        return holding

    @staticmethod
    def _slot(holding: Holding) -> int:
        assert holding.slot is not None
        return holding.slot

    def _split(self, ids: np.ndarray) -> list[bytes]:
        """Return the ids of each full page, as keys of the tree."""
        t = self.page_tokens
        return [ids[at : at + t].tobytes() for at in range(0, len(ids) - t + 1, t)]

    def _take_prefix(self, holding: Holding, ids: np.ndarray, pages: list[bytes]) -> None:
        """Exchange the pages of a holding for those in the tree that a prompt begins with, and its own that go on."""
        pool, t = self._pools[holding.shard], self.page_tokens
        found = pool.find(holding.root, pages)
        same, before = common_prefix(holding.ids, ids), len(holding.shared)
        goes_on = [i >= len(found) and i * t < same for i in range(before, before + len(holding.own))]
        pool.hold(found)
        pool.let_go(holding.shared)
        pool.free += [page for page, keep in zip(holding.own, goes_on, strict=True) if not keep]
        holding.own = [page for page, keep in zip(holding.own, goes_on, strict=True) if keep]
        holding.shared = found
        holding.ids = ids[: max(same, len(found) * t) if holding.own else len(found) * t]

    def _share(self, holding: Holding, pages: list[bytes]) -> None:
        """Enter own pages that are full into the tree."""
        pool = self._pools[holding.shard]
        for ids in pages[len(holding.shared) :]:
            parent = holding.shared[-1] if holding.shared else holding.root
            holding.shared.append(pool.add(parent, ids, holding.own.pop(0)))
        if holding.slot is not None:
            self._write_table(holding)

    def _make_room(self, holding: Holding, pages: int) -> bool:
        """Have so many free pages in the shard of a holding; return False where what others decode leaves too few."""
        pool = self._pools[holding.shard]
        if len(pool.free) >= pages:
            return True
        same_shard = (h for h in self._holdings.values() if h.shard == holding.shard and h is not holding)
        others = sorted((h for h in same_shard if h.slot is None), key=lambda h: h.order)
        held = collections.Counter(node for h in others for node in h.shared)
        most = len(pool.free) + len(pool.unused) + sum(len(h.own) for h in others)
        most += sum(node.holders == count for node, count in held.items())
        while most >= pages > len(pool.free):
            if not pool.evict():
                if not others:
                    return False
                self._lose_pages(others.pop())
        return len(pool.free) >= pages

    def _lose_pages(self, holding: Holding) -> None:
        pool = self._pools[holding.shard]
        pool.let_go(holding.shared)
        pool.free += holding.own
        holding.shared, holding.own, holding.ids = [], [], NO_IDS

    def _write_table(self, holding: Holding) -> None:
        pages = [node.page for node in holding.shared] + holding.own
        row = self.table[self._slot(holding)]
        row[: len(pages)] = pages
        row[len(pages) :] = 0

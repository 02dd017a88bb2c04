"""The scheduler of KV slots against a slow model of the ids that are really in the cache."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedules import CONFIG

from agentr1_jax.rollout.scheduler import CacheCopy, Lease, Scheduler

GARBAGE = -7
LENGTH = 32
WIDTH = 8
MIN_COPY = WIDTH // 2

prompts = st.lists(st.integers(0, 2), max_size=LENGTH).map(np.int32)
"""Few ids, so that many begin alike."""


def scheduler_of(slots, swap_slots, shards=1, group=1, reuse="all"):
    config = dataclasses.replace(
        CONFIG,
        slots=slots,
        swap_slots=swap_slots,
        slot_tokens=LENGTH,
        attention_block=LENGTH,
        prefill_width=WIDTH,
        attention_group=group,
        prefix_reuse=reuse,
    )
    config.check_shards(shards)
    return Scheduler(config, shards)


def computed_by(passes):
    """Tokens that passes compute."""
    return sum(len(row.ids) - row.start for step in passes for row in step.prefills)


class Cache:
    """Ids that are really in each KV slot; garbage where nothing was written."""

    def __init__(self, slots, shards):
        self.ids = np.full((slots, LENGTH), GARBAGE)
        self.per_shard = slots // shards

    def copy(self, copies):
        for m in copies:
            assert m.source // self.per_shard == m.target // self.per_shard, "a copy to another shard"
            assert m.source != m.target and m.tokens > 0
            self.ids[m.target, : m.tokens] = self.ids[m.source, : m.tokens]
            self.ids[m.target, m.tokens :] = GARBAGE  # The device may copy more, and need not.

    def compute(self, rows):
        """Check that rows continue what is there; later positions become garbage, as padding makes them."""
        for row in rows:
            assert row.start < len(row.ids)
            np.testing.assert_array_equal(self.ids[row.slot, : row.start], row.ids[: row.start])
            self.ids[row.slot, row.start : len(row.ids)] = row.ids[row.start :]
            self.ids[row.slot, len(row.ids) :] = GARBAGE

    def execute(self, passes, spare):
        for step in passes:
            self.copy(step.copies)
            self.compute(step.prefills)
            written = [row.slot for row in step.prefills]
            assert len(written) == len(set(written))
            # Padding of prefill calls.
            self.ids[spare] = GARBAGE


class Trajectories(RuleBasedStateMachine):
    """Trajectories arrive, request, decode, call tools, resume and leave in any order, as in the engine."""

    @initialize(
        shape=st.sampled_from([(1, 0, 1, 1), (1, 3, 1, 1), (3, 2, 1, 1), (2, 2, 2, 1), (4, 0, 2, 2), (4, 4, 1, 2)]),
        reuse=st.sampled_from(["all", "all", "own", "none"]),
    )
    def begin(self, shape, reuse):
        slots, swap_slots, shards, group = shape
        self.scheduler = scheduler_of(slots, swap_slots, shards, group, reuse)
        self.reuse = reuse
        self.room = slots + swap_slots
        self.cache = Cache(slots + swap_slots + shards, shards)
        self.cycle = 0
        self.opened = 0
        self.leases: list[Lease] = []
        self.asking: dict[Lease, np.ndarray] = {}
        self.decoding: dict[Lease, np.ndarray] = {}

    @precondition(lambda self: len(self.leases) < self.room)
    @rule(many=st.integers(1, 4))
    def arrive(self, many):
        for _ in range(min(many, self.room - len(self.leases))):
            self.leases.append(Lease((self.opened,)))
            self.opened += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def ask(self, data):
        away = [t for t in self.leases if t not in self.asking and t not in self.decoding]
        for lease in data.draw(st.lists(st.sampled_from(away), unique=True) if away else st.just([])):
            held = self.wanted.get(lease, np.int32([]))
            kept = held[: data.draw(st.integers(0, len(held)))]
            self.asking[lease] = np.concatenate([kept, data.draw(prompts), np.int32([1])])[: LENGTH - 4]

    @property
    def wanted(self):
        """Ids that the KV slot of each trajectory must hold, where it has one."""
        return {t: self.scheduler.cached_ids(t.kv_slot).copy() for t in self.leases if t.kv_slot is not None}

    @rule()
    def run_a_cycle(self):
        """As `Engine._assign` and `Engine._prefill`."""
        self.cycle += 1
        before = self.wanted
        for lease in self.asking:
            lease.idle_since = None
        decoding_at = {t: t.kv_slot for t in self.decoding}
        held_by, assigned = {}, {}
        for lease, prompt in self.asking.items():
            slot = self.scheduler.assign(lease, prompt[:-1], len(prompt))
            if slot is None:
                continue
            assert self.scheduler.is_decode_slot(lease.kv_slot) and self.scheduler.kv_slot(slot) == lease.kv_slot
            assert lease.kv_slot not in held_by
            held_by[lease.kv_slot] = prompt[:-1]
            assigned[lease] = prompt
        assert self.scheduler.queue_length == len(held_by)
        passes, ready, saved = self.scheduler.advance()
        assert ready == [self.scheduler.decode_slot(slot) for slot in held_by] and not self.scheduler.queue_length
        self.cache.execute(passes, self.scheduler.spare)
        assert {t: t.kv_slot for t in self.decoding} == decoding_at, "a trajectory was moved while it decoded"
        assert computed_by(passes) + saved == sum(map(len, held_by.values()))
        if self.reuse == "none":
            assert saved == 0
        for lease, ids in before.items():
            if lease not in assigned:
                np.testing.assert_array_equal(self.scheduler.cached_ids(lease.kv_slot), ids)
        for lease, prompt in assigned.items():
            np.testing.assert_array_equal(self.scheduler.cached_ids(lease.kv_slot), prompt[:-1])
            del self.asking[lease]
            self.decoding[lease] = prompt
        if self.asking:
            self.check_that_the_rest_finds_no_slot()

    def check_that_the_rest_finds_no_slot(self):
        for lease in self.asking:
            slots = {t.kv_slot for t in self.decoding if t.shard == lease.shard}
            assert len(slots) == self.scheduler.decode_slots_per_shard

    @precondition(lambda self: self.decoding)
    @rule(data=st.data(), answer=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def end_a_response(self, data, answer):
        lease = data.draw(st.sampled_from(list(self.decoding)))
        ids = np.concatenate([self.decoding.pop(lease), answer])[:-1]
        start = len(self.scheduler.cached_ids(lease.kv_slot))
        self.cache.ids[lease.kv_slot, start : len(ids)] = ids[start:]
        self.scheduler.set_cached_ids(lease.kv_slot, ids)
        lease.idle_since = self.cycle

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def give_up(self, data):
        """Drop a response of which some tokens were written after the prompt."""
        lease = data.draw(st.sampled_from(list(self.decoding)))
        del self.decoding[lease]
        self.cache.ids[lease.kv_slot, len(self.scheduler.cached_ids(lease.kv_slot)) :] = GARBAGE
        lease.idle_since = self.cycle

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def leave(self, data):
        """In the middle of anything."""
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.asking.pop(lease, None)
        if self.decoding.pop(lease, None) is not None:
            lease.idle_since = self.cycle
        self.scheduler.release(lease)

    @invariant()
    def slots_hold_the_ids_that_the_scheduler_records(self):
        if not hasattr(self, "scheduler"):
            return
        for slot, ids in enumerate(self.cache.ids):
            held = self.scheduler.cached_ids(slot)
            np.testing.assert_array_equal(ids[: len(held)], held)
        taken = [t.kv_slot for t in self.leases if t.kv_slot is not None]
        assert len(taken) == len(set(taken)), "two trajectories share a KV slot"
        assert not set(taken) & set(self.scheduler.spare)
        assert not any(len(self.scheduler.cached_ids(slot)) for slot in self.scheduler.spare)
        kept = [t.kv_slot for t in self.leases if t.kv_slot is not None and t.idle_since is not None]
        assert self.scheduler.tool_slots() == {
            self.scheduler.decode_slot(slot) for slot in kept if self.scheduler.is_decode_slot(slot)
        }


TestTrajectories = Trajectories.TestCase
TestTrajectories.settings = settings(max_examples=40, stateful_step_count=40)


def prefill_of(scheduler, leases, prompts):
    """Passes for prompts that all find a slot without a copy, and the tokens saved."""
    for lease, ids in zip(leases, prompts, strict=True):
        assert scheduler.assign(lease, ids, len(ids)) is not None
    (assigned, *passes), _, saved = scheduler.advance()
    assert not assigned.copies and not assigned.prefills
    return passes, saved


def trie(sequences):
    """Distinct prefixes, the empty one left out."""
    return len({tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))})


@settings(max_examples=100)
@given(group=st.lists(prompts, min_size=1, max_size=6), attention_group=st.sampled_from([1, 2]))
def test_what_prompts_share_is_computed_once(group, attention_group):
    scheduler = scheduler_of(6, 0, group=attention_group)
    cache = Cache(7, 1)
    leases = [Lease((i,)) for i in range(len(group))]
    passes, saved = prefill_of(scheduler, leases, group)
    cache.execute(passes, scheduler.spare)
    for t, ids in zip(leases, group, strict=True):
        np.testing.assert_array_equal(cache.ids[t.kv_slot, : len(ids)], ids)
    computed = computed_by(passes)
    assert computed + saved == sum(map(len, group))
    # Where less than that could be copied, it is computed again.
    assert trie(group) <= computed <= trie(group) + (MIN_COPY - 1) * (len(group) - 1)


def test_a_group_computes_its_prompt_once_in_each_shard():
    prompt = np.arange(20, dtype=np.int32)
    for shards in (1, 2):
        scheduler = scheduler_of(8, 0, shards)
        leases = [Lease((0, i)) for i in range(8)]
        (first, second), saved = prefill_of(scheduler, leases, [prompt] * 8)
        assert computed_by([first, second]) == 20 * shards and saved == 20 * (8 - shards)
        assert len(first.prefills) == shards and not first.copies and not second.prefills
        assert collections.Counter(t.shard for t in leases) == dict.fromkeys(range(shards), 8 // shards)


@pytest.mark.parametrize(("reuse", "computed"), [("all", 4), ("own", 13 + 4), ("none", 20 + 20)])
def test_lesser_reuse_computes_more(reuse, computed):
    """One slot continues its own 16 ids; another begins like the first."""
    scheduler = scheduler_of(2, 0, reuse=reuse)
    own = np.arange(20, dtype=np.int32)
    first, second = Lease((0,)), Lease((1,))
    for lease, ids in ((first, own[:16]), (second, np.concatenate([own[:7], own[:13]])[:7])):
        slot = scheduler.assign(lease, ids, len(ids))
        scheduler.advance()
        scheduler.finish(slot, ids)
    passes, saved = prefill_of(scheduler, [first, second], [own, own])
    assert computed_by(passes) == computed and saved == 40 - computed
    assert any(step.copies for step in passes) == (reuse == "all")


def test_a_slot_that_is_overwritten_is_no_source():
    """The first slot becomes a copy of the third, so that its ids are gone when the second needs them."""
    scheduler, cache = scheduler_of(3, 0), Cache(4, 1)
    x, y = np.arange(9, dtype=np.int32), np.arange(20, 29, dtype=np.int32)
    for slot, ids in ((0, x), (2, y)):
        scheduler.set_cached_ids(slot, ids)
        cache.ids[slot, :9] = ids
    passes, _ = prefill_of(scheduler, [Lease((0,)), Lease((1,))], [y, x])
    cache.execute(passes, scheduler.spare)
    assert cache.ids[0, :9].tolist() == y.tolist() and cache.ids[1, :9].tolist() == x.tolist()


def test_the_last_tool_call_is_swapped_out_first_and_a_decoding_sequence_never():
    scheduler = scheduler_of(2, 2)
    prompt = np.arange(9, dtype=np.int32)
    leases = [Lease((i,)) for i in range(4)]
    for cycle, lease in enumerate(leases[:2]):
        prefill_of(scheduler, [lease], [prompt])
        lease.idle_since = cycle
    assert scheduler.assign(leases[2], prompt, 9) == 1
    assert [m.source for m in scheduler.advance().passes[0].copies] == [1]
    assert not scheduler.is_decode_slot(leases[1].kv_slot) and leases[2].kv_slot == 1 and leases[0].kv_slot == 0
    leases[0].idle_since = None
    assert scheduler.assign(leases[3], prompt, 9) is None and leases[3].kv_slot is None
    assert scheduler.tool_slots() == set()
    leases[0].idle_since = 5
    assert scheduler.tool_slots() == {0}
    leases[1].idle_since = None
    (spare,), swapped = scheduler.spare, leases[1].kv_slot
    assert scheduler.assign(leases[1], prompt, 9) == 0
    assert scheduler.advance().passes[0].copies == [CacheCopy(0, spare, 9), CacheCopy(swapped, 0, 9)]
    assert (leases[0].kv_slot, leases[1].kv_slot, scheduler.spare) == (spare, 0, [swapped])

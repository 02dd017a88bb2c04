"""The bookkeeping of cache lines alone, against a slow model that keeps the ids that are really there."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedules import CONFIG

from agentr1_jax.rollout.lines import Lines, Move, Ticket

GARBAGE = -7
LENGTH = 32
WIDTH = 8
WORTH_COPYING = WIDTH // 2

prompts = st.lists(st.integers(0, 2), max_size=LENGTH).map(np.int32)
"""Few ids, so that many begin alike."""


def lines_of(slots, parking, shards=1, together=1, reuse="all"):
    config = dataclasses.replace(
        CONFIG,
        slots=slots,
        parking=parking,
        length=LENGTH,
        attention_block=LENGTH,
        prefill_width=WIDTH,
        attention_slots=together,
        reuse=reuse,
    )
    config.check_shards(shards)
    return Lines(config, shards)


class Cache:
    """What is really in each line: ids at their positions, garbage where nobody wrote."""

    def __init__(self, lines, shards):
        self.ids = np.full((lines, LENGTH), GARBAGE)
        self.per_shard = lines // shards

    def move(self, moves):
        for m in moves:
            assert m.source // self.per_shard == m.target // self.per_shard, "a line moved to another shard"
            assert m.source != m.target and m.tokens > 0
            self.ids[m.target, : m.tokens] = self.ids[m.source, : m.tokens]
            self.ids[m.target, m.tokens :] = GARBAGE  # The device may copy more, and need not.

    def compute(self, rows):
        """Rows may only go on from what is there; what lies behind them is spoilt, as padding spoils it."""
        for row in rows:
            assert row.start < len(row.ids)
            np.testing.assert_array_equal(self.ids[row.line, : row.start], row.ids[: row.start])
            self.ids[row.line, row.start : len(row.ids)] = row.ids[row.start :]
            self.ids[row.line, len(row.ids) :] = GARBAGE

    def carry_out(self, moves, stages, spare):
        self.move(moves)
        for stage in stages:
            self.move(stage.moves)
            self.compute(stage.rows)
            written = [row.line for row in stage.rows]
            assert len(written) == len(set(written))
            # Padding of prefill calls.
            self.ids[spare] = GARBAGE


class Trajectories(RuleBasedStateMachine):
    """Trajectories come, ask, decode, go to their tools, come back and leave, in any order, as the engine has them."""

    @initialize(
        shape=st.sampled_from([(1, 0, 1, 1), (1, 3, 1, 1), (3, 2, 1, 1), (2, 2, 2, 1), (4, 0, 2, 2), (4, 4, 1, 2)]),
        reuse=st.sampled_from(["all", "all", "own", "none"]),
    )
    def begin(self, shape, reuse):
        slots, parking, shards, together = shape
        self.lines = lines_of(slots, parking, shards, together, reuse)
        self.reuse = reuse
        self.room = slots + parking
        self.cache = Cache(slots + parking + shards, shards)
        self.turn = 0
        self.opened = 0
        self.tickets: list[Ticket] = []
        self.asking: dict[Ticket, np.ndarray] = {}
        self.decoding: dict[Ticket, np.ndarray] = {}

    @precondition(lambda self: len(self.tickets) < self.room)
    @rule(many=st.integers(1, 4))
    def arrive(self, many):
        for _ in range(min(many, self.room - len(self.tickets))):
            self.tickets.append(Ticket((self.opened,)))
            self.opened += 1

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def ask(self, data):
        away = [t for t in self.tickets if t not in self.asking and t not in self.decoding]
        for ticket in data.draw(st.lists(st.sampled_from(away), unique=True) if away else st.just([])):
            held = self.wanted.get(ticket, np.int32([]))
            kept = held[: data.draw(st.integers(0, len(held)))]
            self.asking[ticket] = np.concatenate([kept, data.draw(prompts), np.int32([1])])[: LENGTH - 4]

    @property
    def wanted(self):
        """What the line of each trajectory must hold, as far as it has one."""
        return {t: self.lines.held(t.line).copy() for t in self.tickets if t.line is not None}

    @rule()
    def take_a_turn(self):
        """As `Engine._seat` and `_fill`."""
        self.turn += 1
        before = self.wanted
        for ticket in self.asking:
            ticket.idle_since = None
        decoding_at = {t: t.line for t in self.decoding}
        moves, seats, seated = [], {}, {}
        for ticket, prompt in self.asking.items():
            taken = self.lines.seat(ticket, prompt)
            if taken is None:
                continue
            assert self.lines.is_slot(ticket.line)
            moves += taken
            assert ticket.line not in seats
            seats[ticket.line] = prompt[:-1]
            seated[ticket] = prompt
        stages, saved = self.lines.plan(list(seats.items()))
        self.cache.carry_out(moves, stages, self.lines.spare)
        assert {t: t.line for t in self.decoding} == decoding_at, "a trajectory was moved while it decoded"
        computed = sum(len(row.ids) - row.start for stage in stages for row in stage.rows)
        assert computed + saved == sum(map(len, seats.values()))
        if self.reuse == "none":
            assert saved == 0
        for ticket, ids in before.items():
            if ticket not in seated:
                np.testing.assert_array_equal(self.lines.held(ticket.line), ids)
        for ticket, prompt in seated.items():
            np.testing.assert_array_equal(self.lines.held(ticket.line), prompt[:-1])
            del self.asking[ticket]
            self.decoding[ticket] = prompt
        if self.asking:
            self.check_that_the_rest_finds_no_slot()

    def check_that_the_rest_finds_no_slot(self):
        for ticket in self.asking:
            slots = {t.line for t in self.decoding if t.shard == ticket.shard}
            assert len(slots) == self.lines.slots_per_shard

    @precondition(lambda self: self.decoding)
    @rule(data=st.data(), answer=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def end_a_response(self, data, answer):
        ticket = data.draw(st.sampled_from(list(self.decoding)))
        ids = np.concatenate([self.decoding.pop(ticket), answer])[:-1]
        start = len(self.lines.held(ticket.line))
        self.cache.ids[ticket.line, start : len(ids)] = ids[start:]
        self.lines.hold(ticket.line, ids)
        ticket.idle_since = self.turn

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def give_up(self, data):
        """A response that nobody waits for any more; some of it was written behind the prompt."""
        ticket = data.draw(st.sampled_from(list(self.decoding)))
        del self.decoding[ticket]
        self.cache.ids[ticket.line, len(self.lines.held(ticket.line)) :] = GARBAGE
        ticket.idle_since = self.turn

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def leave(self, data):
        """In the middle of anything."""
        ticket = data.draw(st.sampled_from(self.tickets))
        self.tickets.remove(ticket)
        self.asking.pop(ticket, None)
        if self.decoding.pop(ticket, None) is not None:
            ticket.idle_since = self.turn
        self.lines.close(ticket)

    @invariant()
    def lines_hold_what_they_are_said_to_hold(self):
        if not hasattr(self, "lines"):
            return
        for line, ids in enumerate(self.cache.ids):
            held = self.lines.held(line)
            np.testing.assert_array_equal(ids[: len(held)], held)
        taken = [t.line for t in self.tickets if t.line is not None]
        assert len(taken) == len(set(taken)), "two trajectories share a line"
        assert not set(taken) & set(self.lines.spare)
        assert not any(len(self.lines.held(line)) for line in self.lines.spare)
        kept = [t.line for t in self.tickets if t.line is not None and t.idle_since is not None]
        assert self.lines.idle_slots() == {self.lines.slot_of(line) for line in kept if self.lines.is_slot(line)}


TestTrajectories = Trajectories.TestCase
TestTrajectories.settings = settings(max_examples=40, stateful_step_count=40)


def trie(sequences):
    """Distinct prefixes, the empty one left out."""
    return len({tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))})


@settings(max_examples=100)
@given(group=st.lists(prompts, min_size=1, max_size=6), together=st.sampled_from([1, 2]))
def test_what_prompts_share_is_computed_once(group, together):
    lines = lines_of(6, 0, together=together)
    cache = Cache(7, 1)
    tickets = [Ticket((i,)) for i in range(len(group))]
    assert all(lines.seat(t, ids) == [] for t, ids in zip(tickets, group, strict=True))
    stages, saved = lines.plan([(t.line, ids) for t, ids in zip(tickets, group, strict=True)])
    cache.carry_out([], stages, lines.spare)
    for t, ids in zip(tickets, group, strict=True):
        np.testing.assert_array_equal(cache.ids[t.line, : len(ids)], ids)
    computed = sum(len(row.ids) - row.start for stage in stages for row in stage.rows)
    assert computed + saved == sum(map(len, group))
    # Where less than that could be copied, it is computed again.
    assert trie(group) <= computed <= trie(group) + (WORTH_COPYING - 1) * (len(group) - 1)


def test_a_group_computes_its_prompt_once_in_each_shard():
    prompt = np.arange(20, dtype=np.int32)
    for shards in (1, 2):
        lines = lines_of(8, 0, shards)
        tickets = [Ticket((0, i)) for i in range(8)]
        assert all(lines.seat(t, prompt) == [] for t in tickets)
        stages, saved = lines.plan([(t.line, prompt) for t in tickets])
        assert sum(len(row.ids) - row.start for stage in stages for row in stage.rows) == 20 * shards
        assert saved == 20 * (8 - shards) and len(stages) == 2
        assert len(stages[0].rows) == shards and not stages[0].moves and not stages[1].rows
        assert collections.Counter(t.shard for t in tickets) == dict.fromkeys(range(shards), 8 // shards)


@pytest.mark.parametrize(("reuse", "computed"), [("all", 4), ("own", 13 + 4), ("none", 20 + 20)])
def test_lesser_reuse_computes_more(reuse, computed):
    """One line goes on from its own 16 ids, another begins like the first one's."""
    lines = lines_of(2, 0, reuse=reuse)
    own = np.arange(20, dtype=np.int32)
    first, second = Ticket((0,)), Ticket((1,))
    lines.seat(first, own)
    lines.hold(first.line, own[:16])
    other = np.concatenate([own[:7], own[:13]])
    lines.seat(second, other)
    lines.hold(second.line, other[:7])
    stages, saved = lines.plan([(first.line, own), (second.line, own)])
    rows = [len(row.ids) - row.start for stage in stages for row in stage.rows]
    assert sum(rows) == computed and saved == 40 - computed
    assert bool(sum(len(stage.moves) for stage in stages)) == (reuse == "all")


def test_a_line_that_is_being_rewritten_is_no_source():
    """The first line becomes a copy of the third, so that what it held is gone when the second wants it."""
    lines, cache = lines_of(3, 0), Cache(4, 1)
    x, y = np.arange(9, dtype=np.int32), np.arange(20, 29, dtype=np.int32)
    for line, ids in ((0, x), (2, y)):
        lines.hold(line, ids)
        cache.ids[line, :9] = ids
    stages, _ = lines.plan([(0, y), (1, x)])
    cache.carry_out([], stages, lines.spare)
    assert cache.ids[0, :9].tolist() == y.tolist() and cache.ids[1, :9].tolist() == x.tolist()


def test_who_went_to_its_tool_last_is_parked_first_and_nobody_who_decodes():
    lines = lines_of(2, 2)
    prompt = np.arange(9, dtype=np.int32)
    tickets = [Ticket((i,)) for i in range(4)]
    for turn, ticket in enumerate(tickets[:2]):
        assert lines.seat(ticket, prompt) == []
        lines.hold(ticket.line, prompt)
        ticket.idle_since = turn
    assert [m.source for m in lines.seat(tickets[2], prompt)] == [1]
    assert not lines.is_slot(tickets[1].line) and tickets[2].line == 1 and tickets[0].line == 0
    tickets[0].idle_since = None
    assert lines.seat(tickets[3], prompt) is None and tickets[3].line is None
    assert lines.idle_slots() == set()
    tickets[0].idle_since = 5
    assert lines.idle_slots() == {0}
    tickets[1].idle_since = None
    (spare,), parked = lines.spare, tickets[1].line
    assert lines.seat(tickets[1], prompt) == [Move(0, spare, 9), Move(parked, 0, 9)]
    assert (tickets[0].line, tickets[1].line, lines.spare) == (spare, 0, [parked])


def test_slots_are_numbered_over_all_shards():
    lines = lines_of(4, 2, 2)
    assert [lines.line_of(slot) for slot in range(4)] == [0, 1, 4, 5]
    assert [lines.slot_of(line) for line in (0, 1, 4, 5)] == [0, 1, 2, 3]
    assert [lines.is_slot(line) for line in range(8)] == [True, True, False, False] * 2

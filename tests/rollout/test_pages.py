"""Pages of the KV cache: the scheduler against a slow model of what they hold, and attention to them."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from schedules import CONFIG, POLICY, engine_of, run_work

from agentr1_jax.policy.attention import grouped_attention
from agentr1_jax.rollout.cache import round_to
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.device import ResponseRequest
from agentr1_jax.rollout.page_scheduler import PageScheduler
from agentr1_jax.rollout.pages import PageCache, PageView
from agentr1_jax.rollout.scheduler import Lease

GARBAGE = -7
LENGTH = 32
TOKENS = 4
CHUNK = 3

prompts = st.lists(st.integers(0, 2), max_size=LENGTH - 8).map(np.int32)
"""Few ids, so that many begin alike."""


def scheduler_of(slots, pages, shards=1, rows=2):
    config = dataclasses.replace(
        CONFIG,
        slots=slots,
        swap_slots=8 * shards,
        slot_tokens=LENGTH,
        attention_block=LENGTH,
        prefill_width=TOKENS,
        prefill_rows=(1, rows),
        cache="pages",
        page_tokens=TOKENS,
        pages=pages,
    )
    config.check_shards(shards)
    return PageScheduler(config, shards)


def root_of(node):
    return node if node.parent is None else root_of(node.parent)


class Trajectories(RuleBasedStateMachine):
    """Trajectories arrive, request, decode, give way, call tools, resume and leave in any order, as in the engine."""

    @initialize(shape=st.sampled_from([(1, 9, 1), (3, 12, 1), (3, 20, 1), (4, 22, 2), (4, 60, 1)]))
    def begin(self, shape):
        slots, pages, self.shards = shape
        self.scheduler = scheduler_of(slots, pages, self.shards)
        self.pages = np.full((self.shards, pages // self.shards, TOKENS), GARBAGE)
        self.leases: list[Lease] = []
        self.asking: dict[Lease, np.ndarray] = {}  # Prompts, or prompts and what was sampled before they gave way.
        self.starting: dict[int, tuple[Lease, np.ndarray]] = {}
        self.decoding: dict[int, tuple[Lease, np.ndarray]] = {}
        self.opened = 0

    def shard(self, slot):
        return slot // (len(self.scheduler.table) // self.shards)

    def write(self, slot, ids, start):
        """Write positions [start, len(ids)); page 0 takes what has no page."""
        for at in range(start, len(ids)):
            page = self.scheduler.table[slot, at // TOKENS]
            assert page != 0, "a position has no page"
            self.pages[self.shard(slot), page, at % TOKENS] = ids[at]

    def read(self, slot, count):
        return self.pages[self.shard(slot), self.scheduler.table[slot]].ravel()[:count]

    @rule(many=st.integers(1, 4))
    def arrive(self, many):
        for _ in range(min(many, 12 - len(self.leases))):
            self.leases.append(Lease((self.opened,)))
            self.opened += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def ask(self, data):
        busy = {lease for lease, _ in [*self.starting.values(), *self.decoding.values()]}
        away = [t for t in self.leases if t not in self.asking and t not in busy]
        for lease in data.draw(st.lists(st.sampled_from(away), unique=True) if away else st.just([])):
            holding = self.scheduler._holdings.get(lease)
            held = holding.ids if holding else np.int32([])
            kept = held[: data.draw(st.integers(0, len(held)))]
            self.asking[lease] = np.concatenate([kept, data.draw(prompts), np.int32([1])])[: LENGTH - 8]

    @rule()
    def run_a_cycle(self):
        """As `Engine._device_cycle`."""
        for lease, ids in list(self.asking.items()):
            slot = self.scheduler.assign(lease, ids[:-1], min(len(ids) + CHUNK, LENGTH))
            if slot is not None:
                assert slot not in self.starting and slot not in self.decoding
                self.starting[slot] = lease, self.asking.pop(lease)
        if self.scheduler.queue_length:
            passes, ready, _ = self.scheduler.advance()
            rows = np.zeros(self.shards, int)
            for each in (new for step in passes for new in step.prefills):
                assert each.start < len(each.ids)
                self.write(each.slot, each.ids, each.start)
                rows[self.shard(each.slot)] += -(-(len(each.ids) - each.start) // TOKENS)
            assert max(rows) <= 2, "more rows than a call has"
            for slot in ready:
                self.decoding[slot] = self.starting.pop(slot)
        for slot in self.scheduler.by_age(self.decoding):
            while slot in self.decoding:
                room = min(len(self.decoding[slot][1]) + CHUNK, LENGTH)
                if self.scheduler.extend(slot, room):
                    break
                last = self.scheduler.by_age(s for s in self.decoding if self.shard(s) == self.shard(slot))[-1]
                lease, ids = self.decoding.pop(last)
                self.scheduler.finish(last, ids[:-1])
                self.asking[lease] = ids
        for slot, (lease, ids) in self.decoding.items():
            np.testing.assert_array_equal(self.read(slot, len(ids) - 1), ids[:-1])
            new = np.concatenate([ids, np.full(min(CHUNK, LENGTH - len(ids)), len(ids) % 3)]).astype(np.int32)
            self.write(slot, new[:-1], len(ids) - 1)
            self.decoding[slot] = lease, new

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def end_a_response(self, data):
        slot = data.draw(st.sampled_from(list(self.decoding)))
        _, ids = self.decoding.pop(slot)
        self.scheduler.finish(slot, ids[:-1])

    @precondition(lambda self: self.starting or self.decoding)
    @rule(data=st.data(), leaves=st.booleans())
    def give_up(self, data, leaves):
        """A response is not wanted any more, and perhaps its trajectory neither."""
        slot = data.draw(st.sampled_from([*self.starting, *self.decoding]))
        lease, _ = (self.starting if slot in self.starting else self.decoding).pop(slot)
        self.scheduler.finish(slot, None)
        if leaves:
            self.leases.remove(lease)
            self.scheduler.release(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def leave(self, data):
        busy = {lease for lease, _ in [*self.starting.values(), *self.decoding.values()]}
        for lease in data.draw(st.lists(st.sampled_from(self.leases), max_size=1)):
            if lease not in busy:
                self.leases.remove(lease)
                self.asking.pop(lease, None)
                self.scheduler.release(lease)

    @precondition(lambda self: not self.starting and not self.decoding and not self.scheduler.queue_length)
    @rule()
    def adopt_new_weights(self):
        self.scheduler.invalidate()
        self.pages[:] = GARBAGE
        assert all(len(pool.free) == self.pages.shape[1] - 1 for pool in self.scheduler._pools)

    @rule()
    def adopt_new_weights_in_flight(self):
        self.scheduler.seal()

    @invariant()
    def every_page_has_one_place(self):
        if not hasattr(self, "scheduler"):
            return
        queued = [holding for queue in self.scheduler._queues for holding in queue]
        holdings = {id(h): h for h in [*self.scheduler._holdings.values(), *queued]}.values()
        for shard, pool in enumerate(self.scheduler._pools):
            here = [h for h in holdings if h.shard == shard]
            roots = {pool.root, *(h.root for h in here), *map(root_of, pool.unused)}
            nodes, open_nodes = [], [node for root in roots for node in root.children.values()]
            while open_nodes:
                nodes.append(open_nodes.pop())
                open_nodes += nodes[-1].children.values()
            assert all(root_of(node) is h.root for h in here for node in h.shared), "a page of another policy is shared"
            own = [page for h in here for page in h.own]
            places = [*pool.free, *(node.page for node in nodes), *own]
            assert sorted(places) == list(range(1, self.pages.shape[1])), "a page is lost, or has two places"
            for node in nodes:
                assert node.holders == sum(node in h.shared for h in here)
                assert (node in pool.unused) == (node.holders == 0)
        # A response that ends may take a page that another one is about to fill with the same ids: who reads it comes
        # behind that one in the queue.
        coming = {(h.shard, page) for h in queued for page in self.held(h)[h.computed // TOKENS :]}
        for holding in self.scheduler._holdings.values():
            for i, page in enumerate(() if holding.queued else self.held(holding)):
                if (holding.shard, page) not in coming:
                    ids = holding.ids[i * TOKENS : (i + 1) * TOKENS]
                    found = self.pages[holding.shard, page, : len(ids)]
                    np.testing.assert_array_equal(found, ids, "a page holds other ids")

    @staticmethod
    def held(holding):
        return [node.page for node in holding.shared] + holding.own


TestTrajectories = Trajectories.TestCase
TestTrajectories.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.slow
def test_thousands_of_schedules_lose_no_page():
    run_state_machine_as_test(Trajectories, settings=settings(max_examples=1000, stateful_step_count=60))


def test_a_group_computes_its_prompt_once_and_its_pages_serve_later_prompts():
    scheduler = scheduler_of(4, 60)
    prompt = np.arange(18, dtype=np.int32)
    leases = [Lease((0, i)) for i in range(4)]
    slots = [scheduler.assign(lease, prompt, 20) for lease in leases]
    computed = 0
    while scheduler.queue_length:
        passes, _, saved = scheduler.advance()
        computed += sum(len(p.ids) - p.start for step in passes for p in step.prefills)
    assert computed == 18 + 3 * 2, "the last 2 ids fill no page"
    assert len({tuple(scheduler.table[slot][:4]) for slot in slots}) == 1
    for slot, lease in zip(slots, leases, strict=True):
        scheduler.finish(slot, prompt)
        scheduler.release(lease)
    assert scheduler.assign(Lease((1,)), prompt[:16], 17) is not None
    assert scheduler.advance().saved == 16


def test_where_pages_run_out_the_last_admitted_gives_way_first():
    """Of twelve pages three trajectories at their tools hold nine; the first comes back and takes what it needs."""
    scheduler = scheduler_of(3, 13)
    leases = [Lease((i,)) for i in range(3)]
    contexts = [np.full(12, i, np.int32) for i in range(3)]
    for lease, ids in zip(leases, contexts, strict=True):
        slot = scheduler.assign(lease, ids, 12)
        while scheduler.queue_length:
            scheduler.advance()
        scheduler.finish(slot, ids)
    slot = scheduler.assign(leases[0], contexts[0], 7 * TOKENS)
    assert slot is not None
    kept = [len(scheduler._holdings[lease].ids) for lease in leases]
    assert kept == [12, 12, 0], "the last one lost its pages, the second has its own"
    assert not scheduler.extend(slot, 14 * TOKENS), "a trajectory that could not fit alone is refused by the config"


def test_what_cannot_be_served_takes_no_pages_from_those_at_their_tools():
    """Of ten pages one decodes with seven, three of which another at its tools holds, too; a third needs four."""
    scheduler = scheduler_of(3, 11)
    prompt = np.arange(12, dtype=np.int32)
    first, second, third = (Lease((i,)) for i in range(3))
    for lease in (first, second):
        slot = scheduler.assign(lease, prompt, 12 if lease is second else 7 * TOKENS)
        while scheduler.queue_length:
            scheduler.advance()
    scheduler.finish(slot, prompt)
    assert scheduler.assign(third, 50 + np.arange(16, dtype=np.int32), 16) is None
    assert len(scheduler._holdings[second].ids) == 12


def request_of(prompt, max_tokens):
    return ResponseRequest(np.asarray(prompt, np.int32), max_tokens, SamplingConfig(), np.uint32([5, 6]))


def test_a_response_that_gave_way_goes_on_as_if_it_had_not():
    """Three responses of up to 100 tokens, with pages for one of them at a time."""
    work = [([1, 2, 3], 100), ([4, 5, 6, 7], 100), ([8, 9], 100)]

    def sampled(**habits):
        engine, params = engine_of(3, cache="pages", page_tokens=8, **habits)
        engine.reset_counters()

        async def one(prompt, count):
            lease = await engine.acquire()
            try:
                return (await engine.generate(lease, request_of(prompt, count))).ids.tolist()
            finally:
                engine.release(lease)

        return run_work(engine, params, [one(*each) for each in work]), engine.counters

    plenty, counters = sampled()
    assert counters.prefill_tokens == sum(len(prompt) - 1 for prompt, _ in work)
    few, counters = sampled(swap_slots=6, pages=20, fetch_lag=1)
    assert few == plenty and counters.prefill_tokens > 100


@pytest.mark.parametrize("cache", [{}, {"cache": "pages", "page_tokens": 8}])
def test_a_response_that_an_agent_left_behind_ends_with_its_lease_and_harms_no_other(cache):
    engine, params = engine_of(3, **cache)

    async def careless():
        lease = await engine.acquire()
        left = asyncio.create_task(engine.generate(lease, request_of([1, 2], 100)))
        await asyncio.sleep(0.05)
        again = await engine.generate(lease, request_of([3], 3))
        other = asyncio.create_task(engine.generate(lease, request_of([1, 2], 100)))
        await asyncio.sleep(0.05)
        engine.release(lease)
        assert left.cancelled() or (await asyncio.wait([left, other], timeout=10))[0]
        return again.ids.tolist()

    async def careful():
        lease = await engine.acquire()
        ids = (await engine.generate(lease, request_of([3], 60))).ids.tolist()
        engine.release(lease)
        return ids

    again, ids = run_work(engine, params, [careless(), careful()])
    assert ids[:3] == again and len(ids) == 60


HEADS, KV_HEADS, LAYERS, MOST = 4, 2, 2, 4
"""`MOST`: pages of a sequence."""


@jax.jit
def attend(view, query, key, value, cache):
    return view.attend(query, key, value, jnp.int32(1), cache)


def compare_attention(lengths, new, tokens, dim, seed, kernel=False, dtype=jnp.float32):
    """Attend from the `new` last tokens of sequences to their pages in layer 1, and to the same keys laid flat.

    In 8 bits, keys and values are rounded as they are written. The last two sequences share their first page where it
    is full before the new tokens of both. Pages that nobody reads hold NaN; positions beyond a sequence, in a page that
    it does read, numbers. A length of 0 is an idle slot.
    """
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    flat = rng.normal(size=(rows, MOST * tokens, 2 * KV_HEADS, dim)).astype(np.float32)
    table = rng.permutation(np.arange(1, 1 + MOST * rows)).reshape(rows, MOST).astype(np.int32)
    table[np.arange(MOST) >= -(-np.asarray(lengths)[:, None] // tokens)] = 0
    if min(lengths[-2:]) >= tokens + new:
        table[-1, 0], flat[-1, :tokens] = table[-2, 0], flat[-2, :tokens]
    pages = np.full((LAYERS, 1 + MOST * rows, tokens, 2 * KV_HEADS, dim), np.nan, np.float32)
    pages[1, np.unique(np.append(table, 0))] = 5.0
    exact, flat = flat, np.asarray(jnp.asarray(flat, dtype), np.float32)
    position = np.asarray([range(n - new, n) if n else [MOST * tokens] * new for n in lengths], np.int32)
    for row, n in enumerate(lengths):
        for at in range(n - new):
            pages[1, table[row, at // tokens], at % tokens] = flat[row, at]
    last = np.stack([exact[row, np.minimum(p, MOST * tokens - 1)] for row, p in enumerate(position)])
    query = jnp.asarray(rng.normal(size=(rows, new, HEADS, dim)), jnp.float32)
    view = PageView(None if new == 1 else jnp.arange(rows), jnp.asarray(position), 2 * tokens, kernel=kernel)
    cache = PageCache(jnp.asarray(pages, dtype), jnp.asarray(table))
    out, after = attend(view, query, jnp.asarray(last[..., 0::2, :]), jnp.asarray(last[..., 1::2, :]), cache)
    visible = jnp.arange(MOST * tokens) <= jnp.asarray(position)[:, :, None]
    expected = grouped_attention(query, jnp.asarray(flat[:, :, 0::2]), jnp.asarray(flat[:, :, 1::2]), visible)
    live = [row for row, n in enumerate(lengths) if n]
    np.testing.assert_allclose(np.asarray(out)[live], np.asarray(expected)[live], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(after.pages, np.float32)[0], pages[0])


def lengths_of(least, tokens):
    return st.lists(st.integers(least, MOST * tokens), min_size=4, max_size=4)


@settings(max_examples=40)
@given(lengths=lengths_of(0, 8), seed=st.integers(0, 99))
def test_decoding_attends_to_pages_as_to_contiguous_keys(lengths, seed):
    compare_attention(lengths, 1, 8, 16, seed)


@settings(max_examples=40)
@given(lengths=lengths_of(3, 8), seed=st.integers(0, 99))
def test_prefill_attends_to_pages_as_to_contiguous_keys(lengths, seed):
    compare_attention(lengths, 3, 8, 16, seed)


@pytest.mark.parametrize("new", [1, 3])
def test_keys_and_values_in_8_bits_are_rounded_and_no_more(new):
    compare_attention([32, 12, 16, 19], new, 8, 16, 0, dtype=jnp.float8_e4m3fn)


@pytest.mark.parametrize("cache", [{}, {"cache": "pages", "page_tokens": 8}])
def test_a_cache_in_8_bits_samples_nearly_the_policy(cache):
    """Log-probs are those of the policy but for the rounding, which 16 bits do not have."""

    def sampled(**habits):
        engine, params = engine_of(3, **cache, **habits)

        async def one(prompt):
            lease = await engine.acquire()
            done = await engine.generate(lease, request_of(prompt, 60))
            engine.release(lease)
            return np.concatenate([prompt, done.ids]), done.logprobs

        worst = 0.0
        for ids, logprobs in run_work(engine, params, [one([1, 2, 3]), one([4] * 30)]):
            logits = tiny.full_logits(POLICY, params, [ids], 128)[0]
            expected = tiny.log_softmax(logits)[
                np.arange(len(ids) - len(logprobs), len(ids)) - 1, ids[-len(logprobs) :]
            ]
            worst = max(worst, np.abs(logprobs - expected).max())
        return worst

    assert sampled() < 1e-4 < 1e-3 < sampled(kv_dtype="float8_e4m3fn") < 0.5


def test_8_bits_hold_the_largest_number_and_never_nan():
    x = jnp.asarray([1e4, -1e4, 448.0, 0.5, 0.53])
    assert round_to(x, jnp.float8_e4m3fn).astype(float).tolist() == [448.0, -448.0, 448.0, 0.5, 0.5]
    assert round_to(x, jnp.bfloat16).astype(float)[0] > 9e3


@pytest.mark.slow
def test_the_kernel_attends_to_pages_as_to_contiguous_keys(monkeypatch):
    """jax's kernel for TPU, interpreted: a page end within a sequence, whole pages, one token, idle slots."""
    from jax._src.literals import TypedInt
    from jax.experimental import pallas
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    interpreted = types.SimpleNamespace(**vars(pallas))
    interpreted.pallas_call = functools.partial(pallas.pallas_call, interpret=True)
    monkeypatch.setattr(kernel, "pl", interpreted)
    monkeypatch.setattr(TypedInt, "shape", (), raising=False)  # JAX 0.10.2 asks a literal index for it.
    rng = np.random.default_rng(0)
    for new in (1, 3):
        for seed, lengths in enumerate([[32, 0, 16, 19], [1, 8, 9, 31], *rng.integers(0, 33, (6, 4)).tolist()]):
            lengths = [max(n, new) if n or new > 1 else 0 for n in lengths]
            compare_attention(lengths, new, 8, 128, seed, kernel=True)
            if seed < 2:
                compare_attention(lengths, new, 8, 128, seed, kernel=True, dtype=jnp.float8_e4m3fn)

"""Top-k and top-p: against a slow reference, as distributions, and through the engine."""

from __future__ import annotations

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedules import LENGTH, MANY, POLICY, Planned, all_ids, engine_of, run_work

from agentr1_jax.agents.session import Identity
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.programs import sample, truncate_logits
from agentr1_jax.rollout.runner import TaskGroup, run_groups

VOCAB = 12
SLOTS = 3
draw = jax.jit(sample)
cut = jax.jit(truncate_logits)


def support(logits, top_k, top_p):
    """Ids that may be drawn, by the definition of `SamplingConfig`: the k most likely, then the nucleus, with ties."""
    order = np.argsort(-logits, kind="stable")
    kept = order[: top_k or len(order)]
    p = np.exp(tiny.log_softmax(logits[kept]))
    enough = len(kept) if top_p >= 1 else int(np.searchsorted(np.cumsum(p), top_p - 1e-12)) + 1
    return logits >= logits[kept[:enough]].min()


def near_the_edge(logits, top_k, top_p):
    """Whether rounding decides where the nucleus ends."""
    ranked = np.sort(logits)[::-1][: top_k or len(logits)]
    sums = np.cumsum(np.exp(tiny.log_softmax(ranked)))
    return top_p < 1 and np.abs(sums - top_p).min() < 1e-5


# Halves, so that there are many ties.
rows = st.lists(st.integers(-8, 8).map(lambda x: x / 2), min_size=VOCAB, max_size=VOCAB).map(np.float32)
settings_of_a_slot = st.tuples(st.integers(0, VOCAB + 2), st.one_of(st.just(1.0), st.floats(0.001, 0.999)))


@settings(max_examples=100)
@given(st.lists(st.tuples(rows, settings_of_a_slot), min_size=SLOTS, max_size=SLOTS))
def test_what_is_cut_is_what_the_definition_says(slots):
    logits = np.stack([row for row, _ in slots])
    assume(not any(near_the_edge(row.astype(np.float64), *asked) for row, asked in slots))
    k, p = np.int32([asked[0] for _, asked in slots]), np.float32([asked[1] for _, asked in slots])
    left = np.asarray(cut(logits, k, p))
    for got, (row, asked) in zip(left, slots, strict=True):
        kept = support(row.astype(np.float64), *asked)
        np.testing.assert_array_equal(np.isfinite(got), kept)
        np.testing.assert_array_equal(got[kept], row[kept])


@settings(max_examples=50)
@given(st.lists(st.tuples(rows, settings_of_a_slot), min_size=SLOTS, max_size=SLOTS), st.integers(0, 2**31))
def test_log_probabilities_are_those_of_what_is_left(slots, seed):
    """Whatever is drawn, with slots that ask for nothing beside others that do."""
    logits = np.stack([row for row, _ in slots])
    temperature = np.float32([0.7, 1.0, 1.6])
    assume(
        not any(
            near_the_edge(row.astype(np.float64) / t, *asked)
            for (row, asked), t in zip(slots, temperature, strict=True)
        )
    )
    k, p = np.int32([asked[0] for _, asked in slots]), np.float32([asked[1] for _, asked in slots])
    keys = np.random.default_rng(seed).integers(0, 2**32, (SLOTS, 2), np.uint32)
    drawn, logprobs = draw(logits, temperature, k, p, keys, np.zeros(SLOTS, np.int32))
    for i, (row, asked) in enumerate(slots):
        scaled = np.asarray(row / temperature[i], np.float32).astype(np.float64)
        kept = support(scaled, *asked)
        assert kept[drawn[i]]
        expected = tiny.log_softmax(np.where(kept, scaled, -np.inf))[drawn[i]]
        np.testing.assert_allclose(logprobs[i], expected, atol=1e-5)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.8), (5, 0.7)])
def test_what_is_left_is_drawn_by_its_probabilities(top_k, top_p):
    n, temperature = 4096, 1.3
    logits = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32) * 1.5
    keys = np.random.default_rng(2).integers(0, 2**32, (n, 2), np.uint32)
    each = jnp.full(n, temperature), jnp.full(n, top_k, jnp.int32), jnp.full(n, top_p)
    drawn, logprobs = draw(jnp.broadcast_to(logits, (n, VOCAB)), *each, keys, jnp.zeros(n, jnp.int32))
    kept = support(logits.astype(np.float64) / temperature, top_k, top_p)
    p = np.exp(tiny.log_softmax(np.where(kept, logits / temperature, -np.inf)))
    assert 1 < kept.sum() < VOCAB
    counts = np.bincount(np.asarray(drawn), minlength=VOCAB)
    assert counts[~kept].sum() == 0
    chi_square = float(np.sum((counts - n * p)[kept] ** 2 / (n * p[kept])))
    assert chi_square < [10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1][int(kept.sum()) - 2]  # 1 in 1000
    np.testing.assert_allclose(logprobs, np.log(p[np.asarray(drawn)]), atol=1e-5)


def test_the_k_likeliest_are_more_where_the_last_is_equalled():
    logits = np.float32([[3, 1, 2, 2, 2, 0]])
    left = np.asarray(cut(logits, np.int32([2]), np.float32([1])))
    assert np.isfinite(left).tolist() == [[True, False, True, True, True, False]]


def noise(n, vocab=VOCAB):
    rng = np.random.default_rng(n)
    return rng.normal(size=(n, vocab)).astype(np.float32), rng.integers(0, 2**32, (n, 2), np.uint32)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (0, 1e-9), (0, 1e-38), (0, 1e-60), (1, 1e-9)])
def test_one_id_left_is_the_greedy_one(top_k, top_p):
    n = 64
    logits, keys = noise(n)
    index = np.arange(n, dtype=np.int32)
    drawn, logprobs = draw(
        logits, np.ones(n, np.float32), np.full(n, top_k), np.full(n, top_p, np.float32), keys, index
    )
    assert drawn.tolist() == logits.argmax(1).tolist() and not np.asarray(logprobs).any()


def test_who_asks_for_nothing_gets_the_same_bits_whoever_is_beside_it():
    n = 64
    logits, keys = noise(n)
    index, temperature = np.arange(n, dtype=np.int32), np.linspace(0, 2, n, dtype=np.float32)
    k, p = np.zeros(n, np.int32), np.ones(n, np.float32)
    plain = [np.asarray(x) for x in draw(logits, temperature, k, p, keys, index)]
    k[::2], p[1::4] = 2, 0.5
    mixed = [np.asarray(x) for x in draw(logits, temperature, k, p, keys, index)]
    for a, b in zip(plain, mixed, strict=True):
        np.testing.assert_array_equal(a[3::4], b[3::4])
    assert (plain[0] != mixed[0]).any()
    assert mixed[0][0] == logits[0].argmax() and mixed[1][0] == 0  # Greedy, whatever else it asks for.


def through_the_engine(sampling, rows=MANY):
    engine, params = engine_of(3)
    groups = [TaskGroup(row, [Identity(f"t/{i}", i, 0, "planned", 1000 + i)]) for i, row in enumerate(rows)]
    out = run_groups(engine, params, Planned(), groups, sampling=sampling, policy_version=0)
    return sorted((t for group in out for t in group), key=lambda t: t.group)


def assert_log_probabilities(trajectories, sampling):
    steps = [s for t in trajectories for s in t.steps]
    sequences = [np.concatenate([s.prompt_ids, s.response_ids]) for s in steps]
    for step, full in zip(steps, tiny.full_logits(POLICY, tiny.decoder_params(POLICY), sequences, LENGTH), strict=True):
        for logits, chosen, logprob in zip(
            full[len(step.prompt_ids) - 1 : -1], step.response_ids, step.logprobs, strict=True
        ):
            scaled = logits.astype(np.float64) / sampling.temperature
            if not near_the_edge(scaled, sampling.top_k, sampling.top_p):
                kept = support(scaled, sampling.top_k, sampling.top_p)
                assert kept[chosen]
                assert logprob == pytest.approx(tiny.log_softmax(np.where(kept, scaled, -np.inf))[chosen], abs=1e-4)


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(0.9, top_k=5), SamplingConfig(1.0, top_p=0.6), SamplingConfig(1.5, 20, 0.9)]
)
def test_responses_of_the_engine_come_from_what_is_left(sampling):
    out = through_the_engine(sampling)
    assert_log_probabilities(out, sampling)
    assert all_ids(out) != all_ids(through_the_engine(SamplingConfig(sampling.temperature)))


def test_the_engine_takes_limits_that_cut_nothing_for_none():
    plain = through_the_engine(SamplingConfig())
    for sampling in (
        SamplingConfig(1.0, top_k=POLICY.vocab_size),
        SamplingConfig(1.0, top_k=10**6),
        SamplingConfig(1.0, top_p=1.0),
    ):
        out = through_the_engine(sampling)
        assert all_ids(out) == all_ids(plain)
        for a, b in zip(plain, out, strict=True):
            for x, y in zip(a.steps, b.steps, strict=True):
                np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-6)


def test_one_id_left_is_greedy_in_the_engine_too():
    greedy = all_ids(through_the_engine(SamplingConfig(0.0)))
    assert all_ids(through_the_engine(SamplingConfig(1.0, top_k=1))) == greedy
    assert all_ids(through_the_engine(SamplingConfig(1.0, top_p=1e-9))) == greedy


def test_each_slot_has_its_own_limits():
    engine, params = engine_of(3)
    prompt = np.int32([4, 5, 6])
    asked = [
        SamplingConfig(),
        SamplingConfig(1.0, top_k=1),
        SamplingConfig(1.0, top_p=0.3),
        SamplingConfig(0.0),
        SamplingConfig(0.8, 2, 0.9),
    ]

    async def one(sampling):
        lease = await engine.acquire()
        try:
            return await engine.generate(lease, prompt, 10, sampling=sampling, key=np.uint32([1, 2]), stop=())
        finally:
            engine.release(lease)

    async def together():
        return await asyncio.gather(*(one(sampling) for sampling in asked))

    apart = [run_work(engine, params, [one(sampling)])[0] for sampling in asked]
    mixed = run_work(engine, params, [together()])[0]
    assert [c.ids.tolist() for c in mixed] == [c.ids.tolist() for c in apart]
    assert mixed[1].ids.tolist() == mixed[3].ids.tolist() != mixed[0].ids.tolist()

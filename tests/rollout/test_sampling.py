"""The sampling distribution: against a slow reference, as distributions, and through the engine."""

from __future__ import annotations

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedules import LENGTH, MANY, POLICY, engine_of, run_work, sampled

from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.device import ResponseRequest
from agentr1_jax.rollout.programs import sample, truncate_logits

VOCAB = 12
SLOTS = 3
draw = jax.jit(sample)
truncate = jax.jit(truncate_logits)


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
@given(st.lists(st.tuples(rows, settings_of_a_slot), min_size=SLOTS, max_size=SLOTS), st.integers(0, 2**31))
def test_what_is_left_is_what_the_definition_says(slots, seed):
    """Of logits, and of log-probabilities of what is drawn, where slots ask for unlike settings."""
    logits = np.stack([row for row, _ in slots])
    temperature = np.float32([0.7, 1.0, 1.6])
    scaled = (logits / temperature[:, None]).astype(np.float64)
    assume(not any(near_the_edge(row, *asked) for row, (_, asked) in zip([*logits, *scaled], slots * 2, strict=True)))
    k, p = np.int32([asked[0] for _, asked in slots]), np.float32([asked[1] for _, asked in slots])
    left = np.asarray(truncate(logits, k, p))
    for got, (row, asked) in zip(left, slots, strict=True):
        kept = support(row.astype(np.float64), *asked)
        np.testing.assert_array_equal(np.isfinite(got), kept)
        np.testing.assert_array_equal(got[kept], row[kept])
    keys = np.random.default_rng(seed).integers(0, 2**32, (SLOTS, 2), np.uint32)
    drawn, logprobs = draw(logits, temperature, k, p, keys, np.zeros(SLOTS, np.int32))
    for i, (_, asked) in enumerate(slots):
        kept = support(scaled[i], *asked)
        assert kept[drawn[i]]
        expected = tiny.log_softmax(np.where(kept, scaled[i], -np.inf))[drawn[i]]
        np.testing.assert_allclose(logprobs[i], expected, atol=1e-5)


def chi_square(drawn, p):
    """Σ (observed − expected)² / expected over the ids of probability > 0."""
    expected = p * len(drawn)
    counts = np.bincount(drawn, minlength=len(p))
    assert counts[p == 0].sum() == 0
    return float(np.sum((counts - expected)[p > 0] ** 2 / expected[p > 0]))


# The last number is the quantile 0.999 of the chi-square distribution of as many degrees of freedom.
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "degrees", "most"),
    [(0.5, 0, 1.0, 11, 31.3), (2.0, 0, 1.0, 11, 31.3), (1.3, 3, 1.0, 2, 13.8), (1.3, 5, 0.7, None, 18.5)],
)
def test_samples_are_distributed_as_their_log_probabilities_say(temperature, top_k, top_p, degrees, most):
    n = 4096
    logits = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32) * 1.5
    keys = np.random.default_rng(2).integers(0, 2**32, (n, 2), np.uint32)
    each = jnp.full(n, temperature), jnp.full(n, top_k, jnp.int32), jnp.full(n, top_p)
    kept = support(logits.astype(np.float64) / temperature, top_k, top_p)
    assert kept.sum() - 1 == degrees or degrees is None and 1 < kept.sum() <= 5
    p = np.exp(tiny.log_softmax(np.where(kept, logits / temperature, -np.inf)))
    for index in (0, 1):
        drawn, logprobs = draw(jnp.broadcast_to(logits, (n, VOCAB)), *each, keys, jnp.full(n, index, jnp.int32))
        assert chi_square(np.asarray(drawn), p) < most
        np.testing.assert_allclose(logprobs, np.log(p[np.asarray(drawn)]), atol=1e-5)


def test_tokens_of_one_response_and_of_equal_places_are_independent():
    n, vocab = 4096, 8
    each = jnp.ones(n), jnp.zeros(n, jnp.int32), jnp.ones(n)
    keys = jnp.asarray(np.random.default_rng(2).integers(0, 2**32, (n, 2), np.uint32))
    first, second = (np.asarray(draw(jnp.zeros((n, vocab)), *each, keys, jnp.full(n, i))[0]) for i in (0, 1))
    assert chi_square(first * vocab + second, np.full(vocab * vocab, vocab**-2.0)) < 103.4  # 63 degrees: 1 in 1000


def test_greedy_is_the_first_maximum_with_log_probability_zero():
    logits = np.float32([[0, 3, 3], [5, 1, 2]])
    each = np.zeros(2, np.float32), np.ones(2, np.int32), np.ones(2, np.float32)
    drawn, logprobs = draw(logits, *each, np.zeros((2, 2), np.uint32), np.arange(2, dtype=np.int32))
    assert drawn.tolist() == [1, 0] and logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (0, 1e-9), (0, 1e-60)])
def test_one_id_left_is_the_greedy_one(top_k, top_p):
    n = 64
    rng = np.random.default_rng(n)
    logits, keys = rng.normal(size=(n, VOCAB)).astype(np.float32), rng.integers(0, 2**32, (n, 2), np.uint32)
    each = np.ones(n, np.float32), np.full(n, top_k, np.int32), np.full(n, top_p, np.float32)
    drawn, logprobs = draw(logits, *each, keys, np.arange(n, dtype=np.int32))
    assert drawn.tolist() == logits.argmax(1).tolist() and not np.asarray(logprobs).any()


def test_who_asks_for_nothing_gets_the_same_bits_whoever_is_beside_it():
    n = 64
    rng = np.random.default_rng(n)
    logits, keys = rng.normal(size=(n, VOCAB)).astype(np.float32), rng.integers(0, 2**32, (n, 2), np.uint32)
    index, temperature = np.arange(n, dtype=np.int32), np.linspace(0, 2, n, dtype=np.float32)
    k, p = np.zeros(n, np.int32), np.ones(n, np.float32)
    plain = [np.asarray(x) for x in draw(logits, temperature, k, p, keys, index)]
    k[::2], p[1::4] = 2, 0.5
    mixed = [np.asarray(x) for x in draw(logits, temperature, k, p, keys, index)]
    for a, b in zip(plain, mixed, strict=True):
        np.testing.assert_array_equal(a[3::4], b[3::4])
    assert (plain[0] != mixed[0]).any()
    assert mixed[0][0] == logits[0].argmax() and mixed[1][0] == 0  # Greedy, whatever else it asks for.


def test_responses_of_the_engine_come_from_what_is_left():
    sampling = SamplingConfig(1.5, top_k=20, top_p=0.9)
    steps = [s for t in sampled(MANY, sampling=sampling) for s in t.steps]
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


def test_each_slot_has_its_own_limits():
    engine, params = engine_of(3)
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
            return await engine.generate(lease, ResponseRequest(np.int32([4, 5, 6]), 10, sampling, np.uint32([1, 2])))
        finally:
            engine.release(lease)

    async def together():
        return await asyncio.gather(*(one(sampling) for sampling in asked))

    apart = [run_work(engine, params, [one(sampling)])[0] for sampling in asked]
    mixed = run_work(engine, params, [together()])[0]
    assert [c.ids.tolist() for c in mixed] == [c.ids.tolist() for c in apart]
    assert mixed[1].ids.tolist() == mixed[3].ids.tolist() != mixed[0].ids.tolist()

"""The slot engine against forward passes without any cache, for random schedules of many trajectories."""

from __future__ import annotations

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import (
    CONFIG,
    MANY,
    POLICY,
    PROGRAMS,
    all_ids,
    assert_exact,
    engine_of,
    episodes,
    planned,
    run_work,
    sampled,
)

from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.programs import encode_updates, idle_slot_state, sample
from agentr1_jax.rollout.scheduler import common_prefix
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.trajectory import Outcome

KEY = np.asarray([5, 6], np.uint32)
random_rows = episodes(delays=[None, 0, 0.001, 0.003])


def ends_with(ids, stops):
    return any(list(ids[-len(stop) :]) == list(stop) for stop in stops)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(random_rows, min_size=1, max_size=6),
    slots=st.sampled_from([1, 3]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_cached_steps_equal_full_forward_passes(rows, slots, temperature):
    trajectories = sampled(rows, slots, temperature)
    assert_exact(trajectories, temperature)
    for t, row in zip(trajectories, rows, strict=True):
        assert t.outcome is Outcome.ENV_DONE and len(t.steps) == len(row["steps"])
        for step, plan in zip(t.steps, row["steps"], strict=True):
            response, stops = step.response_ids.tolist(), plan["stop"]
            assert len(response) <= plan["max_tokens"]
            assert (step.info["reason"] == "stop") == ends_with(response, stops)
            assert step.info["reason"] == "stop" or len(response) == plan["max_tokens"]
            assert not any(ends_with(response[:k], stops) for k in range(1, len(response)))
    check_accounts(trajectories, engine_of(slots)[0])


def check_accounts(trajectories, engine):
    """Tokens are computed once: what the KV slot of a trajectory holds of its next prompt is never prefilled again."""
    computed = saved = 0
    for t in trajectories:
        held = np.zeros(0, np.int32)
        for step in t.steps:
            reuse = common_prefix(held, step.prompt_ids[:-1])
            computed, saved = computed + len(step.prompt_ids) - 1 - reuse, saved + reuse
            held = np.concatenate([step.prompt_ids, step.response_ids[:-1]])
    counters = engine.counters
    assert counters.prefill_tokens + counters.prefill_tokens_saved == computed + saved
    assert counters.prefill_tokens_saved >= saved
    assert counters.prefill_tokens_padded >= counters.prefill_tokens
    assert counters.decode_tokens == sum(len(s.response_ids) for t in trajectories for s in t.steps)
    assert counters.decode_slot_steps >= counters.decode_tokens
    run = engine.device.programs
    # Fewer where JAX's caches were emptied since the engine was compiled (see conftest.py).
    assert sum(p._cache_size() for p in (run.prefill, run.decode, run.copy)) <= PROGRAMS


def test_appending_computes_prompts_and_observations_once_and_one_token_a_step():
    rows = [planned([1, 2, 3, 4, 5 + i], {}, {}, {"observation": []}, {}) for i in range(5)]
    trajectories = sampled(rows)
    observed = sum(len(plan["observation"]) for row in rows for plan in row["steps"][:-1])
    steps = sum(len(t.steps) for t in trajectories)
    assert engine_of(3)[0].counters.prefill_tokens <= sum(len(r["opening"]) for r in rows) + observed + steps
    assert_exact(trajectories)


def test_tokens_depend_neither_on_slots_nor_on_order_nor_on_neighbours():
    expected = sampled(MANY, slots=1)
    for slots, order in [(3, None), (8, None), (3, [8, 1, 6, 3, 0, 7, 5, 2, 4])]:
        assert all_ids(sampled(MANY, slots, order=order)) == all_ids(expected)
    alone = sampled(MANY, order=[4])
    assert all_ids(alone) == all_ids(expected)[4:5]
    assert len({tuple(map(tuple, row)) for row in all_ids(expected)}) == len(MANY)


@pytest.mark.parametrize("devices", [2, 8])
def test_slots_on_several_devices_sample_the_same_tokens(devices):
    spread = sampled(MANY, slots=8, devices=devices)
    assert all_ids(spread) == all_ids(sampled(MANY, slots=8))
    assert_exact(spread)
    check_accounts(spread, engine_of(8, devices)[0])


def test_slots_must_spread_evenly_over_devices():
    with pytest.raises(ValueError, match=r"rollout\.slots \(3\) must be a multiple of the 2 data shards"):
        Engine(POLICY, CONFIG, tiny.mesh(2))


def respond(prompt, slots=3, **request):
    """One response straight from the engine."""
    engine, params = engine_of(slots)
    usual = {"max_tokens": 10, "sampling": SamplingConfig(), "key": KEY, "stop": ()}

    async def work():
        lease = await engine.acquire()
        try:
            return await engine.generate(lease, np.asarray(prompt, np.int32), **usual | request)
        finally:
            engine.release(lease)

    return run_work(engine, params, [work()])[0]


def test_stop_ids_and_sequences_end_a_response_where_they_first_occur():
    free = respond([4, 5, 6])
    ids = free.ids.tolist()
    assert free.finish_reason == "length" and len(ids) == 10
    for end in (0, 2, 5):
        first = ids.index(ids[end])
        stopped = respond([4, 5, 6], stop=[[ids[end]]])
        assert stopped.ids.tolist() == ids[: first + 1] and stopped.finish_reason == "stop"
        np.testing.assert_allclose(stopped.logprobs, free.logprobs[: first + 1], atol=1e-6)
    unused = next(i for i in range(64) if i not in ids)
    pair = respond([4, 5, 6], stop=[[unused, ids[3]], ids[3:6]])
    assert pair.ids.tolist() == ids[:6] and pair.finish_reason == "stop"
    assert respond([4, 5, 6], stop=[[unused]]).ids.tolist() == ids


def test_a_stop_sequence_never_begins_in_the_prompt_or_in_an_earlier_response():
    first = respond([4, 5, 6]).ids.tolist()
    assert respond([4, 5, 6], stop=[[6, first[0]]]).ids.tolist() == first
    engine, params = engine_of(1)

    async def two():
        lease = await engine.acquire()
        usual = {"sampling": SamplingConfig(), "key": KEY}
        one = await engine.generate(lease, np.int32([4, 5, 6]), 2, stop=(), **usual)
        prompt = np.concatenate([np.int32([4, 5, 6]), one.ids])
        plain = await engine.generate(lease, prompt, 3, stop=(), **usual)
        again = await engine.generate(lease, prompt, 3, stop=[[int(one.ids[-1]), int(plain.ids[0])]], **usual)
        engine.release(lease)
        return plain.ids.tolist(), again.ids.tolist()

    plain, again = run_work(engine, params, [two()])[0]
    assert plain == again


def test_a_stop_in_the_last_token_of_the_budget_is_a_stop():
    ids = respond([4, 5, 6]).ids.tolist()
    last = next(n for n in range(2, 11) if ids[n - 1] not in ids[: n - 1])
    assert respond([4, 5, 6], max_tokens=last, stop=[[ids[last - 1]]]).finish_reason == "stop"
    assert respond([4, 5, 6], max_tokens=last).finish_reason == "length"


def test_a_response_may_fill_the_cache_to_its_last_place():
    row = planned(list(range(64)) + list(range(50)), {"max_tokens": 14})
    trajectory = sampled([row])
    assert len(trajectory[0].steps[0].response_ids) == 14
    assert_exact(trajectory)


@pytest.mark.parametrize(
    ("prompt", "request_", "message"),
    [
        ([], {}, "a prompt of 0 and 10 new tokens do not fit"),
        ([1], {"max_tokens": 0}, "a prompt of 1 and 0 new tokens do not fit"),
        (
            [1] * 119,
            {},
            "a prompt of 119 and 10 new tokens do not fit a KV slot of 128 tokens; raise rollout.slot_tokens",
        ),
        ([1, 64], {}, r"prompt ids must lie in \[0, 64\), got 1\.\.64"),
        ([1, -1], {}, r"prompt ids must lie in \[0, 64\), got -1\.\.1"),
        ([1], {"stop": [[]]}, "at most 4 stop sequences of 1 to 4 ids each"),
        ([1], {"stop": [[1], [2], [3], [4], [5]]}, "at most 4 stop sequences of 1 to 4 ids each"),
        ([1], {"stop": [[1, 2, 3, 4, 5]]}, "at most 4 stop sequences of 1 to 4 ids each"),
        ([1], {"stop": [[-1]]}, "at most 4 stop sequences of 1 to 4 ids each"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(prompt, request_, message):
    with pytest.raises(ValueError, match=message):
        respond(prompt, **request_)


def test_nothing_compiles_after_warm_up():
    sampled(MANY)
    compiles = CompileCounter()
    rng = np.random.default_rng(0)
    for temperature, stop in ((0.0, ()), (0.3, [[3]]), (1.7, [[3], [4, 5]])):
        rows = [
            planned(
                rng.integers(0, 64, rng.integers(1, 90)).tolist(),
                *(
                    {"max_tokens": int(rng.integers(1, 12)), "stop": stop, "rule": rule}
                    for rule in ("append", "window")
                ),
            )
            for _ in range(7)
        ]
        sampled(rows, temperature=temperature)
    assert compiles.count == 0


@pytest.mark.parametrize("program", ["prefill", "decode", "copy"])
def test_the_donated_cache_is_written_in_place(program):
    policy = dataclasses.replace(POLICY, layers=32)
    config = dataclasses.replace(CONFIG, slots=4, slot_tokens=2048, attention_block=512, prefill_rows=(1,))
    engine = Engine(policy, config, tiny.mesh())
    cache, params = engine.device.new_cache(), tiny.decoder_params(policy)
    if program == "decode":
        slots = idle_slot_state(config)
        updates = encode_updates(slots, np.zeros(config.slots, bool))
        lowered = engine.device.programs.decode.lower(params, cache, slots, updates, np.zeros(1, np.int32))
    elif program == "prefill":
        new = np.zeros((1, config.prefill_width), np.int32)
        lowered = engine.device.programs.prefill.lower(params, cache, new, new[:, 0], new[:, 0])
    else:
        copies = np.zeros(16, np.int32)
        lowered = engine.device.programs.copy.lower(cache, copies, copies, np.zeros(1, np.int32))
    memory = lowered.compile().memory_analysis()
    size = cache.keys.nbytes + cache.values.nbytes
    assert memory.alias_size_in_bytes >= size
    one_slot = size / cache.keys.shape[1]
    assert memory.temp_size_in_bytes < (1.1 * one_slot if program == "copy" else 0.1 * size)


def test_what_is_dispatched_runs_between_cycles_and_its_errors_come_back(monkeypatch):
    engine, params = engine_of(3)
    cycling, seen = [], []
    cycle = engine._device_cycle

    def watched(requests):
        cycling.append(True)
        try:
            return cycle(requests)
        finally:
            cycling.clear()

    def function():
        seen.append((list(cycling), threading.current_thread().name))
        return len(seen)

    async def asks():
        results = [await engine.dispatcher(function) for _ in range(20)]
        with pytest.raises(ZeroDivisionError):
            await engine.dispatcher(lambda: 1 // 0)
        return results

    async def samples():
        lease = await engine.acquire()
        usual = {"sampling": SamplingConfig(), "key": KEY, "stop": ()}
        for _ in range(5):
            await engine.generate(lease, np.int32([4, 5, 6]), 9, **usual)
        engine.release(lease)

    monkeypatch.setattr(engine, "_device_cycle", watched)
    results = run_work(engine, params, [samples(), asks()])[1]
    assert results == list(range(1, 21))
    assert not any(during for during, _ in seen)
    assert len({name for _, name in seen}) == 1 and seen[0][1].startswith("dispatch")


def chi_square(drawn, expected):
    """Σ (observed − expected)² / expected over the ids."""
    counts = np.bincount(drawn, minlength=len(expected))
    return float(np.sum((counts - expected * len(drawn)) ** 2 / (expected * len(drawn))))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_are_distributed_as_their_log_probabilities_say(temperature):
    n, vocab = 4096, 8
    everything = jnp.zeros(n, jnp.int32), jnp.ones(n)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=vocab), jnp.float32)
    keys = jnp.asarray(np.random.default_rng(2).integers(0, 2**32, (n, 2), np.uint32))
    expected = np.exp(tiny.log_softmax(np.asarray(logits) / temperature))
    for index in (0, 1):
        drawn, logprobs = jax.jit(sample)(
            jnp.broadcast_to(logits, (n, vocab)), jnp.full(n, temperature), *everything, keys, jnp.full(n, index)
        )
        np.testing.assert_allclose(logprobs, np.log(expected)[drawn], atol=1e-5)
        assert chi_square(np.asarray(drawn), expected) < 24.3  # of 7 degrees of freedom: 1 in 1000
    # Independent of one another: tokens 0 and 1 of a response, and equal tokens of other keys.
    both = [
        np.asarray(jax.jit(sample)(jnp.zeros((n, vocab)), jnp.ones(n), *everything, keys, jnp.full(n, i))[0])
        for i in (0, 1)
    ]
    assert chi_square(both[0] * vocab + both[1], np.full(vocab * vocab, vocab**-2.0)) < 103.4  # 63: 1 in 1000


def test_greedy_is_the_first_maximum_with_log_probability_zero():
    logits = jnp.asarray([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    drawn, logprobs = sample(
        logits, *(jnp.zeros(2), jnp.ones(2, jnp.int32), jnp.ones(2)), jnp.zeros((2, 2), jnp.uint32), jnp.arange(2)
    )
    assert drawn.tolist() == [1, 0] and logprobs.tolist() == [0.0, 0.0]


def test_the_size_of_an_attention_group_divides_the_slots_of_a_shard():
    config = dataclasses.replace(CONFIG, slots=8, attention_group=6)
    assert [config.attention_group_size(shards) for shards in (1, 2, 8)] == [2, 2, 1]

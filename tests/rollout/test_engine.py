"""Requests to the engine: stops, limits, refusals; its compiled programs, its thread, and its settings."""

from __future__ import annotations

import dataclasses
import functools
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from schedules import CONFIG, POLICY, assert_exact, engine_of, planned, run_work, sampled

from agentr1_jax.errors import UserError
from agentr1_jax.rollout.cache import CacheView, KVCache
from agentr1_jax.rollout.config import AttemptLimits, EngineConfig, RolloutConfig, SamplingConfig
from agentr1_jax.rollout.device import ResponseRequest
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.programs import encode_updates, idle_slot_state
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.train.defaults import complete
from agentr1_jax.validation import from_section
from configs import quickstart

SECTION = complete(quickstart.get_config().to_dict())["rollout"]


def request_of(prompt, max_tokens=10, stop=()):
    return ResponseRequest(np.asarray(prompt, np.int32), max_tokens, SamplingConfig(), np.uint32([5, 6]), stop)


def respond(prompt, **options):
    """One response straight from the engine."""
    engine, params = engine_of(3)

    async def work():
        lease = await engine.acquire()
        try:
            return await engine.generate(lease, request_of(prompt, **options))
        finally:
            engine.release(lease)

    return run_work(engine, params, [work()])[0]


def test_stop_ids_and_sequences_end_a_response_where_they_first_occur():
    free = respond([4, 5, 6])
    ids = free.ids.tolist()
    assert free.finish_reason == "length" and len(ids) == 10
    for end in (0, 5):
        first = ids.index(ids[end])
        stopped = respond([4, 5, 6], stop=[[ids[end]]])
        assert stopped.ids.tolist() == ids[: first + 1] and stopped.finish_reason == "stop"
        np.testing.assert_allclose(stopped.logprobs, free.logprobs[: first + 1], atol=1e-6)
    unused = next(i for i in range(64) if i not in ids)
    pair = respond([4, 5, 6], stop=[[unused, ids[3]], ids[3:6]])
    assert pair.ids.tolist() == ids[:6] and pair.finish_reason == "stop"
    last = next(n for n in range(2, 11) if ids[n - 1] not in ids[: n - 1])
    assert respond([4, 5, 6], max_tokens=last, stop=[[ids[last - 1]]]).finish_reason == "stop"


def test_a_stop_sequence_never_begins_in_the_prompt_or_in_an_earlier_response():
    first = respond([4, 5, 6]).ids.tolist()
    assert respond([4, 5, 6], stop=[[6, first[0]]]).ids.tolist() == first
    engine, params = engine_of(1)

    async def two():
        lease = await engine.acquire()
        one = await engine.generate(lease, request_of([4, 5, 6], 2))
        prompt = [4, 5, 6, *one.ids]
        plain = await engine.generate(lease, request_of(prompt, 3))
        again = await engine.generate(lease, request_of(prompt, 3, [[int(one.ids[-1]), int(plain.ids[0])]]))
        engine.release(lease)
        return plain.ids.tolist(), again.ids.tolist()

    plain, again = run_work(engine, params, [two()])[0]
    assert plain == again


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "a prompt of 0 and 10 new tokens do not fit"),
        ([1], {"max_tokens": 0}, "a prompt of 1 and 0 new tokens do not fit"),
        ([1] * 119, {}, "119 and 10 new tokens do not fit rollout.slot_tokens=128; raise it"),
        ([1, 64], {}, r"prompt ids must lie in \[0, 64\), got 1\.\.64"),
        ([1, -1], {}, r"prompt ids must lie in \[0, 64\), got -1\.\.1"),
        ([1], {"stop": [[]]}, "at most 4 stop sequences of 1 to 4 ids each"),
        ([1], {"stop": [[1], [2], [3], [4], [5]]}, "at most 4 stop sequences"),
        ([1], {"stop": [[1, 2, 3, 4, 5]]}, "at most 4 stop sequences"),
        ([1], {"stop": [[-1]]}, "at most 4 stop sequences"),
        ([1], {"stop": [[2**40]]}, "at most 4 stop sequences"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(prompt, options, message):
    with pytest.raises(ValueError, match=message):
        respond(prompt, **options)


def test_a_response_may_fill_the_cache_to_its_last_place():
    trajectory = sampled([planned(list(range(64)) + list(range(50)), {"max_tokens": 14})])
    assert len(trajectory[0].steps[0].response_ids) == 14
    assert_exact(trajectory)


def test_nothing_compiles_after_warm_up():
    sampled([planned([1, 2, 3], {}, {})])
    compiles = CompileCounter()
    rng = np.random.default_rng(0)
    for temperature, stop in ((0.0, ()), (1.7, [[3], [4, 5]])):
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


@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(128, 8, 2), (192, 14, 2), (2048, 4, 4)])
def test_the_kernel_for_gpus_decodes_as_blocks_do(monkeypatch, length, heads, kv_heads):
    """jax's kernel, interpreted: a sequence of one token, a full slot, an idle one; NaN in what nobody reads."""
    from jax.experimental.pallas.ops.gpu import paged_attention as gpu

    monkeypatch.setattr(gpu, "paged_attention", functools.partial(gpu.paged_attention, interpret=True))
    rng = np.random.default_rng(0)
    position = np.int32([0, length - 1, length, length // 3])
    shape = 2, len(position) + 1, kv_heads, length, 16
    keys, values = rng.normal(size=(2, *shape)).astype(np.float32)
    for x in (keys, values):
        x[0], x[:, -1] = np.nan, np.nan
    query, key, value = (rng.normal(size=(len(position), 1, n, 16)) for n in (heads, kv_heads, kv_heads))
    new = (jnp.asarray(x, jnp.float32) for x in (query / 4, key, value))
    arguments = *new, jnp.int32(1), KVCache(jnp.asarray(keys), jnp.asarray(values))
    expected, cache = CacheView(None, jnp.asarray(position)[:, None], block=32).attend(*arguments)
    found, same = CacheView(None, jnp.asarray(position)[:, None], block=32, kernel=True).attend(*arguments)
    live = position < length
    np.testing.assert_allclose(found[live], expected[live], atol=1e-5)
    np.testing.assert_array_equal(same.keys, cache.keys)


def test_rows_of_a_prefill_attend_the_same_one_by_one_and_at_once():
    """Two rows of one prompt, one behind a context, one from the start; NaN behind what they write."""
    rng = np.random.default_rng(0)
    slot, position = np.int32([2, 2, 0, 3]), np.int32([0, 8, 21, 0])[:, None] + np.arange(8, dtype=np.int32)
    keys, values = rng.normal(size=(2, 2, 5, 2, 64, 16)).astype(np.float32)
    for x in (keys, values):
        x[0], x[:, 2, :, 32:], x[:, 3, :, 32:] = np.nan, np.nan, np.nan
    query, key, value = (jnp.asarray(rng.normal(size=(4, 8, n, 16)), jnp.float32) for n in (6, 2, 2))
    arguments = query / 4, key, value, jnp.int32(1), KVCache(jnp.asarray(keys), jnp.asarray(values))
    by_row, at_once = (
        CacheView(jnp.asarray(slot), jnp.asarray(position), block=32, rows_at_once=x).attend(*arguments)
        for x in (False, True)
    )
    np.testing.assert_allclose(at_once[0], by_row[0], atol=1e-5)
    np.testing.assert_array_equal(at_once[1].keys, by_row[1].keys)


@pytest.mark.parametrize("program", ["prefill", "decode", "copy"])
def test_the_donated_cache_is_written_in_place(program):
    policy = dataclasses.replace(POLICY, layers=32)
    config = dataclasses.replace(CONFIG, slots=4, slot_tokens=2048, attention_block=512, prefill_rows=(1,))
    engine = Engine(policy, config, tiny.mesh())
    cache, params = engine.device.programs.new_cache(), tiny.decoder_params(policy)
    programs = engine.device.programs
    if program == "decode":
        slots = idle_slot_state(config)
        updates = encode_updates(slots, np.zeros(config.slots, bool))
        lowered = programs.decode.lower(params, cache, slots, updates, np.zeros(1, np.int32))
    elif program == "prefill":
        new = np.zeros((1, config.prefill_width), np.int32)
        lowered = programs.prefill.lower(params, cache, new, new[:, 0], new[:, 0])
    else:
        copies = np.zeros(16, np.int32)
        lowered = programs.copy.lower(cache, copies, copies, np.zeros(1, np.int32))
    memory = lowered.compile().memory_analysis()
    size = cache.keys.nbytes + cache.values.nbytes
    assert memory.alias_size_in_bytes >= size
    one_slot = size / cache.keys.shape[1]
    assert memory.temp_size_in_bytes < (1.1 * one_slot if program == "copy" else 0.1 * size)


def test_what_is_dispatched_runs_between_cycles_and_its_errors_come_back(monkeypatch):
    engine, params = engine_of(3)
    cycling, seen = [], []
    cycle = engine._device_cycle

    def watch(requests):
        cycling.append(True)
        try:
            return cycle(requests)
        finally:
            cycling.clear()

    async def asks():
        for _ in range(20):
            await engine.dispatcher(lambda: seen.append((list(cycling), threading.current_thread().name)))
        with pytest.raises(ZeroDivisionError):
            await engine.dispatcher(lambda: 1 // 0)

    async def samples():
        lease = await engine.acquire()
        for _ in range(5):
            await engine.generate(lease, request_of([4, 5, 6], 9))
        engine.release(lease)

    monkeypatch.setattr(engine, "_device_cycle", watch)
    run_work(engine, params, [samples(), asks()])
    assert len(seen) == 20 and not any(during for during, _ in seen)
    assert len({name for _, name in seen}) == 1 and seen[0][1].startswith("dispatch")


def names(cls):
    return {field.name for field in dataclasses.fields(cls)}


def settings_of(cls, **changes):
    return from_section(cls, "rollout", {k: v for k, v in SECTION.items() if k in names(cls)} | changes)


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (EngineConfig, {"slots": 0}, r"rollout\.slots is 0; it must be greater than or equal to 1"),
        (EngineConfig, {"prefix_reuse": "some"}, r"rollout\.prefix_reuse is 'some'; it must be 'all', 'own' or 'none'"),
        (EngineConfig, {"prefill_width": 321}, r"rollout: prefill_width \(321\) exceeds slot_tokens \(320\)"),
        (EngineConfig, {"attention_block": 48}, r"rollout: attention_block \(48\) must divide slot_tokens"),
        (EngineConfig, {"prefill_rows": (4, 4)}, r"rollout: prefill_rows is \(4, 4\); it must be .* ascending"),
        (EngineConfig, {"prefill_rows": ()}, r"rollout: prefill_rows is \(\)"),
        (SamplingConfig, {"temperature": float("inf")}, r"rollout\.temperature is inf; it must be a finite number"),
        (SamplingConfig, {"top_p": 0.0}, r"rollout\.top_p is 0\.0; it must be greater than 0"),
        (RolloutConfig, {"samples": 1, "dynamic_sampling_groups": 4}, "rollout: dynamic_sampling_groups replaces"),
        (RolloutConfig, {"staleness": 1, "dynamic_sampling_groups": 4}, "set one of them only"),
        (AttemptLimits, {"seconds": 0.0}, r"rollout\.seconds is 0\.0; it must be greater than 0"),
    ],
)
def test_settings_out_of_range_are_refused(cls, changes, message):
    with pytest.raises(UserError, match=message):
        settings_of(cls, **changes)


def test_every_key_of_the_section_is_a_field_of_one_class():
    classes = [EngineConfig, RolloutConfig, SamplingConfig]
    for cls in classes:
        settings_of(cls)
    assert sorted(SECTION) == sorted(name for cls in classes for name in names(cls))


def test_slots_spread_evenly_over_devices_and_attention_groups():
    with pytest.raises(ValueError, match=r"rollout\.slots \(3\) must be a multiple of the 2 data shards"):
        Engine(POLICY, CONFIG, tiny.mesh(2))
    config = dataclasses.replace(CONFIG, slots=8, attention_group=6)
    assert [config.attention_group_size(shards) for shards in (1, 2, 8)] == [2, 2, 1]

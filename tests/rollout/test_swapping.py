"""Random schedules of many trajectories: slots, swapping, slow tools and the engine's settings change no token."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import (
    LENGTH,
    MANY,
    Planned,
    all_ids,
    assert_exact,
    engine_of,
    episodes,
    planned,
    sampled,
)

from agentr1_jax.rollout.scheduler import common_prefix
from agentr1_jax.trajectory import Outcome

ENGINES = {
    "usual": {"slots": 3},
    "one slot": {"slots": 1, "swap_slots": 16, "early_exit_after": 0},
    "few slots": {"slots": 3, "swap_slots": 2, "fetch_lag": 1},
    "many slots": {"slots": 16, "swap_slots": 0, "fetch_lag": 1, "early_exit_after": 3},
    "in step": {"slots": 2, "swap_slots": 2, "devices": 2, "deterministic": True},
    "pages": {"slots": 3, "cache": "pages", "page_tokens": 8},
    "few pages": {"slots": 3, "swap_slots": 6, "cache": "pages", "page_tokens": 8, "pages": 20, "fetch_lag": 1},
    "pages for one": {"slots": 4, "swap_slots": 4, "cache": "pages", "page_tokens": 4, "pages": 66, "devices": 2},
}
PROMPT = 20
OBSERVED = 5
HOT = 100.0
"""A temperature at which no two samples begin alike, which would be computed once."""

rollouts = {
    "engine": st.sampled_from(sorted(ENGINES)),
    "rows": st.lists(episodes(delays=[None, 0, 0.001, 0.004, 0.008]), min_size=1, max_size=5),
    "samples": st.integers(1, 3),
    "temperature": st.sampled_from([0.0, 0.7, 1.0]),
}


def ends_with(ids, stops):
    return any(list(ids[-len(stop) :]) == list(stop) for stop in stops)


def check(engine, rows, samples, temperature):
    out = sampled(rows, temperature=temperature, samples=samples, **ENGINES[engine])
    assert_exact(out, temperature)
    for t in out:
        assert t.outcome is Outcome.ENV_DONE
        for step, plan in zip(t.steps, rows[t.group]["steps"], strict=True):
            response, stops = step.response_ids.tolist(), plan["stop"]
            assert len(response) <= plan["max_tokens"]
            assert (step.info["reason"] == "stop") == ends_with(response, stops)
            assert step.info["reason"] == "stop" or len(response) == plan["max_tokens"]
            assert not any(ends_with(response[:k], stops) for k in range(1, len(response)))
    check_counters(out, engine_of(**ENGINES[engine])[0])


def check_counters(trajectories, engine):
    """Tokens are computed once: what the KV slot of a trajectory holds of its next prompt is never prefilled again.

    Pages are computed again where a response gave way, and from the start of the page in which a prompt differs.
    """
    computed = saved = 0
    for t in trajectories:
        held = np.zeros(0, np.int32)
        for step in t.steps:
            reuse = common_prefix(held, step.prompt_ids[:-1])
            computed, saved = computed + len(step.prompt_ids) - 1 - reuse, saved + reuse
            held = np.concatenate([step.prompt_ids, step.response_ids[:-1]])
    c = engine.counters
    if engine.config.cache == "pages":
        assert c.prefill_tokens + c.prefill_tokens_saved >= computed + saved
    else:
        assert c.prefill_tokens + c.prefill_tokens_saved == computed + saved
        assert c.prefill_tokens <= computed
    assert c.prefill_tokens <= c.prefill_tokens_padded
    assert c.decode_tokens == sum(len(s.response_ids) for t in trajectories for s in t.steps) <= c.decode_slot_steps
    assert 0 < c.occupancy <= 1 and 0 <= c.occupancy_while_waiting <= 1 and 0 <= c.host_share <= 1
    run = engine.device.programs
    # Fewer where JAX's caches were emptied since the engine was compiled (see conftest.py).
    assert sum(p._cache_size() for p in (run.prefill, run.decode, run.copy) if p) <= 4


@settings(max_examples=25)
@given(**rollouts)
def test_cached_steps_equal_full_forward_passes_whatever_is_swapped_out(engine, rows, samples, temperature):
    check(engine, rows, samples, temperature)


@pytest.mark.slow
@settings(max_examples=150)
@given(**rollouts)
def test_thousands_of_trajectories_equal_full_forward_passes(engine, rows, samples, temperature):
    check(engine, rows, samples, temperature)


def some_rows(count, delay, steps=3, most=8):
    """Rows of several steps; `delay` is called once for each step. Responses have 2 tokens to `most`."""
    rng = np.random.default_rng(1)
    return [
        planned(
            rng.integers(0, 64, 4 + i).tolist(),
            *({"max_tokens": int(rng.integers(2, most + 1)), "delay": delay()} for _ in range(steps)),
        )
        for i in range(count)
    ]


def test_tokens_depend_neither_on_slots_nor_on_order_nor_on_slow_tools():
    expected = sampled(MANY, slots=1)
    assert len({tuple(map(tuple, row)) for row in all_ids(expected)}) == len(MANY)
    assert all_ids(sampled(MANY, order=[8, 1, 6, 3, 0, 7, 5, 2, 4])) == all_ids(expected)
    assert all_ids(sampled(MANY, order=[4])) == all_ids(expected)[4:5]
    for engine in ENGINES.values():
        assert all_ids(sampled(MANY, **engine)) == all_ids(expected)
    expected = sampled(some_rows(6, lambda: None))
    for engine in ("few slots", "many slots"):
        assert all_ids(sampled(some_rows(6, lambda: 0.05), **ENGINES[engine])) == all_ids(expected)


class Late(Planned):
    """Its environment takes its time to begin."""

    async def run(self, session, row):
        await asyncio.sleep(row["late"])
        await super().run(session, row)


@pytest.mark.parametrize("engine", [ENGINES["in step"], ENGINES["few slots"] | {"deterministic": True}])
def test_in_deterministic_mode_the_speed_of_tools_changes_no_bit(engine):
    rng = np.random.default_rng(0)
    runs = []
    for delay in (lambda: 0, lambda: float(rng.uniform(0, 0.012))):
        rows = [row | {"late": delay()} for row in some_rows(6, delay, most=3)]  # Many end in the same cycle.
        out = sampled(rows, agent=Late(), samples=2, **engine)
        c = engine_of(**engine)[0].counters
        work = c.prefill_tokens, c.copied_tokens, c.decode_calls, c.prefill_calls
        runs.append((all_ids(out), [s.logprobs.tobytes() for t in out for s in t.steps], work))
    assert runs[0] == runs[1]


def test_shards_take_over_from_one_another_in_any_order():
    """Many trajectories, few slots: one that leaves a shard frees a slot of that shard and no other."""
    rng = np.random.default_rng(3)
    rows = some_rows(20, lambda: float(rng.choice([0, 0.001, 0.004])), steps=2)
    assert_exact(sampled(rows, **ENGINES["in step"] | {"deterministic": False}))


@pytest.mark.parametrize("engine", ["one slot", "many slots"])
def test_prefill_computes_each_prompt_once_a_group_and_grows_linearly(engine):
    rng = np.random.default_rng(2)
    groups, samples = 3, 8
    for steps in (2, 5):
        delays = itertools.cycle([0, 0.003, None, 0.001])
        step = {"max_tokens": 4, "observation": list(range(OBSERVED))}
        rows = [
            planned(
                [g, *rng.integers(0, 64, PROMPT - 1).tolist()], *(step | {"delay": next(delays)} for _ in range(steps))
            )
            for g in range(groups)
        ]
        out = sampled(rows, temperature=HOT, samples=samples, **ENGINES[engine])
        counters = engine_of(**ENGINES[engine])[0].counters
        # The last token of every prompt is fed by decode; the last one sampled comes with what follows it.
        followed = groups * samples * (steps - 1) * (1 + OBSERVED - 1)
        assert counters.prefill_tokens == groups * (PROMPT - 1) + followed
        assert_exact(out, HOT)


def test_slots_are_copied_within_a_group_and_to_swap_and_not_otherwise():
    engine = ENGINES["many slots"]
    sampled([planned(list(range(PROMPT)), {})], samples=8, **engine)
    counters = engine_of(**engine)[0].counters
    assert (counters.prefill_tokens, counters.prefill_tokens_saved) == (PROMPT - 1, 7 * (PROMPT - 1))
    assert counters.copied_tokens == 7 * (PROMPT - 1)
    sampled([planned([i] * 9, {"delay": 0.002}, {"delay": 0.002}, {}) for i in range(16)], **engine)
    assert engine_of(**engine)[0].counters.copied_tokens == 0

    rows = [planned(list(range(10)), {"delay": 0.02}, {}), planned(list(range(30, 45)), {})]
    out = sampled(rows, **ENGINES["one slot"])
    held = 10 + len(out[0].steps[0].response_ids) - 1
    assert engine_of(**ENGINES["one slot"])[0].counters.copied_tokens == 2 * held
    assert_exact(out)


def test_the_timeline_shows_each_slot_at_one_thing_at_a_time():
    engine, _ = engine_of(3)
    engine.record_timeline = True
    began = time.perf_counter()
    out = sampled([*MANY, *some_rows(6, lambda: 0.01)])
    wall, spans = time.perf_counter() - began, engine.timeline.spans
    sampled([planned([1, 2, 3], {"delay": 0.05}, {"delay": 0.03}, {})])
    tools = [s["end"] - s["start"] for s in engine.timeline.spans if s["state"] == "tool"]
    engine.record_timeline = False
    assert_exact(out)
    assert {s["state"] for s in spans} == {"decode", "prefill", "tool"}
    assert all(0 <= s["start"] <= s["end"] <= wall and 0 <= s["slot"] < 3 for s in spans)
    for slot in range(3):
        own = sorted((s for s in spans if s["slot"] == slot), key=lambda s: (s["start"], s["end"]))
        decoding = [s for s in own if s["state"] == "decode"]
        assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(decoding))
        waits = [s for s in own if s["state"] == "tool"]
        assert not any(t["start"] < d["end"] and d["start"] < t["end"] for t in waits for d in decoding)
    # Sleeps may end a little early by the other clock.
    assert len(tools) == 2 and tools[0] > 0.045 and tools[1] > 0.025


def test_a_kv_slot_is_used_to_its_end():
    rng = np.random.default_rng(5)
    rows = [planned(rng.integers(0, 64, LENGTH - 13 - i).tolist(), {"max_tokens": 12, "delay": 0}) for i in range(6)]
    assert_exact(sampled(rows, **ENGINES["few slots"]))

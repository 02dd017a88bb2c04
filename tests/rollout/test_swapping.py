"""Few slots, many trajectories: swapping, slow tools and the settings of the engine change no token."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import LENGTH, MANY, Planned, all_ids, assert_exact, engine_of, episodes, planned, sampled

from agentr1_jax.trajectory import Outcome

ENGINES = {
    "one slot": {"slots": 1, "swap_slots": 16, "early_exit_after": 0},
    "few slots": {"slots": 3, "swap_slots": 2, "fetch_lag": 1},
    "many slots": {"slots": 16, "swap_slots": 0, "fetch_lag": 1, "early_exit_after": 3},
    "in step": {"slots": 2, "swap_slots": 2, "devices": 2, "deterministic": True},
}
PROMPT = 20
OBSERVED = 5
HOT = 100.0

random_rows = episodes(delays=[None, 0, 0.001, 0.004, 0.008])
rollouts = {
    "engine": st.sampled_from(sorted(ENGINES)),
    "rows": st.lists(random_rows, min_size=2, max_size=5),
    "samples": st.integers(1, 3),
    "temperature": st.sampled_from([0.0, 0.8, 1.0]),
}


def counters_of(slots, devices=1, swap_slots=None, **habits):
    return engine_of(slots, devices, swap_slots, **habits)[0].counters


def check(engine, rows, samples, temperature):
    out = sampled(rows, temperature=temperature, samples=samples, **ENGINES[engine])
    assert_exact(out, temperature)
    assert all(t.outcome is Outcome.ENV_DONE and len(t.steps) == len(rows[t.group]["steps"]) for t in out)
    counters = counters_of(**ENGINES[engine])
    assert 0 < counters.occupancy <= 1 and 0 <= counters.occupancy_while_waiting <= 1 and 0 <= counters.host_share <= 1
    assert counters.decode_tokens == sum(len(s.response_ids) for t in out for s in t.steps)
    prompts = sum(len(s.prompt_ids) - 1 for t in out for s in t.steps)
    assert counters.prefill_tokens + counters.prefill_tokens_saved == prompts
    assert counters.prefill_tokens <= most_prefill(out)


def most_prefill(trajectories):
    """Tokens that have to be computed if each KV slot keeps its contents, and nothing is shared between slots."""
    total = 0
    for t in trajectories:
        held = np.zeros(0, np.int32)
        for step in t.steps:
            n = min(len(held), len(step.prompt_ids) - 1)
            total += len(step.prompt_ids) - 1 - int(np.cumprod(held[:n] == step.prompt_ids[:n]).sum())
            held = np.concatenate([step.prompt_ids, step.response_ids[:-1]])
    return total


@settings(max_examples=10)
@given(**rollouts)
def test_cached_steps_equal_full_forward_passes_whatever_is_swapped_out(engine, rows, samples, temperature):
    check(engine, rows, samples, temperature)


@pytest.mark.slow
@settings(max_examples=400)
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


def test_neither_slots_nor_slow_tools_change_a_token():
    expected = sampled(some_rows(10, lambda: None), slots=3)
    for engine, seconds in itertools.product(("one slot", "few slots", "many slots"), (0, 0.2)):
        out = sampled(some_rows(10, lambda seconds=seconds: seconds), **ENGINES[engine])
        assert all_ids(out) == all_ids(expected)
        for a, b in zip(out, expected, strict=True):
            for x, y in zip(a.steps, b.steps, strict=True):
                np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-4)


class Late(Planned):
    """Its environment takes its time to begin."""

    async def run(self, session, row):
        await asyncio.sleep(row["late"])
        await super().run(session, row)


@pytest.mark.parametrize(
    "engine", [ENGINES["in step"], {"slots": 3, "swap_slots": 2, "fetch_lag": 1, "deterministic": True}]
)
def test_in_deterministic_mode_the_speed_of_tools_changes_no_bit(engine):
    rng = np.random.default_rng(0)
    runs = []
    for delay in (lambda: 0, lambda: float(rng.uniform(0, 0.012)), lambda: float(rng.uniform(0, 0.012))):
        rows = [row | {"late": delay()} for row in some_rows(6, delay, most=3)]  # Many end in the same turn.
        out = sampled(rows, agent=Late(), samples=2, **engine)
        counters = counters_of(**engine)
        work = counters.prefill_tokens, counters.copied_tokens, counters.decode_calls, counters.prefill_calls
        runs.append((all_ids(out), [s.logprobs.tobytes() for t in out for s in t.steps], work))
    assert runs[0] == runs[1] == runs[2]


def test_shards_take_over_from_one_another_in_any_order():
    """Many trajectories, few slots: one that leaves a shard frees a slot of that shard and no other."""
    rng = np.random.default_rng(3)
    rows = some_rows(20, lambda: float(rng.choice([0, 0.001, 0.004])), steps=2)
    out = sampled(rows, **ENGINES["in step"] | {"deterministic": False})
    assert len(out) == 20
    assert_exact(out)


def groups_of_prompts(groups, steps):
    rng = np.random.default_rng(2)
    delays = itertools.cycle([0, 0.003, None, 0.001])
    step = {"max_tokens": 4, "observation": list(range(OBSERVED))}
    return [
        planned([g, *rng.integers(0, 64, PROMPT - 1).tolist()], *(step | {"delay": next(delays)} for _ in range(steps)))
        for g in range(groups)
    ]


@pytest.mark.parametrize("engine", ["one slot", "few slots", "many slots"])
def test_prefill_computes_each_prompt_once_a_group_and_grows_linearly(engine):
    groups, samples = 3, 8
    for steps in (2, 4, 8):
        # So hot that no two samples begin alike, which would be computed once too.
        out = sampled(groups_of_prompts(groups, steps), temperature=HOT, samples=samples, **ENGINES[engine])
        counters = counters_of(**ENGINES[engine])
        # The last token of every prompt is fed by decode; the last one sampled comes with what follows it.
        followed = groups * samples * (steps - 1) * (1 + OBSERVED - 1)
        assert counters.prefill_tokens == groups * (PROMPT - 1) + followed
        assert counters.prefill_tokens_padded >= counters.prefill_tokens
        assert_exact(out, HOT)


def test_a_group_is_copied_from_the_one_that_computes_its_prompt():
    sampled([planned(list(range(PROMPT)), {})], samples=8, **ENGINES["many slots"])
    counters = counters_of(**ENGINES["many slots"])
    assert (counters.prefill_tokens, counters.prefill_tokens_saved) == (PROMPT - 1, 7 * (PROMPT - 1))
    assert counters.copied_tokens == 7 * (PROMPT - 1)


def test_a_swapped_sequence_is_copied_out_and_back():
    rows = [planned(list(range(10)), {"delay": 0.02}, {}), planned(list(range(30, 45)), {})]
    out = sampled(rows, **ENGINES["one slot"])
    held = 10 + len(out[0].steps[0].response_ids) - 1
    assert counters_of(**ENGINES["one slot"]).copied_tokens == 2 * held
    assert_exact(out)


def test_no_sequence_is_swapped_out_where_slots_are_free():
    sampled([planned([i] * 9, {"delay": 0.002}, {"delay": 0.002}, {}) for i in range(16)], **ENGINES["many slots"])
    assert counters_of(**ENGINES["many slots"]).copied_tokens == 0


@pytest.fixture
def timed():
    """An engine with fetch lag 0 that records its timeline."""
    engine, _ = engine_of(3)
    engine.record_timeline = True
    yield engine
    engine.record_timeline = False


def test_the_timeline_shows_each_slot_at_one_thing_at_a_time(timed):
    began = time.perf_counter()
    out = sampled([*MANY, *some_rows(6, lambda: 0.01)])
    wall = time.perf_counter() - began
    spans = timed.timeline.spans
    assert {s.state for s in spans} == {"decode", "prefill", "tool"}
    assert all(0 <= s.start <= s.end <= wall and 0 <= s.slot < 3 for s in spans)
    for slot in range(3):
        own = sorted((s for s in spans if s.slot == slot), key=lambda s: (s.start, s.end))
        decoding = [s for s in own if s.state == "decode"]
        assert all(a.end <= b.start for a, b in itertools.pairwise(decoding))
        tools = [s for s in own if s.state == "tool"]
        assert not any(t.start < d.end and d.start < t.end for t in tools for d in decoding)
    assert sum(s.end - s.start for s in spans if s.state == "decode") > 0
    assert_exact(out)


def test_the_timeline_shows_how_long_a_slot_waits_for_its_tool(timed):
    sampled([planned([1, 2, 3], {"delay": 0.05}, {"delay": 0.03}, {})])
    tools = [s for s in timed.timeline.spans if s.state == "tool"]
    assert [s.slot for s in tools] == [0, 0]
    # Sleeps may end a little early by the other clock.
    assert tools[0].end - tools[0].start > 0.045 and tools[1].end - tools[1].start > 0.025


def test_a_kv_slot_is_used_to_its_end():
    rng = np.random.default_rng(5)
    rows = [planned(rng.integers(0, 64, LENGTH - 13 - i).tolist(), {"max_tokens": 12, "delay": 0}) for i in range(6)]
    assert_exact(sampled(rows, **ENGINES["few slots"]))

"""The simulated pod: closed forms, a simulation token by token, the real engine, and what must not change anything."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from programs import program
from schedules import CONFIG, POLICY, engine_of, planned, sampled

from agentr1_jax.errors import UserError
from agentr1_jax.runtime.config import write_config
from agentr1_jax.trajectory import Outcome, Step, Trajectory, write_jsonl
from configs import base
from experiments.pod import measured, results
from experiments.pod.engine import Engine
from experiments.pod.model import Job, Latency, Shape, Speeds, Work, deal, draw_batch, lognormal_of, parse_latency
from experiments.pod.simulation import WAYS, Cell, Setting, figures, simulate, update_seconds

SHAPE = Shape(slots=2, parking=1, chunk=3, leave_after=1, prefill_width=4, prefill_rows=(2,))
WIDE = dataclasses.replace(SHAPE, slots=64, parking=0, chunk=1)
STEP = Speeds(step=1.0)
DYADIC = Speeds(step=1.0, slot=0.25, prefill_token=0.125, turn=0.5, response=0.25, learner_token=0.5, update=2.0)
"""Sums of these are exact, so that a leap over many iterations ends when single steps do."""


def job(*steps, tokens=1):
    """A trajectory by its steps: (tokens sampled, seconds of its tools, prompt tokens, those of a void cache)."""
    steps = [(*step, *(0.0, 0, 0)[len(step) - 1 :]) if len(step) < 4 else step for step in steps]
    responses, waits, prefill, again = zip(*steps, strict=True)
    return Job(Work(responses, prefill, again, tuple(int(w > 0) for w in waits), tokens), list(waits))


def rolled_out(jobs, shape=SHAPE, speeds=STEP, **how):
    """An engine after a batch."""
    engine = Engine(shape, speeds, **how)
    engine.submit(jobs, 0)
    engine.finish(0)
    return engine


random_jobs = st.lists(
    st.lists(
        st.tuples(
            st.integers(1, 7), st.sampled_from([0.0, 0.0, 0.5, 2.25, 9.0]), st.integers(0, 9), st.integers(9, 20)
        ),
        min_size=1,
        max_size=4,
    ).map(lambda steps: job(*steps)),
    min_size=1,
    max_size=9,
)
random_shapes = st.builds(
    Shape,
    slots=st.integers(1, 4),
    parking=st.integers(0, 3),
    chunk=st.integers(1, 5),
    leave_after=st.integers(0, 3),
    prefill_width=st.just(4),
    prefill_rows=st.just((2,)),
)


def token_by_token(jobs, shape, speeds):
    """One host with lists alone, a token at a time: (seconds, iterations, prompt tokens, order of the ends)."""
    now, iterations, computed, ends = 0.0, 0, 0, []
    state = dict.fromkeys(range(len(jobs)), "queued")
    step, left, back = [0] * len(jobs), [0] * len(jobs), [0.0] * len(jobs)
    slots, waiting, went = [None] * shape.slots, [], []

    def admit():
        for i in state:
            if state[i] == "queued" and sum(s not in ("queued", "done") for s in state.values()) < room:
                state[i] = "waiting"
                waiting.append(i)

    def proceed(i):
        if step[i] < len(jobs[i].waits):
            state[i] = "waiting"
            waiting.append(i)
            return
        state[i] = "done"
        ends.append(i)
        if i in slots:
            slots[slots.index(i)] = None
        admit()

    room = shape.slots + shape.parking
    admit()
    order = []  # who decodes, in order of seats
    while any(s != "done" for s in state.values()):
        for i in sorted(
            (i for i in state if state[i] == "away" and back[i] <= now), key=lambda i: (back[i], went.index(i))
        ):
            went.remove(i)
            proceed(i)
        rows = 0
        for i in list(waiting):
            if i not in slots:
                idle = [other for other in went if other in slots]
                if None in slots:
                    slots[slots.index(None)] = i
                elif idle:
                    slots[slots.index(idle[-1])] = i
                else:
                    continue
            waiting.remove(i)
            state[i], left[i] = "decoding", jobs[i].work.response[step[i]]
            tokens = jobs[i].work.prefill[step[i]]
            computed, rows = computed + tokens, rows + math.ceil(tokens / 4)
            order.append(i)
        if not order:
            if any(s != "done" for s in state.values()):
                now = max(now, min(back[i] for i in went))
            continue
        now += speeds.turn + speeds.prefill_token * 8 * math.ceil(rows / 2)
        ended = []
        for _ in range(shape.chunk):
            now += speeds.step + speeds.slot * len(order)
            iterations += 1
            for i in order:
                left[i] -= 1
            ended += [i for i in order if not left[i]]
            order = [i for i in order if left[i]]
            if not order or (shape.leave_after and len(ended) >= shape.leave_after):
                break
        now += speeds.response * len(ended)
        for i in ended:
            wait = jobs[i].waits[step[i]]
            step[i] += 1
            if wait:
                state[i], back[i] = "away", now + wait
                went.append(i)
            else:
                proceed(i)
    return now, iterations, computed, ends


@settings(max_examples=300)
@given(random_jobs, random_shapes)
def test_leaps_end_where_single_tokens_do(jobs, shape):
    engine = rolled_out(jobs, shape, DYADIC)
    now, iterations, computed, ends = token_by_token(jobs, shape, DYADIC)
    assert (engine.now, engine.counters.iterations, engine.counters.prefill_tokens) == (now, iterations, computed)
    assert sorted(ends) == list(range(len(jobs)))


@settings(max_examples=200)
@given(random_jobs, random_shapes, st.integers(1, 3), st.booleans())
def test_every_trajectory_ends_once_and_live_slot_steps_are_tokens(jobs, shape, hosts, parks):
    engine = rolled_out(jobs, shape, DYADIC, hosts=hosts, parks=parks and hosts == 1)
    counters = engine.counters
    assert counters.trajectories == len(jobs) and engine.unfinished == {0: 0}
    assert counters.tokens == sum(sum(j.work.response) for j in jobs) <= counters.slot_steps
    assert counters.prefill_tokens == sum(sum(j.work.prefill) for j in jobs) <= counters.prefill_padded
    assert counters.slot_steps == counters.iterations * shape.slots * hosts
    assert counters.useful_seconds <= engine.now * hosts


@pytest.mark.parametrize("parking", [0, 3])
def test_equal_lengths_without_tools_go_wave_by_wave(parking):
    shape = dataclasses.replace(SHAPE, slots=4, parking=parking)
    engine = rolled_out([job((7,)) for _ in range(12)], shape, Speeds(step=0.5, slot=0.125))
    assert engine.now == 3 * 7 * (0.5 + 4 * 0.125)
    assert engine.counters.tokens == engine.counters.slot_steps


def test_one_slot_without_parking_takes_all_there_is():
    engine = rolled_out([job((5, 3.0), (2, 1.5)), job((4,))], dataclasses.replace(SHAPE, slots=1, parking=0))
    assert engine.now == 5 + 3 + 2 + 1.5 + 4


def test_one_slot_with_parking_works_while_tools_do():
    shape = dataclasses.replace(SHAPE, slots=1, parking=1, chunk=1)
    assert rolled_out([job((5, 3.0), (2,)), job((4,))], shape).now == 5 + 4 + 2
    assert rolled_out([job((5, 6.0), (2,)), job((4,))], shape).now == 5 + 6 + 2


@given(random_jobs)
def test_slots_for_all_take_as_long_as_the_longest(jobs):
    whole = [Job(j.work, [float(math.ceil(w)) for w in j.waits]) for j in jobs]
    engine = rolled_out(whole, WIDE)
    assert engine.now == max(sum(j.work.response) + sum(j.waits) for j in whole)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 6))
def test_more_slots_are_never_slower_where_nothing_is_waited_for(lengths, slots):
    """With tools or chunks it is no theorem: who comes back earlier may stand in the way of who takes longest."""
    jobs = [job((n,)) for n in lengths]
    few, more = (rolled_out(jobs, dataclasses.replace(WIDE, slots=n)).now for n in (slots, slots + 1))
    assert max(max(lengths), sum(lengths) / (slots + 1)) <= more <= few


def test_a_lockstep_engine_on_one_host_is_one_without_parking():
    jobs = [job((3, 2.0), (4,)), job((6,)), job((2, 0.5), (5, 1.0))]
    shape = dataclasses.replace(SHAPE, parking=0)
    alone, joint = rolled_out(jobs, shape, DYADIC), rolled_out(jobs, shape, DYADIC, parks=False)
    assert (alone.now, alone.counters) == (joint.now, joint.counters)


def test_hosts_in_lockstep_wait_for_the_one_with_most_to_do():
    shape, speeds = dataclasses.replace(WIDE, slots=2), Speeds(step=1.0, slot=0.5, prefill_token=1.0)
    jobs = [job((4, 0.0, 8)), job((2,)), job((2, 0.0, 16))]  # The first two on one host.
    engine = rolled_out(jobs, shape, speeds, hosts=2, parks=False)
    assert engine.now == 16 + 2 * (1 + 2 * 0.5) + 2 * (1 + 0.5)
    with pytest.raises(ValueError, match="no parking with several hosts"):
        Engine(shape, speeds, hosts=2)


@pytest.mark.parametrize("parking", [0, 2])
def test_the_simulated_engine_does_what_the_real_one_does(parking):
    """Decode calls, iterations and prompt tokens of the compiled engine, with tools that take no time."""
    rng = random.Random(parking)
    ids = range(1, POLICY.vocab_size)
    rows = [
        planned(
            [i, *rng.choices(ids, k=rng.randrange(30))],  # Other beginnings: nothing is shared.
            *({"max_tokens": rng.randint(1, 9), "observation": rng.choices(ids, k=rng.randrange(9))} for _ in range(3)),
        )
        for i in range(14)
    ]
    trajectories = sampled(rows, slots=3, parking=parking)
    real = engine_of(3, parking=parking)[0].counters
    shape = Shape(3, parking, CONFIG.decode_chunk, CONFIG.leave_after, CONFIG.prefill_width, CONFIG.prefill_rows)
    works = [work for t in trajectories for work in measured.work_of([t], shape.prefill_width)]
    simulated = rolled_out([Job(work, [0.0] * 3) for work in works], shape).counters
    assert simulated.slot_steps == real.decode_slot_steps and simulated.turns == real.decode_calls
    assert simulated.tokens == real.decode_tokens
    assert simulated.prefill_tokens == real.prefill_tokens
    assert simulated.prefill_padded == real.prefill_tokens_padded


def cycles(way, batches, staleness=0, shape=WIDE, speeds=STEP):
    return WAYS[way](shape, speeds, batches, staleness, (0,))


def test_processes_meet_at_the_update():
    speeds = dataclasses.replace(STEP, learner_token=0.5, update=2.0, transfer=1.0)
    batches = [[[job((3,), tokens=4)], [job((9,), tokens=8)]], [[job((8,), tokens=4)], [job((1,), tokens=8)]]]
    update = 2.0 + 0.5 * 12 / 2 + 1.0
    assert update_seconds(speeds, batches[0]) == update
    ends = [cycle.end for cycle in cycles("per_process", batches, speeds=speeds)]
    assert ends == [9 + update, 9 + update + 8 + update]


def test_rounds_wait_for_the_longest_response_and_the_slowest_tool():
    speeds = dataclasses.replace(STEP, update=10.0)
    batch = [[job((3, 5.0), (4, 1.0))], [job((6, 2.0), (1, 3.0)), job((2, 1.0))]]
    alone = 6 + 5 + 4 + 3
    assert [c.end for c in cycles("rounds", [batch] * 2, speeds=speeds)] == [alone + 10, 2 * (alone + 10)]
    # With overlap the update fills the first wait of the batch after, 5 of its 10 seconds.
    assert [c.end for c in cycles("rounds", [batch] * 3, 1, speeds=speeds)] == [alone + 6 + 10, 2 * alone + 5 + 6 + 10]


@pytest.mark.parametrize("way", ["per_process", "lockstep"])
def test_with_overlap_the_next_batch_is_under_way_before_the_update(way):
    """Of two slots each batch needs one: every other update finds its batch complete."""
    speeds = dataclasses.replace(STEP, update=10.0)
    batches = [[[job((4, 2.0, 0, 0))]] for _ in range(6)]
    found = cycles(way, batches, 1, shape=dataclasses.replace(WIDE, slots=2), speeds=speeds)
    assert np.diff([0.0, *(c.end for c in found)]).tolist() == [16, 10, 16, 10, 16, 10]
    stale = [c.counters.stale_tokens for c in found]
    assert stale == [4, 4, 8, 8, 12, 12]  # Of batches 1, 3 and 5, begun before updates 0, 2 and 4.
    alone = cycles(way, batches, 0, shape=dataclasses.replace(WIDE, slots=2), speeds=speeds)
    assert np.diff([0.0, *(c.end for c in alone)]).tolist() == [16] * 6 and not alone[-1].counters.stale_tokens


def test_responses_in_flight_end_under_old_weights_and_caches_are_void_then():
    engine = Engine(WIDE, dataclasses.replace(STEP, prefill_token=1.0))
    engine.submit([job((4, 0.0, 0, 8), (2, 0.0, 0, 8)), job((9, 0.0, 0, 8), (2, 0.0, 3, 16))], 1)
    engine.advance(2.0)
    engine.adopt(10.0)
    engine.finish(1)
    # 7 iterations more of the longer one, in which nobody begins; then both prompts anew (2 + 4 rows of 4) and 2 more.
    assert engine.version == 1
    assert engine.now == 10 + 7 + 24 + 2
    assert engine.counters.prefill_tokens == 8 + 16
    assert engine.counters.stale_tokens == 4 + 9


def test_overlap_can_be_slower():
    """It is no theorem that it helps: what the weights make void is computed again."""
    speeds = dataclasses.replace(STEP, prefill_token=4.0, update=1.0)
    batches = [[[job((n, 0.0, 0, 0), (2, 0.0, 0, 40)) for n in (2, 9)]] for _ in range(4)]
    ends = [cycles("per_process", batches, s, dataclasses.replace(WIDE, slots=2), speeds)[2].end for s in (0, 1)]
    assert ends[1] > ends[0]


random_batches = st.lists(random_jobs, min_size=3, max_size=3).map(lambda jobs: [jobs] * 3)


@settings(max_examples=50)
@given(random_batches, random_shapes, st.permutations(range(3)), st.sampled_from([0, 1]))
def test_the_order_of_hosts_does_not_matter(batches, shape, order, staleness):
    other = [[batch[host] for host in order] for batch in batches]
    for way in ("per_process", "rounds"):  # A lockstep engine has one queue, whose order counts.
        found = [cycles(way, b, staleness, shape, DYADIC) for b in (batches, other)]
        assert [c.end for c in found[0]] == [c.end for c in found[1]]
        # Sums of seconds depend on the order of their terms.
        sums, others = (dataclasses.astuple(found_cycles[-1].counters) for found_cycles in found)
        assert sums == pytest.approx(others, rel=1e-12)


@settings(max_examples=50)
@given(random_batches, random_shapes, st.sampled_from(sorted(WAYS)), st.sampled_from([0, 1]))
def test_another_unit_of_time_scales_all_times(batches, shape, way, staleness):
    assume(staleness == 0 or len(batches) > 2)
    slow = Speeds(**{name: 4 * value for name, value in dataclasses.asdict(DYADIC).items()})
    slowed = [[[Job(j.work, [4 * w for w in j.waits]) for j in jobs] for jobs in batch] for batch in batches]
    once, later = cycles(way, batches, staleness, shape, DYADIC), cycles(way, slowed, staleness, shape, slow)
    assert [4 * c.end for c in once] == [c.end for c in later]
    updates = 1 if staleness else 3
    one, four = figures(once, 3, staleness, updates), figures(later, 3, staleness, updates)
    assert (one.occupancy, one.utilisation, one.stale) == (four.occupancy, four.utilisation, four.stale)
    assert one.trajectories_per_s == 4 * four.trajectories_per_s
    assert 0 < one.utilisation <= 1 + 1e-12 and 0 <= one.occupancy <= 1


def test_a_cycle_may_pass_in_which_nothing_is_decoded():
    """All of a short batch was sampled ahead, before the cycle before ended."""
    short = [[job((1, 0.0), tokens=1)] for _ in range(3)]
    found = cycles("lockstep", [short] * 3, 1, Shape(2, 0, 1, 0, 4, (2,)), DYADIC)
    told = figures(found, 3, 1, 1)
    assert found[1].counters.slot_steps == found[0].counters.slot_steps
    assert told.occupancy == told.stale == 0 and told.utilisation > 0


@settings(max_examples=50)
@given(random_batches, random_shapes, st.sampled_from(sorted(WAYS)), st.sampled_from([0, 1]))
def test_all_ways_sample_everything_once(batches, shape, way, staleness):
    found = cycles(way, batches, staleness, shape, DYADIC)[2 - staleness]
    jobs = [j for batch in batches[: 3 - staleness] for share in batch for j in share]
    assert found.trajectories == len(jobs)
    assert found.tokens == sum(sum(j.work.response) for j in jobs) <= found.counters.tokens
    if not staleness:
        assert found.counters.trajectories == len(jobs) and found.counters.tokens == found.tokens
        assert not found.counters.stale_tokens


GROUPS = [[job((3, 1.0), (2,), tokens=i).work for _ in range(2)] for i in range(5)]


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 3))
def test_a_larger_batch_begins_like_a_smaller_one_and_groups_stay_whole(few, more, seed):
    latency = Latency("lognormal", (1.0, 0.8))
    small, large = (draw_batch(GROUPS, n, latency, seed, 7) for n in (few, few + more))
    assert large[:few] == small and len(large) == few + more
    for group in large:
        assert [j.work for j in group] in GROUPS
        assert all(j.waits[0] > 0 and j.waits[1] == 0 for j in group)


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 30))
def test_every_group_is_dealt_to_one_host(sizes, hosts):
    groups = [[Job(GROUPS[0][0], [float(i), 0.0])] * size for i, size in enumerate(sizes)]
    dealt = deal(groups, hosts)
    assert [j for jobs in dealt for j in jobs] == [j for group in groups for j in group]
    counts = [len({j.waits[0] for j in jobs}) for jobs in dealt]
    assert len(dealt) == hosts and max(counts) <= -(-len(groups) // hosts)


def test_a_step_waits_for_the_slowest_of_its_calls():
    work = Work((1, 1, 1), (0, 0, 0), (0, 0, 0), (0, 2000, 1), 1)
    (((_, waits),),) = draw_batch([[work]], 1, Latency("uniform", (1.0, 3.0)), 0, 0)
    assert waits[0] == 0 and waits[1] > 2.99 and 1 <= waits[2] <= 3


def test_latencies_have_the_moments_that_they_say():
    rng = np.random.default_rng(0)
    assert Latency("constant", (2.0,)).draw(rng, 3).tolist() == [2.0] * 3
    assert Latency("exponential", (2.0,)).draw(rng, 100_000).mean() == pytest.approx(2.0, rel=0.02)
    slow = parse_latency("lognormal(1.5, 0.8)").draw(rng, 100_000)
    assert np.median(slow) == pytest.approx(1.5, rel=0.02)
    p50, p95 = np.percentile(lognormal_of(0.2, 1.1).draw(rng, 100_000), [50, 95])
    assert (p50, p95) == (pytest.approx(0.2, rel=0.02), pytest.approx(1.1, rel=0.03))


def test_jitter_costs_lockstep_and_averages_out_elsewhere():
    batches = [[[job((200,))] for _ in range(32)]] * 2
    calm, shaky = STEP, dataclasses.replace(STEP, jitter=0.2)
    shape = dataclasses.replace(WIDE, slots=1)
    taken = {
        (way, s.jitter): cycles(way, batches, 0, shape, s)[-1].end
        for way in ("per_process", "lockstep")
        for s in (calm, shaky)
    }
    assert taken["per_process", 0.0] == taken["lockstep", 0.0] == 400
    assert 400 < taken["per_process", 0.2] < 440
    # The expected largest of 32 standard normal numbers is 2.07.
    assert taken["lockstep", 0.2] == pytest.approx(400 * np.exp(0.2 * 2.07 - 0.02), rel=0.05)


def recorded(group, sample, *steps):
    """A trajectory by its steps: (prompt, response, number of tool calls)."""
    made = [
        Step(np.asarray(p, np.int32), np.asarray(r, np.int32), np.zeros(len(r), np.float32), 0.0, tool_calls=[{}] * n)
        for p, r, n in steps
    ]
    return Trajectory(f"t/{group}/{sample}", group, sample, "t", 0, made, Outcome.ENV_DONE)


def test_work_counts_what_neither_the_line_nor_the_group_holds():
    prompt = list(range(20))
    asked, found = [*prompt, 50, 51], [60, 61, 62, 63, 64, 65]
    one = recorded(0, 0, (prompt, [50, 51], 1), ([*asked, *found], [70], 0))
    same = recorded(0, 1, (prompt, [50, 51], 1), ([*asked, *found], [71], 0))
    other = recorded(0, 2, (prompt, [52], 2), ([*prompt, 52, 80, 81], [72], 0))
    works = measured.work_of([one, same, other], 8)
    assert [w.response for w in works] == [(2, 1), (2, 1), (1, 1)]
    # A prompt's last token is left to decoding, and the last sampled one of a response was never fed.
    assert [w.prefill for w in works] == [(19, 6), (0, 0), (0, 2)]
    assert [w.again for w in works] == [(19, 27), (0, 0), (0, 2)]
    assert [w.calls for w in works] == [(1, 0), (1, 0), (2, 0)]
    assert [w.tokens for w in works] == [29, 29, 24]


@given(st.lists(st.floats(0, 5), min_size=3, max_size=3), st.integers(0, 99))
def test_nonnegative_least_squares_recovers_and_meets_its_optimality_conditions(true, seed):
    rng = np.random.default_rng(seed)
    a = rng.random((12, 3))
    np.testing.assert_allclose(measured.nonnegative_least_squares(a, a @ true), true, atol=1e-7)
    b = rng.normal(size=12)
    x = measured.nonnegative_least_squares(a, b)
    gradient = a.T @ (a @ x - b)
    assert np.all(x >= 0) and np.all(gradient > -1e-9) and abs(gradient @ x) < 1e-8


TRUE = Speeds(step=0.03, slot=0.002, prefill_token=0.0005, response=0.01, learner_token=0.004)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run whose metrics are those of a simulated host."""
    folder, rng = tmp_path_factory.mktemp("run"), random.Random(0)
    config = base.get_config()
    config.rollout.slots, config.rollout.parking = 4, 2
    write_config(folder, config)
    lines = [{"index": 0, "phase": "eval", "update": 0}]
    for update in range(7):
        batch = []
        for group in range(5):
            prompt = rng.choices(range(99), k=20)
            for sample in range(3):
                first = rng.choices(range(99), k=rng.randint(1, 30))
                later = [*prompt, *first, *rng.choices(range(99), k=rng.randint(1, 20))]
                steps = [(prompt, first, 1), (later, rng.choices(range(99), k=rng.randint(1, 9)), 0)]
                batch.append(recorded(group, sample, *steps[: rng.randint(1, 2)]))
        path = folder / "trajectories" / f"rl_{update:06d}.jsonl.gz"
        write_jsonl(path, batch)
        shape = Shape(
            4, 2, *(config.rollout[k] for k in ("decode_chunk", "leave_after", "prefill_width", "prefill_rows"))
        )
        works = [w for g in measured._groups(batch, shape.prefill_width) for w in g]
        did = rolled_out([Job(w, [1e-9 * n for n in w.calls]) for w in works], shape, TRUE).counters
        decode = TRUE.step * did.iterations + TRUE.slot * did.tokens + TRUE.prefill_token * did.prefill_padded
        lines.append(
            {
                "index": update + 1,
                "phase": "rl",
                "update": update + 1,
                "time/decode": decode,
                "time/rollout": decode + TRUE.response * sum(len(w.response) for w in works),
                "time/learn": TRUE.learner_token * sum(w.tokens for w in works),
                "time/decode_tokens": float(did.tokens),
                "rollout/occupancy": did.tokens / did.slot_steps,
                "rollout/prefill_tokens": float(did.prefill_tokens),
                "rollout/prefill_padded": float(did.prefill_padded),
                "time/tool_p50": 1e-9,
                "time/tool_p95": 1e-9,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_speeds_and_latencies_are_read_from_a_run_and_its_replay_agrees(run):
    recording = measured.read_run(str(run))
    assert len(recording.groups) == 35 and recording.processes == 1
    speeds, latency = measured.measured_speeds(recording), measured.measured_latency(recording)
    for name, value in dataclasses.asdict(TRUE).items():
        assert getattr(speeds, name) == pytest.approx(value, rel=1e-6), name
    assert latency.parameters == (1e-9, 0.0)
    for record in measured.replay(recording, speeds, latency, 0):
        for name in ("decode iterations", "occupancy", "prefill tokens", "with padding", "rollout seconds"):
            assert record[f"{name}, simulated"] == pytest.approx(record[f"{name}, recorded"], rel=1e-6), name


def test_slots_and_parking_may_be_others_than_the_runs(run):
    shape = measured.read_run(str(run), slots=8, parking=0).shape
    assert (shape.slots, shape.parking, shape.chunk) == (8, 0, base.get_config().rollout.decode_chunk)


def test_throughput_counts_the_batches_of_the_cycles(run):
    recording = measured.read_run(str(run))
    setting = Setting(recording.groups, recording.shape, TRUE, 3, False, 2)
    for way in WAYS:
        for staleness in (0, 1):
            found = simulate(setting, Cell(Latency("constant", (0.5,)), way, staleness, 2, 0))
            assert found.trajectories_per_s * found.cycle_seconds == pytest.approx(2 * 3 * 3)
            again = simulate(setting, Cell(Latency("constant", (0.5,)), way, staleness, 2, 0))
            assert found == again
    strong = simulate(
        dataclasses.replace(setting, strong=True), Cell(Latency("constant", (0.5,)), "per_process", 0, 4, 0)
    )
    assert strong.trajectories_per_s * strong.cycle_seconds == pytest.approx(3 * 3)  # One host has no group.


def test_the_table_tells_hosts_and_ways(run):
    cell = Cell(Latency("constant", (0.5,)), "per_process", 0, 2, 0)
    recording = measured.read_run(str(run))
    found = simulate(Setting(recording.groups, recording.shape, TRUE, 3, False, 1), cell)
    told = results.results([cell, dataclasses.replace(cell, seed=1)], [found, found])
    assert len(told) == 1 and told[0].figures["cycle_seconds"].mean == pytest.approx(found.cycle_seconds)
    (_, rates), (title, all_figures) = results.tables(told, strong=False)
    assert rates == [{"way": "per_process", "2": results.short(found.trajectories_per_s / 2)}]
    assert title == "tools constant(0.5): 2 hosts" and all_figures[0]["of the first"] == "1.00"


@pytest.fixture(scope="module")
def simulate_pod():
    """The program, imported once: its flags have values then."""
    module = program("simulate_pod")
    flags.FLAGS(["simulate_pod"])
    return module


def test_the_program_writes_tables_figures_and_a_picture(simulate_pod, run, tmp_path, capsys):
    saved = {"hosts": "3", "seeds": "2", "updates": "1", "jobs": "1", "out": str(tmp_path)}
    latencies = ["measured", "lognormal(1.0,0.8)"]
    with flagsaver.as_parsed(**saved, tool_latency=latencies):
        simulate_pod.main(["", str(run)])
    figures = json.loads((tmp_path / "pod.json").read_text())
    assert {r["hosts"] for r in figures["results"]} == {1, 2, 3} and len(figures["results"]) == 2 * 3 * 2 * 3
    assert figures["speeds"]["step"] == pytest.approx(TRUE.step)
    assert "lognormal(1,0.8): 3 hosts" in (tmp_path / "pod.md").read_text()
    assert "lognormal(1,0.8): 3 hosts" in capsys.readouterr().out
    assert matplotlib.image.imread(tmp_path / "pod.png").std() > 0.01


def test_the_check_shows_recorded_beside_simulated(simulate_pod, run, capsys):
    with flagsaver.as_parsed(check="true"):
        simulate_pod.main(["", str(run)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "decode iterations" in line]
    assert line.count("0.0%") == 3


def command(*arguments):
    call = [sys.executable, "-m", "experiments.simulate_pod", *map(str, arguments)]
    return subprocess.run(call, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def test_processes_find_what_one_finds(run, tmp_path):
    few = ["--hosts=2", "--seeds=1", "--updates=1", "--ways=per_process", "--staleness=0", "--scaling=strong"]
    for jobs in (1, 2):
        done = command(run, *few, f"--jobs={jobs}", f"--out={tmp_path}/{jobs}")
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "1" / "pod.json").read_bytes() == (tmp_path / "2" / "pod.json").read_bytes()


def test_no_hosts_are_one_message(run):
    done = command(run, "--hosts=0")
    assert done.returncode == 2 and "hosts" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"slots": "0"}, "slots is 0; it must be at least 1"),
        ({"parking": "-1"}, "parking is -1; it must not be negative"),
        ({"groups": "0"}, "--groups=0: a batch has at least one group"),
        ({"ways": "per_process,async"}, "--ways: 'async' is unknown; choose among per_process, lockstep, rounds"),
        ({"staleness": "2"}, "--staleness: '2' is unknown; choose among 0, 1"),
        ({"tool_latency": ["pareto(1)"]}, "unknown distribution; choose one of constant"),
        ({"step_seconds": "-1"}, "speed 'step' is -1.0"),
        ({"speeds_of": "nowhere"}, "nowhere: no run"),
    ],
)
def test_bad_flags_are_refused(simulate_pod, run, bad, message):
    with flagsaver.as_parsed(**bad), pytest.raises(UserError, match=message):
        simulate_pod.main(["", str(run)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lognormal(-1,0.8)", "median is -1; it must be finite and not negative"),
        ("lognormal(1,-0.8)", "sigma is -0.8"),
        ("lognormal(1)", r"write lognormal\(median,sigma\)"),
        ("constant(inf)", "seconds is inf"),
        ("uniform(2,1)", "low is above high"),
        ("gamma(1,2)", "unknown distribution"),
        ("constant(x)", "'x' are not numbers"),
        ("fast", "write `measured` or one of"),
    ],
)
def test_bad_latencies_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_latency(text)


def test_bad_speeds_and_percentiles_are_refused():
    with pytest.raises(UserError, match="'prefill_token' is nan"):
        Speeds(step=1.0, prefill_token=float("nan"))
    with pytest.raises(UserError, match="must take time"):
        Speeds(step=0.0)
    with pytest.raises(UserError, match="those of no distribution"):
        lognormal_of(0.2, 0.1)


def test_folders_that_are_no_recorded_run_are_refused(run, tmp_path):
    with pytest.raises(UserError, match="no config.json"):
        measured.read_run(str(tmp_path))
    config = base.get_config()
    write_config(tmp_path, config)
    with pytest.raises(UserError, match="has recorded no RL batch yet"):
        measured.read_run(str(tmp_path))
    write_jsonl(tmp_path / "trajectories" / "rl_000000.jsonl.gz", [])
    with pytest.raises(UserError, match="no trajectory with a response"):
        measured.read_run(str(tmp_path))
    write_jsonl(tmp_path / "trajectories" / "rl_000000.jsonl.gz", [recorded(0, 0, ([1, 2], [3], 0))])
    without_metrics = measured.read_run(str(tmp_path))
    with pytest.raises(UserError, match="give --step_seconds"):
        measured.measured_speeds(without_metrics)
    with pytest.raises(UserError, match="no time/tool"):
        measured.measured_latency(without_metrics)
    (tmp_path / "trajectories" / "rl_000000.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match="not a trajectory"):
        measured.read_run(str(tmp_path))
    several = dataclasses.replace(measured.read_run(str(run)), processes=2)
    with pytest.raises(UserError, match="rolled out on 2 processes"):
        measured.measured_speeds(several)
    config.rollout.fetch_lag = 1
    write_config(tmp_path, config)
    with pytest.raises(UserError, match="fetch_lag is 1"):
        measured.read_run(str(tmp_path))

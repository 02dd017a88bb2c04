"""The timeline of slots: what an engine records, the shares of its states, the picture."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from agentr1_jax.report import plot_timeline, state_shares, timeline
from agentr1_jax.rollout import engine
from agentr1_jax.rollout.engine import Timeline

TICKS = 24


def span(slot, state, start, end):
    return {"slot": slot, "state": state, "start": start, "end": end}


def ticks_of(spans, slots):
    """The state of every slot in every unit of time, decided one unit at a time."""
    grid = [["idle"] * TICKS for _ in range(slots)]
    for slot, tick in itertools.product(range(slots), range(TICKS)):
        here = {s["state"] for s in spans if s["slot"] == slot and s["start"] <= tick < s["end"]}
        grid[slot][tick] = next((state for state in ("decode", "prefill", "tool") if state in here), "idle")
    return grid


@st.composite
def timelines(draw):
    slots = draw(st.integers(1, 3))
    moment = st.integers(0, TICKS)
    states = st.sampled_from(["decode", "prefill", "tool"])
    drawn = draw(st.lists(st.tuples(st.integers(0, slots - 1), states, moment, moment), max_size=14))
    return slots, [span(slot, state, min(a, b), max(a, b)) for slot, state, a, b in drawn]


@settings(max_examples=300)
@given(timelines(), st.sampled_from([1.0, 0.25, 1024.0]))
def test_shares_agree_with_a_look_at_every_moment(drawn, unit):
    slots, spans = drawn
    last = max((s["end"] for s in spans), default=0)
    seen = [state for row in ticks_of(spans, slots) for state in row[:last]]
    scaled = [{**s, "start": s["start"] * unit, "end": s["end"] * unit} for s in spans]
    shares = state_shares(scaled, slots)
    assert list(shares) == ["decode", "prefill", "tool", "idle"]
    assert shares == pytest.approx({k: seen.count(k) / len(seen) if seen else float(k == "idle") for k in shares})


@settings(max_examples=100)
@given(timelines())
def test_the_curve_is_the_mean_number_of_slots_that_decode(drawn):
    slots, spans = drawn
    pieces = timeline._disjoint_pieces(spans, slots)
    decoding = pieces.state == 0
    counts = timeline.mean_busy_slots(pieces.start[decoding], pieces.end[decoding], np.arange(0.0, TICKS + 1, 3))
    per_tick = [sum(row[tick] == "decode" for row in ticks_of(spans, slots)) for tick in range(TICKS)]
    np.testing.assert_allclose(counts, np.reshape(per_tick, (-1, 3)).mean(axis=1), atol=1e-9)


@pytest.mark.parametrize(
    "bad",
    [
        span(2, "decode", 0, 1),
        span(-1, "decode", 0, 1),
        span(0, "asleep", 0, 1),
        span(0, "tool", 2, 1),
        span(0, "tool", -1, 1),
        span(0, "tool", 0, float("inf")),
        span(0, "tool", float("nan"), 1),
    ],
)
def test_a_span_that_does_not_fit_is_refused(bad):
    with pytest.raises(ValueError, match=r"does not fit a timeline of 2 slots"):
        state_shares([span(1, "decode", 0, 1), bad], 2)


def test_a_timeline_has_slots():
    with pytest.raises(ValueError, match="slots is 0"):
        state_shares([], 0)


def random_spans(count, slots, seed=0):
    """Spans one after another in every slot, some pauses between them."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential([0.2, 1.0], (slots, count // slots, 2)).reshape(slots, -1), axis=1)
    states = rng.choice(["decode", "decode", "prefill", "tool"], (slots, count // slots)).tolist()
    each = np.ndindex(slots, count // slots)
    return [span(i, states[i][j], times[i, 2 * j], times[i, 2 * j + 1]) for i, j in each]


def test_the_picture_shows_every_state_by_its_share(tmp_path):
    spans = random_spans(160, 16)
    plot_timeline(tmp_path / "new" / "timeline.png", spans, slots=16, title="a title")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["timeline.png"]
    pixels = imread(tmp_path / "new" / "timeline.png")[..., :3]
    shares = state_shares(spans, 16)
    # Mixed pixels where two states meet, and the small boxes of the legend, are what the tolerance is for.
    drawn = {k: int((abs(pixels - to_rgb(timeline.COLORS[k])).max(-1) < 0.01).sum()) for k in shares}
    drawn = {k: count / sum(drawn.values()) for k, count in drawn.items()}
    assert drawn == pytest.approx(shares, abs=0.02)


@pytest.mark.parametrize(("count", "slots"), [(0, 4), (3, 1), (20_000, 16), (20_000, 256)])
def test_timelines_of_all_sizes_are_drawn(tmp_path, count, slots):
    path = tmp_path / "timeline.png"
    plot_timeline(path, random_spans(count, slots), slots=slots)
    height, width, _ = imread(path).shape
    assert width == 1430
    assert 300 < height < 1100


def test_an_engine_records_spans_until_the_rollout_is_over(monkeypatch):
    clock = iter([10.0, 12.0, 13.0, 14.5])
    monkeypatch.setattr(engine.time, "perf_counter", lambda: next(clock))
    made = Timeline()
    made.add([0, 1], "decode", 10.5, 11.5)
    made.set_tool_slots({0, 1})
    made.set_tool_slots({1})
    made.set_tool_slots(set())
    assert made.spans == [
        span(0, "decode", 0.5, 1.5),
        span(1, "decode", 0.5, 1.5),
        span(0, "tool", 2.0, 3.0),
        span(1, "tool", 2.0, 4.5),
    ]
    assert state_shares(made.spans, 2) == pytest.approx(
        {"decode": 2 / 9, "prefill": 0.0, "tool": 3.5 / 9, "idle": 3.5 / 9}
    )

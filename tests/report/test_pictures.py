"""Pictures and tables of a run: the timeline of decode slots, the learning curve, tables."""

from __future__ import annotations

import csv
import io

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from rich.console import Console

from agentr1_jax.report import curves, plot_timeline, tables, timeline
from agentr1_jax.rollout import engine
from agentr1_jax.rollout.engine import Timeline


def span(slot, state, start, end):
    return {"slot": slot, "state": state, "start": start, "end": end}


def random_spans(count, slots):
    """Spans at random times, many of which overlap."""
    rng = np.random.default_rng(0)
    times = np.sort(rng.integers(0, timeline.COLUMNS + 1, (count, 2)), axis=1) / 1000
    states = rng.choice(["decode", "prefill", "tool"], count)
    return [span(int(rng.integers(slots)), str(s), *pair) for s, pair in zip(states, times.tolist(), strict=True)]


def test_each_moment_of_a_slot_has_its_first_state():
    spans = [*random_spans(30, 4), span(0, "tool", 0.0, timeline.COLUMNS / 1000)]
    grid, seconds = timeline.sample_states(spans, 4)
    assert seconds == timeline.COLUMNS / 1000
    for slot in range(4):
        for moment in range(0, timeline.COLUMNS, 17):
            t = (moment + 0.5) / 1000
            here = {s["state"] for s in spans if s["slot"] == slot and s["start"] <= t < s["end"]}
            expected = next((state for state in ("decode", "prefill", "tool") if state in here), "idle")
            assert timeline.STATES[grid[slot, moment]] == expected
    assert timeline.sample_states([], 2)[1] == 0


def test_the_picture_shows_every_state_by_its_share(tmp_path):
    spans = random_spans(60, 16)
    plot_timeline(tmp_path / "new" / "timeline.png", spans, slots=16, title="a title")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["timeline.png"]
    pixels = matplotlib.image.imread(tmp_path / "new" / "timeline.png")[..., :3]
    grid, _ = timeline.sample_states(spans, 16)
    # Mixed pixels where two states meet, and the small boxes of the legend, are what the tolerance is for.
    drawn = [(abs(pixels - to_rgb(timeline.COLORS[state])).max(-1) < 0.01).sum() for state in timeline.STATES]
    shares = [np.mean(grid == place) for place in range(len(timeline.STATES))]
    np.testing.assert_allclose(np.array(drawn) / sum(drawn), shares, atol=0.03)


@pytest.mark.parametrize(("count", "slots"), [(0, 4), (20_000, 256)])
def test_timelines_of_all_sizes_are_drawn(tmp_path, count, slots):
    path = tmp_path / "timeline.png"
    plot_timeline(path, random_spans(count, slots), slots=slots)
    height, width, _ = matplotlib.image.imread(path).shape
    assert width == 1430 and 300 < height < 1100


def test_an_engine_records_spans_until_the_rollout_is_over(monkeypatch):
    clock = iter([10.0, 12.0, 13.0, 14.5])
    monkeypatch.setattr(engine.time, "perf_counter", lambda: next(clock))
    recorder = Timeline()
    recorder.add([0, 1], "decode", 10.5, 11.5)
    recorder.set_tool_slots({0, 1})
    recorder.set_tool_slots({1})
    recorder.set_tool_slots(set())
    assert recorder.spans == [
        span(0, "decode", 0.5, 1.5),
        span(1, "decode", 0.5, 1.5),
        span(0, "tool", 2.0, 3.0),
        span(1, "tool", 2.0, 4.5),
    ]


def sample_records(updates=40):
    rng = np.random.default_rng(0)
    warm = [
        {"phase": "warm_start", "update": k, "learner/loss": 5 * np.exp(-k / 30) + 0.25 + 0.04 * rng.random()}
        for k in range(200)
    ]
    rl = [
        {"phase": "rl", "update": k, "rollout/em": k / updates, "rollout/reward": -k, "rollout/steps": 3.4}
        for k in range(updates)
    ]
    points = [(0, 0.31), (updates // 2, 0.86), (updates, 0.94)]
    return warm + rl + [{"phase": "eval", "update": k, "eval/em": em, "eval/f1": em + 0.02} for k, em in points]


def test_learning_curve_is_a_picture_even_from_scraps(tmp_path):
    scraps = [{}, {"phase": "rl"}, {"phase": "rl", "update": 1, "rollout/em": float("nan")}, {"update": 3}]
    control = [r for r in sample_records() if r["phase"] != "rl"]
    few = [r for r in control if r["update"] < 5 or r["phase"] == "eval"]
    sizes = []
    for name, records in (("scraps", scraps), ("control", control), ("few", few), ("all", sample_records(200))):
        curves.plot_learning_curve(tmp_path / f"{name}.png", records, title=name)
        picture = matplotlib.image.imread(tmp_path / f"{name}.png")
        assert picture.shape[0] == 520 and picture.std() > 0.01
        sizes.append(picture.shape[1])
    assert sizes[0] < sizes[1] == sizes[2] < sizes[3]


def test_series_has_no_seam_where_a_run_was_resumed():
    records = [{"phase": "rl", "update": u, "rollout/em": v} for u, v in [(1, 0.1), (2, 0.9), (2, 0.2), (3, 0.3)]]
    records += [{"phase": "eval", "update": 9, "rollout/em": 1.0}, {"phase": "rl", "update": 4, "rollout/em": None}]
    updates, values = curves.series(records, "rl", "rollout/em")
    assert updates.tolist() == [1, 2, 3] and values.tolist() == [0.1, 0.2, 0.3]


def test_smoothing_is_a_mean_over_what_is_there():
    np.testing.assert_allclose(curves.smooth(np.array([1.0, 2.0, 6.0, 3.0]), 3), [1.5, 3.0, 11 / 3, 4.5])


def test_values_are_written_for_people():
    values = (
        None,
        True,
        1234567,
        np.int64(3),
        0.9384,
        np.float32(0.5),
        5312.44,
        2.5e-5,
        float("nan"),
        [1, 0.5],
        "[b]x",
    )
    texts = ["-", "yes", "1,234,567", "3", "0.938", "0.500", "5,312.4", "2.50e-05", "nan", "1, 0.500", "[b]x"]
    assert [tables.format_value(value) for value in values] == texts


def test_summary_table_shows_nested_names_and_no_markup():
    table = tables.summary_table({"em": {"bridge": 0.5}, "note": "[red]x[/red]"}, title="run [b]1")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert all(part in text for part in ("em.bridge", "0.500", "[red]x[/red]", "run [b]1"))


def test_markdown_table_escapes_cells():
    text = tables.markdown_table([{"seed": 0, "em": 0.91}, {"seed": 1, "note": "a|b\nc"}])
    assert text.splitlines() == [
        "| seed | em | note |",
        "| --- | --- | --- |",
        "| 0 | 0.910 | - |",
        "| 1 | - | a\\|b c |",
    ]


def test_csv_runs_no_formula(tmp_path):
    tables.write_csv(tmp_path / "x.csv", [{"uid": "=cmd()", "x": -1.5}, {"uid": "a,\n'b\"", "x": None}])
    with open(tmp_path / "x.csv", newline="") as lines:
        assert list(csv.reader(lines)) == [["uid", "x"], ["'=cmd()", "-1.5"], ["a,\n'b\"", ""]]
    tables.write_csv(tmp_path / "x.csv", [])
    assert (tmp_path / "x.csv").read_text() == "\n"

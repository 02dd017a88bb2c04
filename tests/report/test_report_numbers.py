"""The report room: the learning curve and the tables."""

from __future__ import annotations

import io

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from agentr1_jax.report import curves, tables


def sample_records(updates: int = 40) -> list[dict]:
    rng = np.random.default_rng(0)
    warm = [
        {"phase": "warm_start", "update": k, "learner/loss": 5 * np.exp(-k / 30) + 0.25 + 0.04 * rng.random()}
        for k in range(200)
    ]
    rl = []
    for k in range(updates):
        em = min(1.0, 0.93 - 0.65 * np.exp(-k / 9) + 0.03 * rng.normal())
        rl.append(
            {"phase": "rl", "update": k, "rollout/em": em, "rollout/reward_mean": 1.3 * em, "rollout/steps": 3.4 - em}
        )
    points = [(0, 0.31), (updates // 2, 0.86), (updates, 0.94)]
    evals = [{"phase": "eval", "update": k, "eval/em": em, "eval/f1": em + 0.02} for k, em in points]
    return warm + rl + evals


def test_learning_curve_is_a_picture_even_from_scraps(tmp_path):
    scraps = [{}, {"phase": "rl"}, {"phase": "rl", "update": 1, "rollout/em": float("nan")}, {"update": 3}]
    control = [r for r in sample_records() if r["phase"] != "rl"]
    sizes = []
    for name, records in (("none", []), ("scraps", scraps), ("control", control), ("all", sample_records(200))):
        curves.plot_learning_curve(tmp_path / f"{name}.png", records, title=name)
        picture = matplotlib.image.imread(tmp_path / f"{name}.png")
        assert picture.shape[0] == 520
        assert picture.std() > 0.01
        sizes.append(picture.shape[1])
    assert sizes[0] == sizes[1] < sizes[2] < sizes[3]


def test_series_has_no_seam_where_a_run_was_resumed():
    records = [{"phase": "rl", "update": u, "rollout/em": v} for u, v in [(1, 0.1), (2, 0.9), (2, 0.2), (3, 0.3)]]
    records += [{"phase": "eval", "update": 9, "rollout/em": 1.0}, {"phase": "rl", "update": 4, "rollout/em": None}]
    updates, values = curves.series(records, "rl", "rollout/em")
    assert updates.tolist() == [1, 2, 3]
    assert values.tolist() == [0.1, 0.2, 0.3]


def test_smoothing_is_a_mean_over_what_is_there():
    values = np.array([1.0, 2.0, 6.0, 3.0])
    np.testing.assert_allclose(curves.smooth(values, 3), [1.5, 3.0, 11 / 3, 4.5])
    np.testing.assert_allclose(curves.smooth(np.full(30, 7.0), 5), 7.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (1234567, "1,234,567"),
        (np.int64(3), "3"),
        (0.9384, "0.938"),
        (np.float32(0.5), "0.500"),
        (5312.44, "5,312.4"),
        (2.5e-5, "2.50e-05"),
        (float("nan"), "nan"),
        ([1, 0.5], "1, 0.500"),
        ("[bold]x", "[bold]x"),
    ],
)
def test_format_value(value, text):
    assert tables.format_value(value) == text


def test_summary_table_shows_nested_names_and_no_markup():
    table = tables.summary_table({"em": {"bridge": 0.5}, "note": "[red]x[/red]"}, title="run [b]1")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert "em.bridge" in text
    assert "0.500" in text
    assert "[red]x[/red]" in text
    assert "run [b]1" in text


def test_markdown_table_escapes_cells():
    text = tables.markdown_table([{"seed": 0, "em": 0.91}, {"seed": 1, "note": "a|b\nc"}])
    assert text.splitlines() == [
        "| seed | em | note |",
        "| --- | --- | --- |",
        "| 0 | 0.910 | - |",
        "| 1 | - | a\\|b c |",
    ]

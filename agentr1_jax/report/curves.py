"""The learning curve of a run as one picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from agentr1_jax import files
from agentr1_jax.report.drawing import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, new_figure, save, save_message, tidy

SMOOTH_FROM = 25
"""Curves of so many points are drawn pale, with their moving average over them."""


class Panel(NamedTuple):
    """One pair of axes; a curve is (phase, key of the records, colour, label)."""

    title: str
    x_label: str
    curves: Sequence[tuple[str, str, str, str]]


LOSS = Panel("Warm start: loss (nats per token)", "warm-start update", [("warm_start", "learner/loss", ORANGE, "")])
SCORES = Panel(
    "Exact match on questions",
    "RL update",
    [
        ("rl", "rollout/em", BLUE, "sampled in training"),
        ("eval", "eval/em", GREEN, "evaluation, EM"),
        ("eval", "eval/f1", PURPLE, "evaluation, F1"),
    ],
)
REWARD = Panel("Reward per trajectory", "", [("rl", "rollout/reward", BLUE, "")])
STEPS = Panel("Steps per trajectory", "RL update", [("rl", "rollout/steps", INK, "")])
COLUMNS = ([LOSS], [SCORES], [REWARD, STEPS])


def series(records: Iterable[Mapping[str, Any]], phase: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the finite values of `key` in records of `phase`: (updates int64 [N] ascending, values float64 [N]).

    A resumed run may have logged an update twice; the later record is the one that counts, so the curve has no seam.
    """
    values: dict[int, float] = {}
    for record in records:
        if record.get("phase") == phase and record.get(key) is not None and record.get("update") is not None:
            values[int(record["update"])] = float(record[key])
    finite = sorted((update, value) for update, value in values.items() if math.isfinite(value))
    return np.array([u for u, _ in finite], np.int64), np.array([v for _, v in finite], np.float64)


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving average over `width` (odd) points, over fewer at the ends: [N] -> [N]."""
    ones = np.ones(width)
    total = np.convolve(np.pad(values, width // 2), ones, "valid")
    return total / np.convolve(np.pad(np.ones(len(values)), width // 2), ones, "valid")


def plot_learning_curve(
    path: files.PathLike, records: Iterable[Mapping[str, Any]], *, title: str | None = None
) -> None:
    """Draw the run's learning curve as a PNG.

    Args:
      path: where the picture goes.
      records: lines of `metrics.jsonl`. Missing keys leave out their curve, non-finite values their point, and panels
        without a curve are left out; `update` of an evaluation counts RL updates.
      title: a heading over the whole picture.
    """
    records = list(records)
    columns = [[panel for panel in column if _curves(panel, records)] for column in COLUMNS]
    columns = [column for column in columns if column]
    widths = [1.35 if SCORES in column else 1.0 for column in columns]
    figure = new_figure(max(4.0 * sum(widths), 6.0), 4.0, title)
    if not columns:
        return save_message(figure, path, "no metrics recorded yet")
    grid = figure.add_gridspec(1, len(columns), width_ratios=widths)
    for place, column in enumerate(columns):
        rows = grid[place].subgridspec(len(column), 1)
        for row, panel in enumerate(column):
            _draw_panel(figure.add_subplot(rows[row]), panel, records)
    save(figure, path)


def _curves(panel: Panel, records: Sequence[Mapping[str, Any]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Points of the curves that have any."""
    return [points for phase, key, *_ in panel.curves if len((points := series(records, phase, key))[0])]


def _draw_panel(axes: Axes, panel: Panel, records: Sequence[Mapping[str, Any]]) -> None:
    for phase, key, color, label in panel.curves:
        x, y = series(records, phase, key)
        if len(x):
            (_draw_evaluations if phase == "eval" else _draw_line)(axes, x, y, color, label)
    values = np.concatenate([y for _, y in _curves(panel, records)])
    if panel is SCORES:
        axes.set_ylim(0, 1.02)
        axes.margins(x=0.09)
        axes.legend(loc="lower right", fontsize=9)
    elif panel is LOSS and values.min() > 0 and values.max() > 10 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif values.min() >= 0:
        axes.set_ylim(0, 1.08 * max(values.max(), 1e-9))
    else:
        axes.axhline(0, color=FAINT, lw=1, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    tidy(axes, title=panel.title, x_label=panel.x_label)


def _draw_line(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str) -> None:
    if len(x) < SMOOTH_FROM:
        axes.plot(x, y, color=color, lw=1.8, marker="o", ms=3, label=label)
        return
    axes.plot(x, y, color=color, lw=0.8, alpha=0.3)
    axes.plot(x, smooth(y, 2 * (len(y) // 50) + 3), color=color, lw=2, label=label)


def _draw_evaluations(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str) -> None:
    """Draw evaluations as diamonds; the first and the last exact match bear their number."""
    diamonds: dict[str, Any] = {"marker": "D", "ms": 6, "mec": "white", "mew": 1, "zorder": 5, "clip_on": False}
    axes.plot(x, y, color=color, lw=1, ls=":", label=label, **diamonds)
    for i in sorted({0, len(x) - 1}) if label.endswith("EM") else ():
        place = (x[i], y[i])
        axes.annotate(f"{y[i]:.2f}", place, (7, -11), textcoords="offset points", color=color, weight="bold")

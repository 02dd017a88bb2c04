"""The learning curve of a run as one picture: warm-start loss, exact match, reward and steps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from agentr1_jax.report.drawing import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, SOFT, new_figure, save, tidy

SMOOTH_FROM = 25

Series = tuple[np.ndarray, np.ndarray]


class Curve(NamedTuple):
    """One line of a panel: (updates, values), how it looks, and whether its points are evaluations."""

    points: Series
    color: str
    label: str
    evaluation: bool


class Panel(NamedTuple):
    """One pair of axes; `axis` is how the vertical one is scaled."""

    title: str
    x_name: str
    axis: Literal["loss", "score", "level"]
    curves: list[Curve]


def series(records: Iterable[Mapping[str, Any]], phase: str, key: str) -> Series:
    """The finite values of `key` in records of `phase`, by update.

    A resumed run may have logged an update twice; the later record is the one that counts, so the curve has no seam.

    Returns:
      (updates int64 [N] ascending, values float64 [N]); N may be 0.
    """
    values: dict[int, float] = {}
    for record in records:
        if record.get("phase") != phase or record.get(key) is None or record.get("update") is None:
            continue
        values[int(record["update"])] = float(record[key])
    finite = sorted((update, value) for update, value in values.items() if math.isfinite(value))
    return np.array([u for u, _ in finite], np.int64), np.array([v for _, v in finite], np.float64)


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving average over `width` (odd) points, over fewer at the ends: [N] -> [N]."""
    ones = np.ones(width)
    total = np.convolve(np.pad(values, width // 2), ones, "valid")
    return total / np.convolve(np.pad(np.ones(len(values)), width // 2), ones, "valid")


def _line(axes: Axes, curve: Curve) -> None:
    """A line; where there are many points, the points pale and their moving average over them."""
    x, y = curve.points
    if len(x) < SMOOTH_FROM:
        axes.plot(x, y, color=curve.color, lw=1.8, marker="o", ms=3, label=curve.label)
        return
    axes.plot(x, y, color=curve.color, lw=0.8, alpha=0.3)
    axes.plot(x, smooth(y, 2 * (len(y) // 50) + 3), color=curve.color, lw=2, label=curve.label)


def _evaluations(axes: Axes, curve: Curve) -> None:
    """Evaluation points as diamonds; the first and the last exact match bear their number."""
    x, y = curve.points
    diamonds: dict[str, Any] = {"marker": "D", "ms": 6, "mec": "white", "mew": 1, "zorder": 5, "clip_on": False}
    axes.plot(x, y, color=curve.color, lw=1, ls=":", label=curve.label, **diamonds)
    for i in sorted({0, len(x) - 1}) if curve.label.endswith("EM") else ():
        axes.annotate(
            f"{y[i]:.2f}", (x[i], y[i]), (7, -11), textcoords="offset points", color=curve.color, weight="bold"
        )


def _panels(records: Sequence[Mapping[str, Any]]) -> list[list[Panel]]:
    """Columns of panels; curves without data, panels without curves and columns without panels are left out."""

    def curve(phase: str, key: str, color: str, label: str = "") -> Curve:
        return Curve(series(records, phase, key), color, label, evaluation=phase == "eval")

    exact_match = [
        curve("rl", "rollout/em", BLUE, "sampled in training"),
        curve("eval", "eval/em", GREEN, "evaluation, EM"),
        curve("eval", "eval/f1", PURPLE, "evaluation, F1"),
    ]
    loss, update = [curve("warm_start", "learner/loss", ORANGE)], "RL update"
    columns = [
        [Panel("Warm start: loss (nats per token)", "warm-start update", "loss", loss)],
        [Panel("Exact match on questions", update, "score", exact_match)],
        [
            Panel("Reward per trajectory", update, "level", [curve("rl", "rollout/reward_mean", BLUE)]),
            Panel("Steps per trajectory", update, "level", [curve("rl", "rollout/steps", INK)]),
        ],
    ]
    drawn = [[p._replace(curves=[c for c in p.curves if len(c.points[0])]) for p in column] for column in columns]
    return [column for column in ([panel for panel in column if panel.curves] for column in drawn) if column]


def _scale(axes: Axes, axis: str, values: np.ndarray) -> None:
    """Scores span 0 to 1; a loss that falls a lot is logarithmic; all else starts from 0 unless it is negative."""
    if axis == "score":
        axes.set_ylim(0, 1.02)
        axes.margins(x=0.09)
        axes.legend(loc="lower right", fontsize=9)
    elif axis == "loss" and values.min() > 0 and values.max() > 10 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif values.min() >= 0:
        axes.set_ylim(0, 1.08 * max(values.max(), 1e-9))
    elif values.max() > 0:
        axes.axhline(0, color=FAINT, lw=1, zorder=0)


def _draw(axes: Axes, panel: Panel, x_label: bool) -> None:
    for curve in panel.curves:
        (_evaluations if curve.evaluation else _line)(axes, curve)
    _scale(axes, panel.axis, np.concatenate([curve.points[1] for curve in panel.curves]))
    axes.set_title(panel.title, loc="left", fontsize=10.5, color=INK, weight="bold", pad=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.grid(axis="y", color="#e6e8ec", lw=0.8)
    axes.set_axisbelow(True)
    tidy(axes)
    if x_label:
        axes.set_xlabel(panel.x_name, color=SOFT, fontsize=9.5)


def plot_learning_curve(
    path: str | os.PathLike[str], records: Iterable[Mapping[str, Any]], *, title: str | None = None
) -> None:
    """Draw the run's learning curve as a PNG, renamed into place.

    Args:
      path: where the picture goes.
      records: lines of `metrics.jsonl`: `phase` (`warm_start | rl | eval`), `update`, and any of `learner/loss`,
        `rollout/reward_mean`, `rollout/em`, `rollout/steps`, `eval/em`, `eval/f1`. `update` of an evaluation counts RL
        updates. Missing keys leave out their curve, non-finite values their point.
      title: a heading over the whole picture.
    """
    columns = _panels(list(records))
    widths = [1.35 if column[0].axis == "score" else 1.0 for column in columns]
    figure = new_figure(max(4.0 * sum(widths), 6.0), 4.0, title)
    if columns:
        grid = figure.add_gridspec(1, len(columns), width_ratios=widths)
        for place, column in enumerate(columns):
            inner = grid[place].subgridspec(len(column), 1)
            for row, panel in enumerate(column):
                _draw(figure.add_subplot(inner[row]), panel, x_label=row == len(column) - 1)
    else:
        figure.text(0.5, 0.5, "no metrics recorded yet", ha="center", va="center", color=SOFT)
    save(figure, path)

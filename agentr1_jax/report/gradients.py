"""Errors of policy-gradient estimators as one picture: the bias that no learning rate mends against the noise."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from agentr1_jax.report.drawing import BLUE, GREEN, INK, ORANGE, SOFT, new_figure, save, tidy

COLORS = {"unbiased": GREEN, "scaled": BLUE, "biased": ORANGE}
LABELS = {"unbiased": "unbiased", "scaled": "right direction, wrong length", "biased": "biased direction"}
LINEAR_BELOW = 0.02
MOST_BIAS, MOST_NOISE = 1e2, 1e6
KEY_ROWS, KEY_WIDTH, PANEL_WIDTH = 40, 3.4, 4.4
Rows = Sequence[Mapping[str, Any]]


def plot_gradients(
    path: str | os.PathLike[str], panels: Mapping[str, Rows], *, title: str | None = None, name: str = "scheme"
) -> None:
    """Draw a panel for each process and a numbered point for each estimator, as a PNG renamed into place.

    Args:
      path: where the picture goes.
      panels: by title the rows of a panel: `verdict` (`unbiased | scaled | biased`); `off`, `off_low`, `off_high`: bias
        of the direction as a share of the expected length; `noise`: variance over squared expected length; and the
        estimator's name. A row that points nowhere (bias or noise beyond all measure) is left out.
      title: a heading over the whole picture.
      name: key of the estimator's name.
    """
    names = list(dict.fromkeys(row[name] for rows in panels.values() for row in rows))
    number = {name: i + 1 for i, name in enumerate(names)}
    widths = [PANEL_WIDTH] * len(panels) + [KEY_WIDTH] * -(-len(names) // KEY_ROWS)
    figure = new_figure(max(sum(widths), 6.0), 7.2, title)
    if not names:
        figure.text(0.5, 0.5, "no estimates", ha="center", va="center", color=SOFT)
        return save(figure, path)
    grid = figure.add_gridspec(1, len(widths), width_ratios=widths)
    for place, (heading, rows) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[place])
        _draw(axes, [(number[row[name]], row) for row in rows])
        axes.set_title(heading, loc="left", fontsize=10.5, color=INK, weight="bold", pad=9)
        if not place:
            axes.set_ylabel("noise: tr Cov ĝ / ‖c g‖²", color=SOFT, fontsize=9.5)
    for column in range(len(widths) - len(panels)):
        key = figure.add_subplot(grid[len(panels) + column])
        key.set_axis_off()
        shown = names[column * KEY_ROWS :][:KEY_ROWS]
        text = "\n".join(f"{number[name]:>2}  {name}" for name in shown)
        key.text(0, 1, text, va="top", fontsize=7, color=INK, family="monospace", linespacing=1.35)
    handles = [Line2D([], [], color=COLORS[v], marker="o", ms=5, ls="", label=LABELS[v]) for v in COLORS]
    key.legend(handles=handles, fontsize=8, loc="lower left", frameon=False, borderaxespad=0)
    save(figure, path)


def _draw(axes: Axes, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Points with their intervals; those that lie on each other share one label."""
    rows = [(number, r) for number, r in rows if r["off"] <= MOST_BIAS and 0 < r["noise"] <= MOST_NOISE]
    for _, row in rows:
        color, y = COLORS[row["verdict"]], row["noise"]
        axes.plot([row["off_low"], row["off_high"]], [y, y], color=color, lw=0.8, alpha=0.4)
        axes.plot([row["off"]], [y], color=color, marker="o", ms=4.5, mec="white", mew=0.5, ls="")
    for (x, y), numbers in clusters([(row["off"], row["noise"], number) for number, row in rows]).items():
        label = ",".join(map(str, numbers))
        axes.annotate(label, (x, y), (4, 2.5), textcoords="offset points", fontsize=7, color=INK)
    axes.set_xscale("symlog", linthresh=LINEAR_BELOW)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.08, y=0.1)
    axes.set_xlim(left=-LINEAR_BELOW / 8)
    axes.set_xlabel("bias of direction: ‖E ĝ − c g‖ / ‖c g‖", color=SOFT, fontsize=9.5)
    axes.grid(color="#e6e8ec", lw=0.8)
    axes.set_axisbelow(True)
    tidy(axes)


def clusters(points: Sequence[tuple[float, float, int]]) -> dict[tuple[float, float], list[int]]:
    """Numbers of points (x, y, number) that lie within a label's height, by the place of the first of each."""
    heights = [math.log10(y) for _, y, _ in points]
    span = max(max(heights) - min(heights), 0.1) if points else 1.0
    out: dict[tuple[float, float], list[int]] = {}
    for x, y, number in points:
        near = (
            at
            for at in out
            if abs(math.log10(y / at[1])) < span / 60 and abs(_along_axis(x) - _along_axis(at[0])) < 0.25
        )
        out.setdefault(next(near, (x, y)), []).append(number)
    return out


def _along_axis(x: float) -> float:
    """Return the position of x on a symlog axis, in decades."""
    return x / LINEAR_BELOW if x < LINEAR_BELOW else 1 + math.log10(x / LINEAR_BELOW)

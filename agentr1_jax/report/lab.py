"""The page of the credit lab: pictures and tables of many trainings by many schemes on many processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D

from agentr1_jax.report.drawing import BLUE, FAINT, GREEN, INK, ORANGE, SOFT, new_figure, save, tidy
from agentr1_jax.report.page import write_page
from agentr1_jax.report.statistics import interquartile_mean, stratified_bootstrap, t_interval

SHADES = LinearSegmentedColormap.from_list("shades", ["#ffffff", "#bcd3f7", BLUE])
SIDES = LinearSegmentedColormap.from_list("sides", [ORANGE, "#ffffff", BLUE])
COLUMNS, PANEL = 3, (4.3, 2.9)


class Scores(NamedTuple):
    """Areas under the curves of all trainings; NaN where a scheme was not tried on a process.

    Attributes:
      schemes, processes: their names.
      areas: of each training.
    """

    schemes: Sequence[str]
    processes: Sequence[str]
    areas: Float[np.ndarray, "schemes processes seeds"]

    def order(self) -> list[tuple[str, float, float, float]]:
        """Return schemes with the interquartile mean over seeds and processes and its 95 % interval, best first.

        The interval is that of a bootstrap by process. A scheme that was not tried on all processes has NaN, and is
        last, by its mean area.
        """
        of_scheme: dict[str, tuple[float, float, float]] = {}
        mean = dict(zip(self.schemes, np.nanmean(self.areas, (1, 2)), strict=True))
        pooled = functools.partial(interquartile_mean, axis=(-2, -1))
        for name, own in zip(self.schemes, self.areas, strict=True):
            of_scheme[name] = np.nan, np.nan, np.nan
            if np.isfinite(own).all():
                low, high = stratified_bootstrap(own, pooled, draws=1000)
                of_scheme[name] = float(pooled(own)), float(low), float(high)
        ranked = sorted(of_scheme, key=lambda name: (np.isnan(of_scheme[name][0]), -mean[name]))
        ranked.sort(key=lambda name: -np.nan_to_num(of_scheme[name][0], nan=-np.inf))
        return [(name, *of_scheme[name]) for name in ranked]


def plot_areas(path: str | os.PathLike[str], scores: Scores) -> None:
    """Draw a table of mean areas, schemes by processes, best scheme first, with the interquartile means before it."""
    order = scores.order()
    mean = scores.areas.mean(-1)[[list(scores.schemes).index(name) for name, *_ in order]]
    figure = new_figure(5.2 + 0.95 * len(scores.processes), 1.6 + 0.31 * len(order))
    left, right = figure.subplots(1, 2, width_ratios=[2.2, 0.95 * len(scores.processes)])
    for i, (_, middle, low, high) in enumerate(order):
        left.plot([low, high], [i, i], color=SOFT, lw=1.2)
        left.plot([middle], [i], color=BLUE, marker="o", ms=5, ls="")
    left.set_yticks(range(len(order)), [name for name, *_ in order])
    left.set_ylim(len(order) - 0.5, -0.5)
    tidy(left, title="IQM", x_label="area under the curve", grid="x")
    _draw_cells(right, mean, [""] * len(order), scores.processes, SHADES, (0, 1))
    save(figure, path)


def _draw_cells(
    axes: Axes,
    values: Float[np.ndarray, "rows columns"],
    rows: Sequence[str],
    columns: Sequence[str],
    colors: LinearSegmentedColormap,
    limits: tuple[float, float],
) -> None:
    """Draw numbers in shaded cells."""
    axes.imshow(np.ma.masked_invalid(values), cmap=colors, vmin=limits[0], vmax=limits[1], aspect="auto")
    for (i, j), x in np.ndenumerate(values):
        if np.isfinite(x):
            dark = abs(x - np.mean(limits)) > 0.35 * (limits[1] - limits[0]) and x > np.mean(limits)
            text = f"{x:.2f}".replace("0.", ".") if limits[1] <= 1 else f"{x:.0f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=7.5, color="white" if dark else INK)
    axes.set_xticks(range(len(columns)), columns, rotation=40, ha="left", fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, colors=SOFT)
    axes.spines[:].set_visible(False)


def plot_curves(
    path: str | os.PathLike[str],
    curves: Mapping[str, Mapping[str, Float[np.ndarray, "seeds updates"]]],
    trajectories: int,
) -> None:
    """Draw a panel for each process, with a learning curve for each scheme.

    Args:
      path: where the picture goes.
      curves: process -> scheme -> share of what can be gained.
      trajectories: of a batch.
    """
    lines = -(-len(curves) // COLUMNS)
    figure = new_figure(PANEL[0] * COLUMNS, PANEL[1] * lines)
    panels = figure.subplots(lines, COLUMNS, squeeze=False)
    for axes in panels.ravel()[len(curves) :]:
        axes.set_axis_off()
    for axes, (process, of_process) in zip(panels.ravel(), curves.items(), strict=False):
        ranked = sorted(of_process, key=lambda name: -of_process[name].mean())
        named = {ranked[0]: BLUE, ranked[-1]: ORANGE, **({"grpo": GREEN} if "grpo" in ranked[1:-1] else {})}
        for name in sorted(of_process, key=lambda name: name in named):
            mean, low, high = map(np.atleast_1d, t_interval(of_process[name], axis=0))
            x = trajectories * np.arange(len(mean))
            axes.plot(x, mean, color=named.get(name, "#c4c9d1"), lw=1.8 if name in named else 0.8)
            if name in named:
                axes.fill_between(x, low, high, color=named[name], alpha=0.18, lw=0)
        tidy(axes, title=process, x_label="trajectories")
        axes.set_ylim(min(-0.05, axes.get_ylim()[0]), 1.05)
        handles = [Line2D([], [], color=color, lw=1.8, label=name) for name, color in named.items()]
        axes.legend(handles=handles, loc="lower right", fontsize=8, framealpha=0.85, edgecolor="none")
    save(figure, path)


def plot_pairs(
    path: str | os.PathLike[str],
    names: Sequence[str],
    improvement: Float[np.ndarray, "schemes schemes"],
    different: Float[np.ndarray, "schemes schemes"],
) -> None:
    """Draw the probabilities of improvement, and on how many processes two schemes differ; NaN is left blank."""
    size = 2.0 + 0.36 * len(names)
    figure = new_figure(2 * size, size)
    left, right = figure.subplots(1, 2)
    _draw_cells(left, improvement, names, names, SIDES, (0, 1))
    most = max(float(np.nanmax(different, initial=1)), 1.01)
    _draw_cells(right, different, names, names, SHADES, (0, most))
    save(figure, path)


def plot_alignment(path: str | os.PathLike[str], rows: Sequence[tuple[str, str, float, float]]) -> None:
    """Draw the area under the curve against the alignment with A^π: a panel for each process, a point for each scheme.

    Args:
      path: where the picture goes.
      rows: process, scheme, alignment, area.
    """
    processes = list(dict.fromkeys(process for process, *_ in rows))
    lines = -(-len(processes) // COLUMNS)
    figure = new_figure(PANEL[0] * COLUMNS, PANEL[1] * lines)
    panels = figure.subplots(lines, COLUMNS, squeeze=False)
    for axes in panels.ravel()[len(processes) :]:
        axes.set_axis_off()
    for axes, process in zip(panels.ravel(), processes, strict=False):
        points = [(scheme, x, y) for own, scheme, x, y in rows if own == process and np.isfinite(x)]
        axes.plot([x for _, x, _ in points], [y for *_, y in points], color=BLUE, marker="o", ms=4, ls="")
        _name_points(axes, points)
        tidy(axes, title=process, x_label="rank correlation with A of the policy", grid="both")
    save(figure, path)


def plot_regrets(path: str | os.PathLike[str], cells: Mapping[str, Mapping[str, Float[np.ndarray, "seeds"]]]) -> None:
    """Draw the regret of every training: a panel for each cell, a line for each scheme, its mean and 95 % interval.

    Args:
      path: where the picture goes.
      cells: title of the cell -> scheme -> regrets; the same schemes in all.
    """
    names = list(next(iter(cells.values())))
    figure = new_figure(1.6 + 3.1 * len(cells), 0.9 + 0.42 * len(names))
    panels = figure.subplots(1, len(cells), sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (title, of_scheme) in zip(panels, cells.items(), strict=True):
        for i, name in enumerate(names):
            mean, low, high = t_interval(of_scheme[name])
            axes.plot(of_scheme[name], np.full(len(of_scheme[name]), i), color=FAINT, marker="o", ms=4, ls="")
            axes.plot([low, high], [i, i], color=BLUE, lw=1.6)
            axes.plot([mean], [i], color=BLUE, marker="o", ms=6, ls="")
        tidy(axes, title=title, x_label="regret", grid="x")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    panels[0].set_xlim(left=0)
    save(figure, path)


def _name_points(axes: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Write names beside points; those that lie together share a line."""
    spread = [max(np.ptp([point[i] for point in points]), 1e-9) if points else 1.0 for i in (1, 2)]
    together: list[list[tuple[str, float, float]]] = []
    for point in sorted(points, key=lambda point: point[2]):
        near = [
            group
            for group in together
            if abs(group[0][1] - point[1]) < 0.12 * spread[0] and abs(group[-1][2] - point[2]) < 0.05 * spread[1]
        ]
        (near[0] if near else together).append(point if near else [point])  # type: ignore[arg-type]
    for group in together:
        names = ", ".join(name for name, *_ in group[:2]) + (f" + {len(group) - 2}" if len(group) > 2 else "")
        place = group[len(group) // 2][1:]
        axes.annotate(names, place, fontsize=6, color=SOFT, xytext=(4, 2), textcoords="offset points")


def write_lab_page(path: str | os.PathLike[str], pictures: Mapping[str, str], **values: Any) -> None:
    """Write the page, with its pictures inlined.

    Args:
      path: where it goes.
      pictures: `areas`, `curves`, `pairs`, `alignment` -> PNG.
      **values: `title`, `finding`, `facts`, `notes`, `checklist`, `by_process`, `rows`, as the template names them.
    """
    write_page(path, "lab.html", pictures=pictures, **values)

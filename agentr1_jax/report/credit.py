"""Pictures of how credit schemes differ on the same steps, and the steps that the page `credit.html` shows."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from agentr1_jax.report.drawing import BLUE, FAINT, GREEN, INK, ORANGE, SOFT, WASH, new_figure, save, tidy

OPPOSED_TO_ALIKE = LinearSegmentedColormap.from_list("alike", ["#c2410c", "#f6b37a", "#ffffff", "#9cc0f5", "#1d4fb8"])
POINTS_DRAWN = 1500
"""Most points of a panel; more would hide each other."""
CLIPPED = 4.0
"""Scaled advantages beyond it are drawn at the edge."""


class StepView(NamedTuple):
    """One step of the page.

    Attributes:
      title: heading of the step.
      uid: name of its trajectory.
      facts: short texts about the step.
      question: question of the trajectory.
      prompt, response, observation: texts.
      advantages: scheme -> (advantage, advantage over the scheme's root mean square).
    """

    title: str
    uid: str
    facts: Sequence[str]
    question: str
    prompt: str
    response: str
    observation: str
    advantages: Mapping[str, tuple[float, float]]


def plot_heatmaps(
    path: str | os.PathLike[str],
    schemes: Sequence[str],
    matrices: Sequence[tuple[str, Float[np.ndarray, "schemes schemes"]]],
) -> None:
    """Draw one matrix of similarities in [-1, 1] beside the other, as a PNG.

    Args:
      path: PNG file to write.
      schemes: names of rows and columns.
      matrices: (title, matrix); NaN is drawn as a dash.
    """
    size = max(2.6, 0.47 * len(schemes))
    margin = 0.085 * max(map(len, schemes)) + 0.2
    figure = new_figure(len(matrices) * (size + 0.3) + margin + 1.0, size + margin + 0.6, None)
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for place, (axes, (title, matrix)) in enumerate(zip(panels, matrices, strict=True)):
        image = _heatmap(axes, schemes, matrix, title, names=place == 0)
    bar = figure.colorbar(image, ax=list(panels), shrink=0.7, aspect=28, pad=0.015, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=SOFT, labelsize=8, length=0)
    save(figure, path)


def _heatmap(axes: Axes, schemes: Sequence[str], matrix: np.ndarray, title: str, *, names: bool) -> AxesImage:
    image = axes.imshow(matrix, vmin=-1, vmax=1, cmap=OPPOSED_TO_ALIKE)
    for (row, column), value in np.ndenumerate(matrix):
        text = "–" if math.isnan(value) else f"{value:.2f}".replace("0.", ".").replace("1.00", "1")
        color = "white" if abs(value) > 0.6 else INK
        axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color=color)
    ticks = np.arange(len(schemes))
    axes.set_xticks(ticks, schemes, rotation=90, fontsize=8.5, color=INK)
    axes.set_yticks(ticks, schemes if names else [], fontsize=8.5, color=INK)
    axes.set_xticks(ticks[1:] - 0.5, minor=True)
    axes.set_yticks(ticks[1:] - 0.5, minor=True)
    axes.grid(which="minor", color="white", lw=1.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10.5, weight="bold", color=INK, pad=9)
    return image


def plot_noise(
    path: str | os.PathLike[str],
    schemes: Sequence[str],
    panels: Sequence[tuple[str, Float[np.ndarray, "schemes"]]],
) -> None:
    """Draw one horizontal dot plot beside the other, a line for each scheme, as a PNG; a NaN has no dot.

    Args:
      path: PNG file to write.
      schemes: names of the lines, from the top.
      panels: (title, values at least 0).
    """
    figure = new_figure(3.1 * len(panels) + 0.09 * max(map(len, schemes)), 1.1 + 0.29 * len(schemes), None)
    y = np.arange(len(schemes))
    for place, (title, values) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        color = (BLUE, GREEN, ORANGE)[place % 3]
        known = np.isfinite(values)
        axes.hlines(y[known], 0, values[known], color=color, lw=2, alpha=0.28)
        axes.plot(values[known], y[known], "o", color=color, ms=6.5, clip_on=False)
        for line in y[known]:
            axes.annotate(f"{values[line]:.2f}", (values[line], line), (7, -3), textcoords="offset points", fontsize=8)
        axes.set_yticks(y, schemes if not place else [], fontsize=9)
        axes.set_ylim(len(schemes) - 0.4, -0.6)
        axes.set_xlim(0, 1.22 * max([*values[known], 1e-3]))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="y", color=WASH)
        axes.set_axisbelow(True)
        axes.set_title(title, loc="left", fontsize=10, weight="bold", color=INK, pad=8)
        tidy(axes)
        axes.tick_params(axis="y", length=0, colors=INK)
        axes.spines["left"].set_visible(False)
    save(figure, path)


def plot_strips(
    path: str | os.PathLike[str],
    schemes: Sequence[str],
    advantages: Float[np.ndarray, "schemes steps"],
    index: Int[np.ndarray, "steps"],
    better: Float[np.ndarray, "steps"],
) -> None:
    """Draw the scaled advantages of each scheme by the number of the step, as a PNG.

    Args:
      path: PNG file to write.
      schemes: names of the panels.
      advantages: of each step, scaled to root mean square 1.
      index: number of each step in its trajectory, from 0.
      better: return of each step's trajectory less the mean of its group; its sign gives the colour.
    """
    columns = min(len(schemes), 4)
    rows = -(-len(schemes) // columns)
    figure = new_figure(3.0 * columns, 2.05 * rows + 0.5, None)
    rng = np.random.default_rng(0)
    shown = np.sort(rng.permutation(len(index))[:POINTS_DRAWN])
    spread = np.clip(0.13 * rng.standard_normal(len(index)), -0.36, 0.36)
    color = np.where(better > 1e-6, BLUE, np.where(better < -1e-6, ORANGE, FAINT))
    first = None
    for place, scheme in enumerate(schemes):
        axes = figure.add_subplot(rows, columns, place + 1, sharex=first, sharey=first)
        first = first or axes
        y = np.clip(advantages[place], -CLIPPED, CLIPPED)
        axes.axhline(0, color=FAINT, lw=1, zorder=0)
        axes.scatter((index + 1 + spread)[shown], y[shown], s=6, c=color[shown], alpha=0.55, lw=0)
        for t in np.unique(index):
            axes.plot([t + 0.6, t + 1.4], [np.mean(advantages[place][index == t])] * 2, color=INK, lw=2)
        axes.set_title(scheme, loc="left", fontsize=9.5, color=INK, weight="bold", pad=5)
        axes.set_ylim(-CLIPPED * 1.06, CLIPPED * 1.06)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        tidy(axes)
        axes.tick_params(labelbottom=place + columns >= len(schemes), labelleft=place % columns == 0, labelsize=8)
        if place + columns >= len(schemes):
            axes.set_xlabel("step", color=SOFT, fontsize=8.5)
    save(figure, path)

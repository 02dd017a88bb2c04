"""How credit schemes differ on the same steps: statistics, with schemes as the first axis, and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from agentr1_jax import files
from agentr1_jax.report.drawing import BLUE, FAINT, GREEN, INK, ORANGE, SOFT, WASH, new_figure, save, tidy

Matrix = Float[np.ndarray, "schemes schemes"]
PerStep = Float[np.ndarray, "schemes steps"]
OPPOSED_TO_ALIKE = LinearSegmentedColormap.from_list("alike", ["#c2410c", "#f6b37a", "#ffffff", "#9cc0f5", "#1d4fb8"])
POINTS_DRAWN = 1500
"""Most points of a panel; more would hide each other."""
CLIPPED = 4.0
"""Scaled advantages beyond it are drawn at the edge."""


class Noise(NamedTuple):
    """Signal and noise of a gradient under resampling.

    Attributes:
      norm: of the gradient of the whole batch.
      snr: ‖E ĝ‖ / √E‖ĝ − E ĝ‖², with the noise taken out of the numerator: 0 where the gradient is no longer than
        noise alone would make it.
      direction: mean cosine between a resampled gradient and that of the whole batch.
    """

    norm: float
    snr: float
    direction: float


def step_means(advantages: np.ndarray, step_tokens: Int[np.ndarray, "steps"]) -> np.ndarray:
    """The mean advantage of each step's tokens, of which there is at least one: [..., K] -> float64 [..., S]."""
    starts = np.cumsum(step_tokens) - step_tokens
    return np.add.reduceat(np.asarray(advantages, np.float64), starts, axis=-1) / step_tokens


def pearson(x: PerStep) -> Matrix:
    """Correlation over the steps of every two schemes; NaN where a scheme is constant."""
    centred = x - x.mean(1, keepdims=True)
    # Rounding must not make a correlation out of a constant.
    centred = np.where(np.ptp(x, axis=1, keepdims=True) > 1e-6 * np.abs(x).max(1, keepdims=True), centred, 0)
    return cosines(centred @ centred.T)


def spearman(x: PerStep) -> Matrix:
    """Correlation of the ranks; equal advantages share the mean of their ranks."""
    return pearson(scipy.stats.rankdata(x, axis=1))


def opposition(x: PerStep) -> Matrix:
    """Share of the steps that one scheme encourages and the other discourages; an advantage of 0 opposes nothing."""
    sign = np.sign(x)
    return (sign[:, None] * sign[None] < 0).mean(-1)


def cosines(gram: Matrix) -> Matrix:
    """Cosine of every two vectors of which `gram` holds the inner products; NaN where one of them is 0."""
    norm = np.sqrt(np.maximum(np.diag(gram), 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(gram / np.outer(norm, norm), -1, 1)


def scale_by_rms(x: PerStep) -> PerStep:
    """Advantages over their root mean square; a scheme of zeros stays 0.

    They are not centred, since the sign of an advantage is what it says: more of this, or less.
    """
    scale = np.sqrt((x**2).mean(1, keepdims=True))
    return x / np.where(scale > 0, scale, 1)


def similarity_order(similarity: Matrix) -> list[int]:
    """An order in which neighbours are alike: from the first scheme on, always the most similar one that is left."""
    order, left = [0], list(range(1, len(similarity)))
    while left:
        order.append(max(left, key=lambda i: np.nan_to_num(similarity[order[-1], i], nan=-2.0)))
        left.remove(order[-1])
    return order


def gradient_noise(
    gram: Float[np.ndarray, "parts parts"],
    whole: Float[np.ndarray, "parts"],
    resampled: Float[np.ndarray, "resamples parts"],
    groups: int,
) -> Noise:
    """Signal and noise of a gradient Σᵢ qᵢ·vᵢ under resampling of its parts.

    Args:
      gram: inner products of the parts vᵢ.
      whole: q of the whole batch.
      resampled: q of each resample.
      groups: that are resampled; a bootstrap variance is (n − 1)/n of the variance.
    """
    length = float(whole @ gram @ whole)
    if groups < 2 or not length > 0:
        return Noise(max(length, 0.0) ** 0.5, float("nan"), float("nan"))
    centred = resampled - resampled.mean(0)
    noise = float(np.einsum("ri,ij,rj->r", centred, gram, centred).mean()) * groups / (groups - 1)
    lengths = np.sqrt(np.maximum(np.einsum("ri,ij,rj->r", resampled, gram, resampled), 0))
    cosine = (resampled @ gram @ whole)[lengths > 0] / (lengths[lengths > 0] * length**0.5)
    snr = (max(length - noise, 0.0) / noise) ** 0.5 if noise > 0 else float("inf")
    return Noise(length**0.5, snr, float(cosine.mean()) if len(cosine) else float("nan"))


def affine(before: np.ndarray, after: np.ndarray) -> tuple[float, float, float]:
    """(a, b, r) of the least squares fit `after` ≈ a·`before` + b, with r the rest's share of the root mean square.

    Where `before` is constant, a is 1.
    """
    x, y = np.asarray(before, np.float64), np.asarray(after, np.float64)
    spread = ((x - x.mean()) ** 2).sum()
    a = float(((x - x.mean()) * (y - y.mean())).sum() / spread) if spread > 1e-12 * (x**2).sum() > 0 else 1.0
    b = float(y.mean() - a * x.mean())
    size = float((y**2).mean())
    return a, b, (float(((y - a * x - b) ** 2).mean()) / size) ** 0.5 if size > 0 else 0.0


def plot_heatmaps(path: files.PathLike, schemes: Sequence[str], matrices: Sequence[tuple[str, Matrix]]) -> None:
    """Draw one (title, matrix of similarities in [-1, 1]) beside the other, as a PNG; NaN is drawn as a dash."""
    size = max(2.6, 0.47 * len(schemes))
    margin = 0.085 * max(map(len, schemes)) + 0.2
    figure = new_figure(len(matrices) * (size + 0.3) + margin + 1.0, size + margin + 0.6)
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for place, (axes, (title, matrix)) in enumerate(zip(panels, matrices, strict=True)):
        image = _draw_heatmap(axes, schemes, matrix, title, names=place == 0)
    bar = figure.colorbar(image, ax=list(panels), shrink=0.7, aspect=28, pad=0.015, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=SOFT, labelsize=8, length=0)
    save(figure, path)


def _draw_heatmap(axes: Axes, schemes: Sequence[str], matrix: np.ndarray, title: str, *, names: bool) -> AxesImage:
    image = axes.imshow(matrix, vmin=-1, vmax=1, cmap=OPPOSED_TO_ALIKE)
    for (row, column), value in np.ndenumerate(matrix):
        text = "–" if math.isnan(value) else f"{value:.2f}".replace("0.", ".").replace("1.00", "1")
        color = "white" if abs(value) > 0.6 else INK
        axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color=color)
    tidy(axes, title=title, grid=None)
    ticks = np.arange(len(schemes))
    axes.set_xticks(ticks, schemes, rotation=90, fontsize=8.5, color=INK)
    axes.set_yticks(ticks, schemes if names else [], fontsize=8.5, color=INK)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    return image


def plot_noise(
    path: files.PathLike, schemes: Sequence[str], panels: Sequence[tuple[str, Float[np.ndarray, "schemes"]]]
) -> None:
    """Draw one dot plot (title, values at least 0) beside the other, a line for each scheme, as a PNG.

    A NaN has no dot.
    """
    figure = new_figure(3.1 * len(panels) + 0.09 * max(map(len, schemes)), 1.1 + 0.29 * len(schemes))
    y = np.arange(len(schemes))
    for place, (title, values) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        color = (BLUE, GREEN, ORANGE)[place % 3]
        known = np.isfinite(values)
        axes.hlines(y[known], 0, values[known], color=color, lw=2, alpha=0.28)
        axes.plot(values[known], y[known], "o", color=color, ms=6.5, clip_on=False)
        for line in y[known]:
            axes.annotate(f"{values[line]:.2f}", (values[line], line), (7, -3), textcoords="offset points", fontsize=8)
        tidy(axes, title=title)
        axes.set_yticks(y, schemes if not place else [], fontsize=9)
        axes.set_ylim(len(schemes) - 0.4, -0.6)
        axes.set_xlim(0, 1.22 * max([*values[known], 1e-3]))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="y", color=WASH)
        axes.tick_params(axis="y", length=0, colors=INK)
        axes.spines["left"].set_visible(False)
    save(figure, path)


def plot_strips(
    path: files.PathLike,
    schemes: Sequence[str],
    advantages: PerStep,
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
    figure = new_figure(3.0 * columns, 2.05 * rows + 0.5)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    rng = np.random.default_rng(0)
    shown = np.sort(rng.permutation(len(index))[:POINTS_DRAWN])
    spread = np.clip(0.13 * rng.standard_normal(len(index)), -0.36, 0.36)
    color = np.where(better > 1e-6, BLUE, np.where(better < -1e-6, ORANGE, FAINT))
    for axes in panels.flat[len(schemes) :]:
        axes.set_visible(False)
    for axes, scheme, of_scheme in zip(panels.flat, schemes, advantages, strict=False):
        axes.axhline(0, color=FAINT, lw=1, zorder=0)
        y = np.clip(of_scheme, -CLIPPED, CLIPPED)
        axes.scatter((index + 1 + spread)[shown], y[shown], s=6, c=color[shown], alpha=0.55, lw=0)
        for t in np.unique(index):
            axes.plot([t + 0.6, t + 1.4], [np.mean(of_scheme[index == t])] * 2, color=INK, lw=2)
        axes.set_ylim(-CLIPPED * 1.06, CLIPPED * 1.06)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        tidy(axes, title=scheme, grid=None)
    for axes in panels[-1]:
        axes.set_xlabel("step", color=SOFT, fontsize=8.5)
    save(figure, path)

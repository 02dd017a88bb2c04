"""Errors of policy-gradient estimators against an exact gradient: bias and variance with intervals, and a picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from agentr1_jax import files
from agentr1_jax.report.drawing import BLUE, GREEN, INK, ORANGE, SOFT, new_figure, save, tidy

Z = 1.96
"""Half a 95 % interval, in standard errors."""
LEVEL = 1e-4
"""An estimator is called biased where chance alone would show as much this rarely."""
COLORS = {"unbiased": GREEN, "scaled": BLUE, "biased": ORANGE}
LABELS = {"unbiased": "unbiased", "scaled": "right direction, wrong length", "biased": "biased direction"}
LINEAR_BELOW = 0.02
MOST_BIAS, MOST_NOISE = 1e2, 1e6
KEY_ROWS, KEY_WIDTH, PANEL_WIDTH = 40, 3.4, 4.4


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of estimates ĝ of a gradient g; lengths are shares of ‖g‖, squares of ‖g‖².

    Attributes:
      verdict: `unbiased`; `scaled`: its direction alone is right; `biased`.
      bias, bias_low, bias_high: ‖E ĝ − g‖ with its 95 % interval.
      p: of the test that E ĝ = g.
      scale, scale_half: c, the projection of E ĝ on g, and half its 95 % interval.
      off, off_low, off_high: ‖E ĝ − c·g‖/|c| with its interval: the bias that no learning rate mends.
      off_p: of the test that E ĝ = c·g.
      variance, variance_half: trace of the covariance, and half its 95 % interval.
      noise: variance/c².
      mse, mse_half: E‖ĝ − g‖², and half its 95 % interval.
      cosine: mean cosine of the angle between ĝ and g; 0 for ĝ = 0.
    """

    verdict: str
    bias: float
    bias_low: float
    bias_high: float
    p: float
    scale: float
    scale_half: float
    off: float
    off_low: float
    off_high: float
    off_p: float
    variance: float
    variance_half: float
    noise: float
    mse: float
    mse_half: float
    cosine: float


def measure_errors(estimates: Float[np.ndarray, "batches actions"], exact: Float[np.ndarray, "actions"]) -> Errors:
    """Compare independent estimates with the exact gradient.

    Bias is judged jointly over all coordinates: T² = B·bᵀ·Σ⁻¹·b of the mean error b against χ² (Hotelling's test for
    many batches), at the level `LEVEL` for each estimator by itself: in a hundred tables of a hundred
    rows there is one false alarm. Intervals of variance and mean squared error are those of the mean over batches of
    squared deviations, which are taken as normal.
    """
    n, norm = len(estimates), float(np.linalg.norm(exact))
    estimates = estimates.astype(np.float64)
    mean = estimates.mean(axis=0)
    spread = estimates - mean
    # No BLAS here: on busy cores its threads wait for each other a hundred times as long as this takes.
    covariance = np.einsum("bi,bj->ij", spread, spread) / (n - 1)
    unit = exact / norm
    across = np.eye(len(exact)) - np.outer(unit, unit)
    error, off_mean, off_covariance = mean - exact, across @ mean, across @ covariance @ across
    p, off_p = (mean_is_zero(m, c, n, norm) for m, c in ((error, covariance), (off_mean, off_covariance)))
    scale, half = float(unit @ mean) / norm, Z * math.sqrt(unit @ covariance @ unit / n) / norm
    bias = norm_of_mean(error, covariance, n) / norm
    off = norm_of_mean(off_mean, off_covariance, n) / norm / max(abs(scale), 1e-9)
    lengths = np.linalg.norm(estimates, axis=1)
    around, missed = ((x**2).sum(axis=1) / norm**2 for x in (spread, estimates - exact))
    variance = float(np.trace(covariance)) / norm**2
    return Errors(
        verdict="unbiased" if p >= LEVEL else "scaled" if off_p >= LEVEL and scale > half else "biased",
        bias=float(bias[0]),
        bias_low=float(bias[1]),
        bias_high=float(bias[2]),
        p=p,
        scale=scale,
        scale_half=half,
        off=float(off[0]),
        off_low=float(off[1]),
        off_high=float(off[2]),
        off_p=off_p,
        variance=variance,
        variance_half=half_interval(around),
        noise=variance / max(scale**2, 1e-18),
        mse=float(missed.mean()),
        mse_half=half_interval(missed),
        cosine=float((estimates @ unit / np.where(lengths > 0, lengths, 1)).mean()),
    )


def half_interval(x: Float[np.ndarray, "batches"]) -> float:
    """Half the 95 % interval of the mean of independent numbers."""
    return Z * float(x.std(ddof=1)) / math.sqrt(len(x))


def mean_is_zero(
    mean: Float[np.ndarray, "coordinates"],
    covariance: Float[np.ndarray, "coordinates coordinates"],
    n: int,
    unit: float,
) -> float:
    """p-value of Hotelling's test that all coordinates are 0 on average, for many more samples n than coordinates.

    Coordinates may be dependent, since logits of a node have gradients that sum to 0: the test is on those directions
    in which samples differ. In the others the mean must be below 1e-4 of `unit`, or p is 0.
    """
    spread, axes = np.linalg.eigh(covariance)
    varies = spread > 1e-9 * max(spread[-1], 1e-9 * unit**2)
    if np.linalg.norm(mean @ axes[:, ~varies]) > 1e-4 * unit:
        return 0.0
    t2 = n * float(((mean @ axes[:, varies]) ** 2 / spread[varies]).sum())
    return float(scipy.stats.chi2.sf(t2, int(varies.sum()))) if varies.any() else 1.0


def norm_of_mean(
    mean: Float[np.ndarray, "coordinates"], covariance: Float[np.ndarray, "coordinates coordinates"], n: int
) -> Float[np.ndarray, "3"]:
    """‖μ‖ of μ = E x and its 95 % interval, from the mean of n samples: (estimate, low, high).

    ‖mean‖² exceeds ‖μ‖² by tr Σ/n on average, which is taken off. The interval holds all u = ‖μ‖² from which that
    differs by at most 1.96 of its standard deviations √(4κu + 2·tr Σ²/n²), κ = μᵀΣμ/(n·u) taken at the mean.
    """
    square = mean @ mean - np.trace(covariance) / n
    kappa = mean @ covariance @ mean / n / max(mean @ mean, 1e-300)
    centre = square + 2 * kappa * Z**2
    half = math.sqrt(max(centre**2 - square**2 + 2 * (covariance**2).sum() / n**2 * Z**2, 0))
    return np.sqrt(np.maximum([square, centre - half, centre + half], 0))


def plot_gradients(
    path: files.PathLike, panels: Mapping[str, Sequence[Mapping[str, Any]]], *, title: str | None = None
) -> None:
    """Draw a panel for each process and a numbered point for each scheme, as a PNG: bias of direction against noise.

    Args:
      path: where the picture goes.
      panels: title -> rows with `scheme` and the fields of `Errors`. A row that points nowhere (bias or noise beyond
        all measure) is left out.
      title: a heading over the whole picture.
    """
    names = list(dict.fromkeys(row["scheme"] for rows in panels.values() for row in rows))
    number = {name: i + 1 for i, name in enumerate(names)}
    widths = [PANEL_WIDTH] * len(panels) + [KEY_WIDTH] * -(-len(names) // KEY_ROWS)
    figure = new_figure(sum(widths), 7.2, title)
    grid = figure.add_gridspec(1, len(widths), width_ratios=widths)
    for place, (heading, rows) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[place])
        _draw_panel(axes, heading, [(number[row["scheme"]], row) for row in rows])
        if not place:
            axes.set_ylabel("noise: tr Cov ĝ / ‖c g‖²", color=SOFT, fontsize=9.5)
    for column in range(len(widths) - len(panels)):
        key = figure.add_subplot(grid[len(panels) + column])
        key.set_axis_off()
        text = "\n".join(f"{number[name]:>2}  {name}" for name in names[column * KEY_ROWS :][:KEY_ROWS])
        key.text(0, 1, text, va="top", fontsize=7, color=INK, family="monospace", linespacing=1.35)
    handles = [Line2D([], [], color=COLORS[v], marker="o", ms=5, ls="", label=LABELS[v]) for v in COLORS]
    key.legend(handles=handles, fontsize=8, loc="lower left", frameon=False, borderaxespad=0)
    save(figure, path)


def _draw_panel(axes: Axes, title: str, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Draw points with their intervals; those that lie on each other share one label."""
    labels: dict[tuple[float, float], list[tuple[float, float, int]]] = {}
    for number, row in rows:
        x, y = row["off"], row["noise"]
        if x > MOST_BIAS or not 0 < y <= MOST_NOISE:
            continue
        color = COLORS[row["verdict"]]
        axes.plot([row["off_low"], row["off_high"]], [y, y], color=color, lw=0.8, alpha=0.4)
        axes.plot([x], [y], color=color, marker="o", ms=4.5, mec="white", mew=0.5, ls="")
        cell = (round(4 * math.log10(x + LINEAR_BELOW)), round(20 * math.log10(y)))
        labels.setdefault(cell, []).append((x, y, number))
    for points in labels.values():
        label = ",".join(str(number) for _, _, number in points)
        axes.annotate(label, points[0][:2], (4, 2.5), textcoords="offset points", fontsize=7, color=INK)
    axes.set_xscale("symlog", linthresh=LINEAR_BELOW)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.08, y=0.1)
    axes.set_xlim(left=-LINEAR_BELOW / 8)
    tidy(axes, title=title, x_label="bias of direction: ‖E ĝ − c g‖ / ‖c g‖", grid="both")

"""Errors of policy-gradient estimators against an exact gradient: bias, seen or visible, variance, and a picture."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.special
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
POWER = 0.8
"""A visible bias is one that the test finds with this probability."""
CERTAIN = 1e-4
"""A bias of this share of ‖g‖ is seen where estimates do not vary."""
UNSEEN, SCALED, BIASED = "no bias seen", "scaled", "biased"
COLORS = {UNSEEN: GREEN, SCALED: BLUE, BIASED: ORANGE}
LABELS = {UNSEEN: "no bias seen", SCALED: "wrong length, no turn seen", BIASED: "biased direction"}
LINEAR_BELOW = 0.02
MOST_BIAS, MOST_NOISE = 1e2, 1e6
KEY_ROWS, KEY_WIDTH, PANEL_WIDTH = 40, 3.4, 4.4


@dataclasses.dataclass(frozen=True)
class Summary:
    """First and second moments of estimates ĝ of a gradient g, all that `measure_errors` needs; `+` joins two samples.

    The coordinates are those of y = (ĝ − g)/‖g‖, then ‖y‖², then the cosine of ĝ and g (0 for ĝ = 0).

    Attributes:
      n: number of estimates.
      mean: mean of the coordinates.
      scatter: sum over estimates of the products of two coordinates' deviations from their means.
    """

    n: int
    mean: Float[np.ndarray, "coordinates"]
    scatter: Float[np.ndarray, "coordinates coordinates"]

    def __add__(self, other: Summary) -> Summary:
        """Return the summary of both samples together, without cancellation (Chan, Golub & LeVeque 1979)."""
        n, apart = self.n + other.n, other.mean - self.mean
        between = np.outer(apart, apart) * (self.n * other.n / n)
        return Summary(n, self.mean + apart * (other.n / n), self.scatter + other.scatter + between)


def summarize(estimates: Float[np.ndarray, "batches actions"], exact: Float[np.ndarray, "actions"]) -> Summary:
    """Return the summary of independent estimates of the gradient `exact`."""
    norm = np.linalg.norm(exact)
    estimates = estimates.astype(np.float64)
    y, lengths = (estimates - exact) / norm, np.linalg.norm(estimates, axis=1)
    cosine = estimates @ (exact / norm) / np.where(lengths > 0, lengths, 1)
    coordinates = np.concatenate([y, (y**2).sum(axis=1, keepdims=True), cosine[:, None]], axis=1)
    mean = coordinates.mean(axis=0)
    spread = coordinates - mean
    # No BLAS here: on busy cores its threads wait for each other a hundred times as long as this takes.
    return Summary(len(estimates), mean, np.einsum("bi,bj->ij", spread, spread))


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of estimates ĝ of a gradient g; lengths are shares of ‖g‖, squares of ‖g‖².

    Attributes:
      verdict: `no bias seen`; `scaled`: a bias was seen, but none of the direction; `biased`: the direction has one.
      batches: number of estimates.
      bias, bias_low, bias_high: ‖E ĝ − g‖ with its 95 % interval.
      p: of the test that E ĝ = g.
      visible: the smallest bias that this test finds with probability `POWER`, wherever it points.
      scale, scale_half: c, the projection of E ĝ on g, and half its 95 % interval.
      off, off_low, off_high: ‖E ĝ − c·g‖/|c| with its interval: the bias that no learning rate mends.
      off_p: of the test that E ĝ = c·g.
      off_visible: the smallest `off` that this test finds with probability `POWER`.
      variance, variance_half: trace of the covariance, and half its 95 % interval.
      noise: variance/c².
      mse, mse_half: E‖ĝ − g‖², and half its 95 % interval.
      cosine: mean cosine of the angle between ĝ and g; 0 for ĝ = 0.
    """

    verdict: str
    batches: int
    bias: float
    bias_low: float
    bias_high: float
    p: float
    visible: float
    scale: float
    scale_half: float
    off: float
    off_low: float
    off_high: float
    off_p: float
    off_visible: float
    variance: float
    variance_half: float
    noise: float
    mse: float
    mse_half: float
    cosine: float


def measure_errors(summary: Summary, exact: Float[np.ndarray, "actions"]) -> Errors:
    """Compare independent estimates, of which there are more than coordinates, with the exact gradient.

    Bias is judged jointly over all coordinates by Hotelling's test, at the level `LEVEL` for each estimator by itself:
    in a hundred tables of a hundred rows there is one false alarm. Means over batches are taken as normal. "No bias
    seen" is worth what the smallest visible bias is. That depends on the covariance alone, so sampling may go on until
    it is small enough, and the level stays what it is.
    """
    n, covariances = summary.n, summary.scatter / (summary.n - 1)
    error, covariance = summary.mean[:-2], covariances[:-2, :-2]
    unit = exact / np.linalg.norm(exact)
    across = np.eye(len(exact)) - np.outer(unit, unit)
    off_mean, off_covariance = across @ error, across @ covariance @ across
    (p, visible), (off_p, off_visible) = (
        mean_is_zero(mean, cov, n) for mean, cov in ((error, covariance), (off_mean, off_covariance))
    )
    scale, half = 1 + float(unit @ error), Z * math.sqrt(max(unit @ covariance @ unit, 0) / n)
    length = max(abs(scale), 1e-9)
    bias, off = norm_of_mean(error, covariance, n), norm_of_mean(off_mean, off_covariance, n) / length
    variance, mse_variance = float(np.trace(covariance)), covariances[-2, -2]
    # ‖y − ȳ‖² = ‖y‖² − 2·ȳᵀy + ‖ȳ‖², and its variance over batches.
    around_variance = mse_variance - 4 * error @ covariances[:-2, -2] + 4 * error @ covariance @ error
    return Errors(
        verdict=UNSEEN if p >= LEVEL else SCALED if off_p >= LEVEL and scale > half else BIASED,
        batches=n,
        bias=float(bias[0]),
        bias_low=float(bias[1]),
        bias_high=float(bias[2]),
        p=p,
        visible=visible,
        scale=scale,
        scale_half=half,
        off=float(off[0]),
        off_low=float(off[1]),
        off_high=float(off[2]),
        off_p=off_p,
        off_visible=off_visible / length,
        variance=variance,
        variance_half=Z * math.sqrt(max(around_variance, 0) / n),
        noise=variance / max(scale**2, 1e-18),
        mse=float(summary.mean[-2]),
        mse_half=Z * math.sqrt(mse_variance / n),
        cosine=float(summary.mean[-1]),
    )


def mean_is_zero(
    mean: Float[np.ndarray, "coordinates"], covariance: Float[np.ndarray, "coordinates coordinates"], n: int
) -> tuple[float, float]:
    """Return the p-value of Hotelling's test that all coordinates are 0 on average, and the smallest visible mean.

    T² = n·b̄ᵀ·Σ⁻¹·b̄ of the mean b̄ in d coordinates: T²·(n − d)/(d·(n − 1)) has the distribution F(d, n − d), noncentral
    by ν = n·βᵀ·Σ⁻¹·β if the expectation is β. Let ν* be the ν at which the test at `LEVEL` rejects with probability
    `POWER`, and σ² the largest eigenvalue of Σ. A mean of the length √(ν*·σ²/n) is found with that probability if it
    points where samples vary most, and with a larger one in any other direction.

    Coordinates may be dependent, since logits of a node have gradients that sum to 0: the test is on those directions
    in which samples differ. In the others the mean must be below `CERTAIN`, or p is 0.

    Args:
      mean: mean of n samples, in the unit of `CERTAIN`.
      covariance: covariance Σ of the samples.
      n: number of samples, more than coordinates.
    """
    spread, axes = np.linalg.eigh(covariance)
    varies = spread > 1e-9 * max(spread[-1], 1e-9)
    d = int(varies.sum())
    visible = max(CERTAIN, math.sqrt(noncentrality(d, n) * spread[-1] / n)) if d else CERTAIN
    if np.linalg.norm(mean @ axes[:, ~varies]) > CERTAIN:
        return 0.0, visible
    t2 = n * float(((mean @ axes[:, varies]) ** 2 / spread[varies]).sum())
    return (float(scipy.special.fdtrc(d, n - d, t2 * (n - d) / (d * (n - 1)))) if d else 1.0), visible


@functools.cache
def noncentrality(d: int, n: int) -> float:
    """Return the ν* of `mean_is_zero`, of n samples in d coordinates."""
    return float(scipy.special.ncfdtrinc(d, n - d, 1 - POWER, scipy.special.fdtri(d, n - d, 1 - LEVEL)))


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

    A point whose direction was not found to be biased has a tick at the smallest bias of direction that was visible.

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
    handles.append(Line2D([], [], color=SOFT, marker="|", ms=7, ls="", label="smallest visible bias of direction"))
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
        if row["verdict"] != BIASED:
            axes.plot([row["off_visible"]], [y], color=color, marker="|", ms=7, ls="")
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

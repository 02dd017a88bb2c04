"""Statistics of how credit schemes differ on the same steps; schemes are the first axis."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float, Int

Matrix = Float[np.ndarray, "schemes schemes"]
PerStep = Float[np.ndarray, "schemes steps"]


def step_means(advantages: np.ndarray, step_tokens: Int[np.ndarray, "steps"]) -> np.ndarray:
    """The mean advantage of each step's tokens: [..., K] -> float64 [..., S].

    Args:
      advantages: of sampled tokens in (trajectory, step, token) order.
      step_tokens: sampled tokens of each step, at least 1.
    """
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


def disagreement(x: PerStep) -> Float[np.ndarray, "steps"]:
    """Standard deviation over the schemes of each step's scaled advantage."""
    return scale_by_rms(x).std(0)


def similarity_order(similarity: Matrix) -> list[int]:
    """An order in which neighbours are alike: from the first scheme on, always the most similar one that is left."""
    order, left = [0], list(range(1, len(similarity)))
    while left:
        order.append(max(left, key=lambda i: np.nan_to_num(similarity[order[-1], i], nan=-2.0)))
        left.remove(order[-1])
    return order


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


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV with the keys of the first as header; a text that a spreadsheet would run gets a quote before it."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _inert(value) for name, value in row.items()})
    return out.getvalue()


def _inert(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value

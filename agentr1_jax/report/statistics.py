"""Intervals, tests and summaries of scores; pure functions of arrays.

**Over seeds**, whose scores are independent: Student's interval and paired test, Holm's correction for several tests,
and what Agarwal et al. recommend where there are several tasks (2021, "Deep reinforcement learning at the edge of the
statistical precipice", arXiv 2108.13264; their code is the package rliable): interquartile means, stratified bootstrap
intervals, probabilities of improvement. All of them take scores with any leading axes.

**Over seeds and questions**: bootstrap intervals in two stages, the same for the same seed. `scipy.stats.bootstrap`
does not make them: it resamples n of n, in one stage. Every resample draws n - 1 of n values, which makes the variance
of its mean unbiased (Rao & Wu 1988, "Resampling inference with complex survey data"); with all n it is too small by
n/(n - 1), which matters where n is three. Few values still say little of their spread. On normal data the nominal 95 %
interval over n seeds holds the truth in

    n           2    3    4    5    8    20
    coverage   50   75   82   86   90    92 %

of all cases: below five it is nearly the range from the lowest to the highest, and should be read as that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float, Real

DRAWS = 4000
LEVEL = 0.95
ROUNDING = 1e-12
"""Relative difference of floats that is taken for none."""
Floats = Float[np.ndarray, "..."] | np.float64
"""What is left of an array when an axis is reduced: a number where it had one axis."""


class Interval(NamedTuple):
    """A mean with its bootstrap interval; `low <= mean <= high` but for the skew of few resamples."""

    mean: float
    low: float
    high: float


def two_stage_interval(
    values: Sequence[Float[np.ndarray, "_"]], *, same_questions: bool = False, seed: int = 0, draws: int = DRAWS
) -> Interval:
    """Return the percentile bootstrap interval of a mean over seeds of means over questions.

    Each resample draws seeds with replacement, then questions within them with replacement. Where all seeds were asked
    the same questions, one draw of questions serves all seeds: a hard question is hard for each of them, which separate
    draws would average out. Noise of single answers enters both stages, so the interval
    is too wide rather than too narrow where it is all there is (by up to √3; Owen 2007, "The pigeonhole bootstrap").

    Args:
      values: for each seed its scores, one a question, at least one; in the same order for all if `same_questions`.
      same_questions: whether question i is the same in all seeds.
      seed: seed of the resampling.
      draws: number of resamples.
    """
    rng = np.random.default_rng(seed)

    def question_weights(count: int, resamples: int) -> np.ndarray:
        drawn = max(count - 1, 1)
        return rng.multinomial(drawn, np.full(count, 1 / count), size=resamples) / drawn

    chosen = rng.integers(len(values), size=(draws, max(len(values) - 1, 1)))
    if same_questions:
        means = question_weights(len(values[0]), draws) @ np.stack(values, axis=1)
        picked = np.take_along_axis(means, chosen, axis=1)
    else:
        picked = np.empty(chosen.shape)
        for i, scores in enumerate(values):
            here = chosen == i
            picked[here] = question_weights(len(scores), int(here.sum())) @ scores
    low, high = np.quantile(picked.mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(np.mean([np.mean(scores) for scores in values])), float(low), float(high))


def paired_difference(
    ours: Sequence[Float[np.ndarray, "_"]], theirs: Sequence[Float[np.ndarray, "_"]], *, same_questions: bool = False
) -> Interval:
    """Return the two-stage interval of the mean of ours − theirs: for each seed scores of the same questions."""
    differences = [np.subtract(a, b) for a, b in zip(ours, theirs, strict=True)]
    return two_stage_interval(differences, same_questions=same_questions)


def area_under(x: Real[np.ndarray, "points"], values: Real[np.ndarray, "*curves points"]) -> Floats:
    """Return the mean height of learning curves: their trapezoid area over the ascending x, divided by its range.

    A curve of one point has the height of that.
    """
    x, values = np.asarray(x, np.float64), np.asarray(values, np.float64)
    if len(x) < 2:
        return values[..., 0]
    return np.trapezoid(values, x, axis=-1) / (x[-1] - x[0])


def t_interval(x: Real[np.ndarray, "..."], axis: int = -1, level: float = LEVEL) -> tuple[Floats, Floats, Floats]:
    """Return mean, lower and upper end of Student's interval x̄ ± t·s/√n, t the quantile at n − 1 degrees of freedom.

    It holds the mean of the distribution with probability `level` where the n values are independent and normal
    (Student 1908, "The probable error of a mean"). Ends are NaN where n is 1: one value says nothing of its spread.
    Values that are all equal give an interval of no width.
    """
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    mean, half = x.mean(-1), t_quantile(x.shape[-1], level) * _standard_error(x, np.abs(x).max(-1))
    return mean, mean - half, mean + half


def t_quantile(n: int, level: float = LEVEL) -> float:
    """Return the standard errors to each side of a mean over n values that its Student interval has; NaN for n = 1."""
    return float(scipy.stats.t.ppf((1 + level) / 2, n - 1)) if n > 1 else float("nan")


def paired_t(
    x: Real[np.ndarray, "*tests n"], y: Real[np.ndarray, "*tests n"], level: float = LEVEL
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return mean difference x − y, the ends of its Student interval, and the two-sided p of the paired t test.

    The test asks whether differences of mean 0 could be so far from it: p = P(|T| ≥ |d̄|·√n/s), T with n − 1 degrees of
    freedom. Pair i must have something in common (seed, warm start, questions), and pairs must be independent.
    Interval and p are NaN for one pair. Differences that are all equal say nothing of their spread: p is 1 where they
    are 0, and NaN otherwise.

    Returns:
      difference, low, high, p: over the leading axes of x and y, whose last one holds the pairs.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    n, scale = x.shape[-1], np.maximum(np.abs(x), np.abs(y)).max(-1)
    error, mean = _standard_error(x - y, scale), (x - y).mean(-1)
    half = t_quantile(n, level) * error
    equal = error == 0
    p = 2 * scipy.stats.t.sf(np.abs(mean) / np.where(equal, 1, error), n - 1)
    without_spread = np.where(np.abs(mean) <= ROUNDING * scale, 1.0, np.nan)
    return mean, mean - half, mean + half, np.where(equal, without_spread, p)[()]


def holm(p: Float[np.ndarray, "tests"]) -> Float[np.ndarray, "tests"]:
    """Return p values corrected for their number by Holm's step-down method.

    The i-th smallest of m is multiplied by m − i + 1, and is at least the one before it. Rejecting where the result is
    at most α rejects a true hypothesis, any of them, with probability at most α, however the tests depend on each other
    (Holm 1979, "A simple sequentially rejective multiple test procedure"). Tests that could not be made, of p NaN, stay
    NaN and do not count.
    """
    p = np.asarray(p, np.float64)
    order = np.argsort(p)[: int(np.isfinite(p).sum())]  # NaN is sorted to the end.
    out = np.full_like(p, np.nan)
    out[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1)
    return out


def interquartile_mean(x: Real[np.ndarray, "..."], axis: int | tuple[int, ...] = -1) -> Floats:
    """Return the mean of the middle half of the values: ⌊n/4⌋ are left out at each end (arXiv 2108.13264, section 4.3).

    The values of several axes are taken together, as the source does with `axis=(-2, -1)` of scores [tasks, seeds]. Of
    fewer than four values none is left out.
    """
    axes = (axis,) if isinstance(axis, int) else axis
    x = np.moveaxis(np.asarray(x, np.float64), axes, range(-len(axes), 0))
    x = np.sort(x.reshape(*x.shape[: x.ndim - len(axes)], -1), axis=-1)
    cut = x.shape[-1] // 4
    return x[..., cut : x.shape[-1] - cut].mean(-1)


def stratified_bootstrap(
    x: Real[np.ndarray, "tasks seeds"],
    statistic: Callable[[Float[np.ndarray, "draws tasks seeds"]], Floats],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> tuple[Floats, Floats]:
    """Return the ends of the percentile bootstrap interval of a statistic of scores on several tasks.

    Each draw takes as many seeds as there are, with replacement, from each task by itself (arXiv 2108.13264, section
    4.1). With few seeds the interval is too narrow: it is meant for ten or more in all tasks together.

    Args:
      x: score of each seed on each task.
      statistic: of all draws at once, [draws, ...], e.g. `lambda x: interquartile_mean(x, (-2, -1))`.
      draws: number of draws.
      seed: seed of the draws.
      level: probability that the interval is to hold the truth with.
    """
    x, rng = np.asarray(x, np.float64), np.random.default_rng(seed)
    chosen = rng.integers(x.shape[1], size=(draws, *x.shape))
    values = statistic(np.take_along_axis(x[None], chosen, axis=-1))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def probability_of_improvement(x: Real[np.ndarray, "*tasks n"], y: Real[np.ndarray, "*tasks m"]) -> Floats:
    """Return P(X > Y) + P(X = Y)/2 for a run of each: the share of all n·m pairs of scores that x wins, ties as half.

    This is U/(n·m) of Mann and Whitney (1947), and a term of the mean over tasks in arXiv 2108.13264, section 4.3. It
    says how often x wins, not by how much. All pairs count, also where score i of both had the same seed: it is about
    two independent runs. For two runs of one seed take the mean over i of `(x > y) + (x == y) / 2`.
    """
    a, b = np.asarray(x)[..., :, None], np.asarray(y)[..., None, :]
    return ((a > b) + 0.5 * (a == b)).mean((-2, -1))


def _standard_error(x: Float[np.ndarray, "*leading n"], scale: Floats) -> Floats:
    """Return s/√n with the sample standard deviation s; NaN for n = 1, and 0 where values differ by rounding alone."""
    n = x.shape[-1]
    if n == 1:
        return np.full(x.shape[:-1], np.nan)
    return np.where(np.ptp(x, -1) <= ROUNDING * scale, 0, x.std(-1, ddof=1) / np.sqrt(n))

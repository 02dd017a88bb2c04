"""Slow references: the definitions as plain loops over Python numbers, independent of the library's code."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence


def aggregate(
    name: str,
    losses: Sequence[float],
    step: Sequence[Hashable],
    trajectory: Sequence[Hashable],
    group: Sequence[Hashable],
    trained: Sequence[bool],
    constant: float,
) -> float:
    """The aggregate of the token losses, as means of means."""
    kept = [k for k in range(len(losses)) if trained[k]]
    if not kept:
        return 0.0
    if name == "fixed":
        return sum(losses[k] for k in kept) / constant
    if name == "token":
        return statistics.fmean(losses[k] for k in kept)

    def means(unit: Sequence[Hashable]) -> dict[Hashable, float]:
        cells = defaultdict(list)
        for k in kept:
            cells[unit[k]].append(losses[k])
        return {key: statistics.fmean(x) for key, x in cells.items()}

    if name != "group":
        return statistics.fmean(means(step if name == "step" else trajectory).values())
    group_of = {trajectory[k]: group[k] for k in kept}
    cells = defaultdict(list)
    for key, mean in means(trajectory).items():
        cells[group_of[key]].append(mean)
    return statistics.fmean(statistics.fmean(x) for x in cells.values())


def log_ratios(
    ratio: str,
    new: Sequence[float],
    old: Sequence[float],
    step: Sequence[Hashable],
    trajectory: Sequence[Hashable],
    mean: str = "token",
) -> list[float]:
    """log ρ of each token, from a loop over its unit's tokens, without the clamp at 10."""
    difference = [n - o for n, o in zip(new, old, strict=True)]
    if ratio == "token":
        return difference
    own = defaultdict(list)
    unit = trajectory if ratio == "trajectory" else step
    for key, x in zip(unit, difference, strict=True):
        own[key].append(x)
    if ratio != "centred_step":
        return [statistics.fmean(own[key]) for key in unit]
    mu = statistics.fmean(difference if mean == "token" else map(statistics.fmean, own.values())) if own else 0.0
    w = {key: mu + sum(z - mu for z in x) / math.sqrt(len(x)) for key, x in own.items()}
    return [w[key] for key in unit]


def policy_loss(
    ratio: str,
    clip: str,
    new: Sequence[float],
    old: Sequence[float],
    advantage: Sequence[float],
    step: Sequence[Hashable],
    trajectory: Sequence[Hashable],
    *,
    low: float,
    high: float,
    c: float,
    tau: tuple[float, float],
) -> tuple[list[float], list[float]]:
    """Loss of each token, and its derivative with respect to that token's log π (the mean of its unit held constant).

    tau: of `sapo`, for positive and for negative advantages.
    """
    losses, slopes = [], []
    free, moved = [True] * len(new), new
    if clip == "gmpo":
        z = [n - o for n, o in zip(new, old, strict=True)]
        near = [min(x, high) if a > 0 else max(x, -low) for x, a in zip(z, advantage, strict=True)]
        free = [x == y for x, y in zip(z, near, strict=True)]
        moved = [o + x for o, x in zip(old, near, strict=True)]
    for k, log_rho in enumerate(log_ratios(ratio, moved, old, step, trajectory)):
        a, r = advantage[k], math.exp(log_rho)
        clipped = min(max(r, 1 - low), 1 + high)
        if clip == "gmpo":
            loss, slope = -a * r, -a * r if free[k] else 0.0
        elif clip.startswith("dppo"):
            p, q = math.exp(new[k]), math.exp(old[k])
            kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            far = (abs(p - q) if clip == "dppo_tv" else kl) > (high if a > 0 else low)
            slope = 0.0 if far and (p > q) == (a > 0) else -min(r, c) * a
            loss = slope * new[k]
        elif clip == "none":
            loss, slope = -a * new[k], -a
        elif clip == "cispo":
            loss, slope = -clipped * a * new[k], -clipped * a
        elif clip == "sapo":
            t = tau[0] if a > 0 else tau[1]
            gate = 1 / (1 + math.exp(-t * (r - 1)))
            loss, slope = -4 / t * gate * a, -4 * gate * (1 - gate) * r * a
        else:
            loss, slope = max((-a * r, -a * r), (-a * clipped, 0.0 if clipped != r else -a * r))
            if clip == "dual" and a < 0 and loss > -a * c:
                loss, slope = -a * c, 0.0
        losses.append(loss)
        slopes.append(slope)
    return losses, slopes

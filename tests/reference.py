"""Slow references: the definitions as plain loops over Python numbers, independent of the library's code."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence

from builders import Rollout


def whiten(x: Sequence[float]) -> list[float]:
    """(x − mean)/√(var + 1e-8), var with n − 1; one element gives 0."""
    if len(x) < 2:
        return [0.0] * len(x)
    mean, variance = statistics.fmean(x), statistics.variance(x)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in x]


def gae(rewards: Sequence[float], values: Sequence[float], end: float, gamma: float, lam: float) -> list[float]:
    """Aₜ = Σ_l (γλ)^l δₜ₊ₗ of one trajectory, as the sum it is."""
    after = [*values[1:], end]
    delta = [r + gamma * w - v for r, v, w in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, len(delta))) for t in range(len(delta))]


def step_gae(data: Sequence[Rollout], gamma: float, lam: float) -> tuple[list[float], dict[int, float]]:
    """Advantage of every token, and value targets by token index."""
    raw, starts = [], []
    for r in data:
        actions = [[t for t in step if t.is_action] for step in r.tokens]
        rewards = [x + sum(t.reward for t in step) for x, step in zip(r.rewards, actions, strict=True)]
        starts.append([step[0].value for step in actions])
        raw.append(gae(rewards, starts[-1], r.bootstrap, gamma, lam))
    white = iter(whiten([a for own in raw for a in own]))
    advantages, targets = [], {}
    for r, own, values in zip(data, raw, starts, strict=True):
        for step, a, value in zip(r.tokens, own, values, strict=True):
            given, first = next(white), True
            for token in step:
                if token.is_action and first:
                    targets[len(advantages)] = a + value
                    first = False
                advantages.append(given if token.is_action else 0.0)
    return advantages, targets


def token_gae(data: Sequence[Rollout], gamma: float, lam: float) -> tuple[list[float], dict[int, float]]:
    """Advantage of every token, and value targets by token index."""
    raw, where, targets, index = [], [], {}, 0
    for r in data:
        rewards, values, own = [], [], []
        for reward, step in zip(r.rewards, r.tokens, strict=True):
            for token in step:
                if token.is_action:
                    rewards.append(token.reward)
                    values.append(token.value)
                    own.append(index)
                index += 1
            rewards[-1] += reward
        advantages = gae(rewards, values, r.bootstrap, gamma, lam)
        targets |= {k: a + v for k, a, v in zip(own, advantages, values, strict=True)}
        raw += advantages
        where += own
    out = [0.0] * index
    for k, a in zip(where, whiten(raw), strict=True):
        out[k] = a
    return out, targets


def grpo(data: Sequence[Rollout]) -> list[float]:
    """Advantage of every token."""
    groups = defaultdict(list)
    for r in data:
        groups[r.group].append(r.outcome)
    out = []
    for r in data:
        members = groups[r.group]
        a = 0.0
        if len(members) > 1:
            a = (r.outcome - statistics.fmean(members)) / (statistics.stdev(members) + 1e-6)
        out += [a if token.is_action else 0.0 for step in r.tokens for token in step]
    return out


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
    ratio: str, new: Sequence[float], old: Sequence[float], step: Sequence[Hashable], trajectory: Sequence[Hashable]
) -> list[float]:
    """log ρ of each token, from a loop over its unit's tokens, without the clamp at 10."""
    difference = [n - o for n, o in zip(new, old, strict=True)]
    if ratio == "token":
        return difference
    own = defaultdict(list)
    unit = trajectory if ratio == "trajectory" else step
    for key, x in zip(unit, difference, strict=True):
        own[key].append(x)
    if ratio != "capo":
        return [statistics.fmean(own[key]) for key in unit]
    z = {key: sum(x) / math.sqrt(len(x)) for key, x in own.items()}
    return [z[key] - statistics.fmean(z.values()) for key in unit]


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
    for k, log_rho in enumerate(log_ratios(ratio, new, old, step, trajectory)):
        a, r = advantage[k], math.exp(log_rho)
        clipped = min(max(r, 1 - low), 1 + high)
        if clip == "none":
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

"""Slow references of the credit schemes: their definitions as plain loops, independent of the library's code."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from builders import Rollout, Token

Result = tuple[list[float], dict[int, float]]
"""Advantage of every token, and the critic's targets by token."""


def whiten(x: Sequence[float], unit: Sequence[Hashable]) -> list[float]:
    """(x − mean)/√(var + 1e-8), where every unit counts once: means of means, var with n − 1 units (at least 1)."""
    cells = defaultdict(list)
    for key, v in zip(unit, x, strict=True):
        cells[key].append(v)
    if not cells:
        return []
    mean = statistics.fmean(statistics.fmean(own) for own in cells.values())
    squares = [statistics.fmean((v - mean) ** 2 for v in own) for own in cells.values()]
    return [(v - mean) / math.sqrt(sum(squares) / max(len(cells) - 1, 1) + 1e-8) for v in x]


def normalise(x: float, cell: Sequence[float], norm: str) -> float:
    """x − mean of its cell, or that over the sample std + 1e-6; 0 for a lone element."""
    if len(cell) < 2:
        return 0.0
    return (x - statistics.fmean(cell)) / (statistics.stdev(cell) + 1e-6 if norm == "mean_std_norm" else 1.0)


def gae(rewards: Sequence[float], values: Sequence[float], end: float, gamma: float, lam: float) -> list[float]:
    """Aₜ = Σ_l (γλ)^l δₜ₊ₗ of one trajectory, as the sum it is."""
    after = [*values[1:], end]
    delta = [r + gamma * w - v for r, v, w in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, len(delta))) for t in range(len(delta))]


def lambda_of(lam: float, alpha: float, length: int) -> float:
    """λ itself, or with α that of a timeline of so many steps or tokens."""
    return max(0.0, 1 - 1 / (alpha * length)) if alpha else lam


def sampled(data: Sequence[Rollout]) -> list[tuple[int, int, int, Token]]:
    """Place in the stream, trajectory, step and content of every sampled token."""
    stream = [(i, t, token) for i, r in enumerate(data) for t, step in enumerate(r.tokens) for token in step]
    return [(k, i, t, token) for k, (i, t, token) in enumerate(stream) if token.is_action]


def first_sampled(data: Sequence[Rollout]) -> dict[tuple[int, int], tuple[int, Token]]:
    """Place and content of the first sampled token of each (trajectory, step)."""
    return {(i, t): (k, token) for k, i, t, token in reversed(sampled(data))}


def from_tokens(data: Sequence[Rollout], raw: Sequence[float], unit: str) -> list[float]:
    """Whitens one number for each sampled token, and puts it where the token is in the stream."""
    places = sampled(data)
    if unit != "none":
        raw = whiten(raw, [{"token": k, "step": (i, t), "trajectory": i}[unit] for k, i, t, _ in places])
    out = [0.0] * sum(len(step) for r in data for step in r.tokens)
    for (k, *_), a in zip(places, raw, strict=True):
        out[k] = a
    return out


def from_steps(data: Sequence[Rollout], raw: Sequence[Sequence[float]], unit: str = "none") -> list[float]:
    """Whitens one number for each step of each trajectory, and broadcasts it to the step's sampled tokens."""
    if unit == "token":
        return from_tokens(data, [raw[i][t] for _, i, t, _ in sampled(data)], "token")
    flat = [(i, t) for i, r in enumerate(data) for t in range(len(r.tokens))]
    white = {(i, t): raw[i][t] for i, t in flat}
    if unit != "none":
        units = [i if unit == "trajectory" else (i, t) for i, t in flat]
        white = dict(zip(flat, whiten([raw[i][t] for i, t in flat], units), strict=True))
    return from_tokens(data, [white[i, t] for _, i, t, _ in sampled(data)], "none")


def step_rewards(r: Rollout) -> list[float]:
    """Reward of each step, with those of its sampled tokens."""
    return [x + sum(t.reward for t in step if t.is_action) for x, step in zip(r.rewards, r.tokens, strict=True)]


def returns(r: Rollout, gamma: float) -> list[float]:
    """Gₜ = rₜ + γGₜ₊₁; beyond the last step the bootstrap value."""
    return gae(step_rewards(r), [0.0] * len(r.tokens), r.bootstrap, gamma, 1.0)


def token_rewards(r: Rollout) -> list[float]:
    """Reward of each sampled token; that of the step falls on the step's last one."""
    out = []
    for reward, step in zip(r.rewards, r.tokens, strict=True):
        out += [t.reward for t in step if t.is_action]
        out[-1] += reward
    return out


def token_gae(data: Sequence[Rollout], gamma: float, lam: float, lam_length: float, whiten: str) -> Result:
    raw, values = [], [token.value for *_, token in sampled(data)]
    for r in data:
        own = [t.value for step in r.tokens for t in step if t.is_action]
        raw += gae(token_rewards(r), own, r.bootstrap, gamma, lambda_of(lam, lam_length, len(own)))
    targets = {k: a + v for (k, *_), a, v in zip(sampled(data), raw, values, strict=True)}
    return from_tokens(data, raw, whiten), targets


def step_gae(data: Sequence[Rollout], gamma: float, lam: float, lam_length: float, anchor: str, whiten: str) -> Result:
    at = first_sampled(data) if anchor == "prompt" else {(i, t): (k, token) for k, i, t, token in sampled(data)}
    starts = [[at[i, t][1].value for t in range(len(r.tokens))] for i, r in enumerate(data)]
    lams = [lambda_of(lam, lam_length, len(own)) for own in starts]
    raw = [gae(step_rewards(r), own, r.bootstrap, gamma, x) for r, own, x in zip(data, starts, lams, strict=True)]
    targets = {k: raw[i][t] + starts[i][t] for (i, t), (k, _) in at.items()}
    return from_steps(data, raw, whiten), targets


def bilevel_gae(
    data: Sequence[Rollout], gamma: float, lam: float, lam_length: float, gamma_high: float, whiten: str
) -> Result:
    raw = []
    for r in data:
        steps = [[t for t in step if t.is_action] for step in r.tokens]
        rewards = [x + step[-1].reward for x, step in zip(r.rewards, steps, strict=True)]
        lam_high = lambda_of(lam, lam_length, len(steps))
        high = gae(rewards, [step[-1].value for step in steps], r.bootstrap, gamma_high, lam_high)
        for step, a in zip(steps, high, strict=True):
            low = [a]
            for token, after in zip(step[-2::-1], step[:0:-1], strict=True):
                decay = gamma * lambda_of(lam, lam_length, len(step))
                low.append(token.reward + gamma * after.value - token.value + decay * low[-1])
            raw += low[::-1]
    targets = {k: a + token.value for (k, _, _, token), a in zip(sampled(data), raw, strict=True)}
    return from_tokens(data, raw, whiten), targets


def reinforce(data: Sequence[Rollout], gamma: float, whiten: str) -> Result:
    return from_steps(data, [returns(r, gamma) for r in data], whiten), {}


def reinforce_pp(data: Sequence[Rollout], gamma: float, whiten: str) -> Result:
    raw = []
    for r in data:
        rewards = token_rewards(r)
        raw += gae(rewards, [0.0] * len(rewards), r.bootstrap, gamma, 1.0)
    return from_tokens(data, raw, whiten), {}


def outcomes(data: Sequence[Rollout], norm: str, unit: str) -> list[list[float]]:
    """The outcome normalised in its group, which has each once, or once for each step or token; for each step."""
    groups = defaultdict(list)
    for i, r in enumerate(data):
        copies = {"trajectory": 1, "step": len(r.tokens), "token": sum(j == i for _, j, _, _ in sampled(data))}[unit]
        groups[r.group] += [r.outcome] * copies
    return [[normalise(r.outcome, groups[r.group], norm)] * len(r.tokens) for r in data]


def grpo(data: Sequence[Rollout], unit: str) -> Result:
    return from_steps(data, outcomes(data, "mean_std_norm", unit)), {}


def dr_grpo(data: Sequence[Rollout], unit: str) -> Result:
    return from_steps(data, outcomes(data, "mean_norm", unit)), {}


def reinforce_pp_baseline(data: Sequence[Rollout], unit: str, whiten: str) -> Result:
    centred = outcomes(data, "mean_norm", unit)
    return from_tokens(data, [centred[i][0] for _, i, _, _ in sampled(data)], whiten), {}


def rloo(data: Sequence[Rollout]) -> Result:
    raw = []
    for i, r in enumerate(data):
        others = [o.outcome for j, o in enumerate(data) if o.group == r.group and j != i]
        raw.append([r.outcome - statistics.fmean(others) if others else 0.0] * len(r.tokens))
    return from_steps(data, raw), {}


def remax(data: Sequence[Rollout]) -> Result:
    return from_steps(data, [[r.outcome - r.greedy] * len(r.tokens) for r in data]), {}


def opo(data: Sequence[Rollout]) -> Result:
    raw = []
    for r in data:
        lengths = [(data[i].outcome, k) for k, i, _, _ in sampled(data) if data[i].group == r.group]
        raw.append([r.outcome - statistics.fmean(outcome for outcome, _ in lengths)] * len(r.tokens))
    return from_steps(data, raw), {}


def cells(data: Sequence[Rollout], x: Sequence[Sequence[float]], key: Callable[[int, int], Hashable]) -> Any:
    """For each step the numbers of the steps of its group with the same key, its own included; empty without a key."""
    flat = [(data[i].group, key(i, t), x[i][t]) for i, r in enumerate(data) for t in range(len(r.tokens))]

    def cell(i: int, t: int) -> list[float]:
        own = key(i, t)
        return [] if own is None else [y for group, other, y in flat if (group, other) == (data[i].group, own)]

    return [[cell(i, t) for t in range(len(r.tokens))] for i, r in enumerate(data)]


def turn_grpo(data: Sequence[Rollout], gamma: float, outcome_weight: float, norm: str, signal: str) -> Result:
    x = [step_rewards(r) if signal == "reward" else returns(r, gamma) for r in data]
    alike, outcome = cells(data, x, lambda i, t: t), outcomes(data, norm, "trajectory")
    raw = [
        [normalise(y, alike[i][t], norm) + outcome_weight * outcome[i][t] for t, y in enumerate(own)]
        for i, own in enumerate(x)
    ]
    return from_steps(data, raw), {}


def gigpo(data: Sequence[Rollout], gamma: float, step_weight: float, norm: str, unit: str) -> Result:
    g = [returns(r, gamma) for r in data]
    alike, outcome = cells(data, g, lambda i, t: data[i].keys[t]), outcomes(data, norm, unit)
    raw = [
        [outcome[i][t] + step_weight * normalise(y, alike[i][t], norm) for t, y in enumerate(own)]
        for i, own in enumerate(g)
    ]
    return from_steps(data, raw), {}


def hgpo(data: Sequence[Rollout], gamma: float, history: int, alpha: float, norm: str) -> Result:
    """A state that is unknown agrees with none, also where it lies in the history."""
    g = [returns(r, gamma) for r in data]
    total, weights = [[0.0] * len(own) for own in g], [[0.0] * len(own) for own in g]
    for level in range(history + 1):

        def suffix(i: int, t: int, level: int = level) -> Hashable:
            states = [data[i].keys[u] if u >= 0 else "before the start" for u in range(t - level, t + 1)]
            return None if None in states else tuple(states)

        alike = cells(data, g, suffix)
        for i, own in enumerate(g):
            for t, y in enumerate(own):
                if len(alike[i][t]) > 1:
                    std = statistics.pstdev(alike[i][t]) + 1e-6 if norm == "mean_std_norm" else 1.0
                    total[i][t] += (level + 1) ** alpha * (y - statistics.fmean(alike[i][t])) / std
                    weights[i][t] += (level + 1) ** alpha
    raw = [[a / w if w else 0.0 for a, w in zip(*own, strict=True)] for own in zip(total, weights, strict=True)]
    return from_steps(data, raw), {}


def state_baseline(data: Sequence[Rollout], gamma: float, whiten: str, critic: bool) -> Result:
    g = [returns(r, gamma) for r in data]
    first = first_sampled(data)

    def baseline(i: int, t: int) -> float:
        visits = [
            g[j][u]
            for j, other in enumerate(data)
            for u, key in enumerate(other.keys)
            if j != i and other.group == data[i].group and key is not None and key == data[i].keys[t]
        ]
        known = first[i, t][1].value if critic else data[i].state_values[t]
        return statistics.fmean(visits) if visits else known

    raw = [[y - baseline(i, t) for t, y in enumerate(own)] for i, own in enumerate(g)]
    targets = {k: g[i][t] for (i, t), (k, _) in first.items()} if critic else {}
    return from_steps(data, raw, whiten), targets


def number(keys: Sequence[Hashable], i: int, t: int) -> Hashable:
    """A step's key; one of its own where it has none."""
    return ("unknown", i, t) if not keys or keys[t] is None else keys[t]


def state_of(data: Sequence[Rollout], i: int, t: int) -> Hashable:
    return data[i].group, number(data[i].keys, i, t)


def pair_of(data: Sequence[Rollout], i: int, t: int) -> Hashable:
    """State and action."""
    return state_of(data, i, t), number(data[i].actions, i, t)


def every_step(data: Sequence[Rollout]) -> list[tuple[int, int]]:
    return [(i, t) for i, r in enumerate(data) for t in range(len(r.tokens))]


def ragged(data: Sequence[Rollout], f: Callable[[int, int], float]) -> list[list[float]]:
    return [[f(i, t) for t in range(len(r.tokens))] for i, r in enumerate(data)]


def rtmc(data: Sequence[Rollout], gamma: float, prior: float) -> Result:
    g = [returns(r, gamma) for r in data]
    of_pair: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for i, t in every_step(data):
        of_pair[pair_of(data, i, t)].setdefault(i, g[i][t])  # The first visit of each trajectory.

    def advantage(i: int, t: int) -> float:
        visits = [x for (state, _), own in of_pair.items() if state == state_of(data, i, t) for x in own.values()]
        group = statistics.fmean(r.outcome for r in data if r.group == data[i].group)
        value = (sum(visits) + prior * group) / (len(visits) + prior)
        return statistics.fmean(of_pair[pair_of(data, i, t)].values()) - value

    return from_steps(data, ragged(data, advantage)), {}


def ecpo(
    data: Sequence[Rollout], gamma: float, step_weight: float, kappa: float, tau: float, norm: str, unit: str
) -> Result:
    g, outcome = [returns(r, gamma) for r in data], outcomes(data, norm, unit)
    raw = ragged(data, lambda i, t: outcome[i][t])
    visits = defaultdict(list)
    for i, t in every_step(data):
        visits[state_of(data, i, t)].append((i, t))
    for own in visits.values():
        actions = defaultdict(list)
        for i, t in own:
            actions[pair_of(data, i, t)].append(g[i][t])
        mean = statistics.fmean(g[i][t] for i, t in own)
        shrunk = {a: (sum(x) + kappa * mean) / (len(x) + kappa) for a, x in actions.items()}
        between = sum(len(x) * (statistics.fmean(x) - mean) ** 2 for x in actions.values()) / len(own)
        within = sum(len(x) * statistics.pvariance(x) for x in actions.values()) / len(own)
        trust = math.tanh(len(own) / tau) * between / (between + within + 1e-8)
        of_visits = [shrunk[pair_of(data, i, t)] for i, t in own]
        for i, t in own if len(actions) > 1 else ():
            raw[i][t] += step_weight * trust * normalise(shrunk[pair_of(data, i, t)], of_visits, norm)
    return from_steps(data, raw), {}


def salt(data: Sequence[Rollout], history: int, norm: str, unit: str) -> Result:
    outcome = outcomes(data, norm, unit)

    def edge(i: int, t: int) -> Hashable:
        after = state_of(data, i, t + 1) if t + 1 < len(data[i].tokens) else "end"
        before = [pair_of(data, i, u) if u >= 0 else "before the start" for u in range(t - history, t)]
        return pair_of(data, i, t), after, tuple(before)

    shared = defaultdict(list)
    for i, t in every_step(data):
        shared[edge(i, t)].append(outcome[i][t])
    return from_steps(data, ragged(data, lambda i, t: statistics.fmean(shared[edge(i, t)]))), {}


def graph_gpo(
    data: Sequence[Rollout],
    omega: float,
    relative: bool,
    threshold: float,
    step_weight: float,
    norm: str,
    unit: str,
) -> Result:
    """Distances by shortening them, edge by edge, until none is shorter."""
    outcome = outcomes(data, norm, unit)
    edges = []
    for i, t in every_step(data):
        last = t + 1 == len(data[i].tokens)
        after = state_of(data, i, t + 1) if not last else "success" if sum(data[i].rewards) > threshold else "end"
        edges.append((state_of(data, i, t), after, (i, t)))
    distance = defaultdict(lambda: math.inf, success=0.0)
    for _ in edges:
        for before, after, _ in edges:
            distance[before] = min(distance[before], 1 + distance[after])

    def steps_to_success(group: int, state: Hashable) -> float:
        of_group = [distance[s] for s, _, (i, _) in edges if data[i].group == group and distance[s] < math.inf]
        return min(distance[state], max([*of_group, 0.0]) + 1)

    value = {}
    for before, after, (i, t) in edges:
        exponent = steps_to_success(data[i].group, after) - (
            steps_to_success(data[i].group, before) - 1 if relative else 0
        )
        value[i, t] = 10 * omega**exponent

    def advantage(i: int, t: int) -> float:
        visits = [value[place] for s, _, place in edges if s == state_of(data, i, t)]
        step = normalise(value[i, t], visits, norm) if len(set(visits)) > 1 else 0.0
        return outcome[i][t] + step_weight * step

    return from_steps(data, ragged(data, advantage)), {}


def standardise(x: float, cell: Sequence[float]) -> float:
    """(x − mean) / (√(var + 1e-8) + 1e-6) with the population's variance; 0 for a lone element."""
    if len(cell) < 2:
        return 0.0
    return (x - statistics.fmean(cell)) / (math.sqrt(statistics.pvariance(cell) + 1e-8) + 1e-6)


def gains(r: Rollout, belief: str) -> list[float]:
    """What each step but the last does to the belief."""
    p = [math.exp(b) if belief == "probability" else b for b in r.beliefs]
    return [after - before for before, after in itertools.pairwise(p)]


def igpo(data: Sequence[Rollout], gamma: float, belief: str, normalise: str) -> Result:
    rewards = [[*gains(r, belief), r.outcome] for r in data]

    def cell(i: int, t: int) -> list[float]:
        own = [
            (x, u == len(r) - 1)
            for other, r in zip(data, rewards, strict=True)
            if other.group == data[i].group
            for u, x in enumerate(r)
        ]
        last = t == len(rewards[i]) - 1
        return [x for x, of_outcome in own if normalise == "joint" or of_outcome == last]

    scores = [[standardise(x, cell(i, t)) for t, x in enumerate(own)] for i, own in enumerate(rewards)]
    return from_steps(data, [gae(own, [0.0] * len(own), 0.0, gamma, 1.0) for own in scores]), {}


def outcome_scores(data: Sequence[Rollout]) -> list[float]:
    return [standardise(r.outcome, [x.outcome for x in data if x.group == r.group]) for r in data]


def a2tgpo(data: Sequence[Rollout], gamma: float, belief: str, step_weight: float) -> Result:
    own = [gains(r, belief) for r in data]
    scores = [
        [
            standardise(x, [g[t] for r, g in zip(data, own, strict=True) if r.group == data[i].group and t < len(g)])
            for t, x in enumerate(g)
        ]
        for i, g in enumerate(own)
    ]
    raw = []
    for outcome, z in zip(outcome_scores(data), scores, strict=True):
        sums = [sum(gamma ** (u - t) * z[u] for u in range(t, len(z))) / math.sqrt(len(z) - t) for t in range(len(z))]
        raw.append([*(outcome + step_weight * x for x in sums), outcome])
    return from_steps(data, raw), {}


def trace(
    data: Sequence[Rollout],
    gap: float,
    horizon: int,
    decay: float,
    step_weight: float,
    terminal_weight: float,
    frozen: bool,
) -> Result:
    assert frozen
    raw = []
    for r in data:
        group = [x.outcome for x in data if x.group == r.group]
        outcome = (r.outcome - statistics.fmean(group)) / (statistics.pstdev(group) + 1e-6) if len(group) > 1 else 0.0
        value = [math.log((gap - r.beliefs[0]) / (gap - b)) for b in r.beliefs]
        change = [after - before for before, after in itertools.pairwise(value)]
        own = []
        for t in range(len(change)):
            window = range(t, min(t + horizon, len(change)))
            credit = sum(decay ** (u - t) * change[u] for u in window) / sum(decay ** (u - t) for u in window)
            if window[-1] == len(change) - 1:
                credit += terminal_weight * decay ** (len(change) - t) * outcome
            own.append(outcome + step_weight * credit)
        raw.append([*own, outcome])
    return from_steps(data, raw), {}

"""Games with few states, told in words, and what policies earn in them, exactly."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

State = Hashable
CONVERGED = 1e-12


class Chance(NamedTuple):
    """One of the ways in which an action can turn out.

    Attributes:
      probability: positive; those of all ways sum to 1.
      reward: of the step.
      state: the next one; None where the game ends.
      success: True if it ends well.
    """

    probability: float
    reward: float
    state: State | None
    success: bool = False


@dataclasses.dataclass(frozen=True)
class Game:
    """A Markov decision process told in words; environment and exact values read the same one.

    Attributes:
      start: the first state. States are plain JSON, with tuples for lists.
      actions: state -> what can be said there, in lower case.
      outcomes: (state, action) -> its chances; action None is a response that is no action.
      tell: state -> what is shown of it.
      potential: state -> Φ for potential-based shaping; the end has 0.
    """

    start: State
    actions: Callable[[State], Sequence[str]]
    outcomes: Callable[[State, str | None], Sequence[Chance]]
    tell: Callable[[State], str]
    potential: Callable[[State], float]


def reachable(game: Game) -> dict[State, Sequence[str]]:
    """The states that actions can lead to, each with its own actions."""
    out: dict[State, Sequence[str]] = {}
    ahead = [game.start]
    while ahead:
        state = ahead.pop()
        if state not in out:
            out[state] = game.actions(state)
            ahead += [c.state for a in out[state] for c in game.outcomes(state, a) if c.state is not None]
    return out


def action_values(game: Game, *, gamma: float = 1.0, steps: int | None = None) -> dict[State, dict[str, float]]:
    """Q*(s, a): expected return of an action that the best ones follow, by value iteration from 0.

    Q(s, a) = Σ p(r, s') [r + γ maxₐ' Q(s', a')]

    Args:
      game: returns must be bounded where `gamma` is 1.
      gamma: discount of a step.
      steps: how many are left, this one included; None for no limit.
    """
    return _evaluate(game, np.maximum.reduceat, gamma, steps)


def policy_return(
    game: Game, policy: Callable[[State], Mapping[str, float]], *, gamma: float = 1.0, steps: int | None = None
) -> float:
    """Expected return of a policy from the start.

    Args:
      game: see `action_values`.
      policy: state -> probability of each action; those that are left out have none.
      gamma, steps: see `action_values`.
    """
    pairs = reachable(game)
    weights = np.array([policy(state).get(action, 0.0) for state, actions in pairs.items() for action in actions])
    values = _evaluate(game, lambda q, first: np.add.reduceat(weights * q, first), gamma, steps)[game.start]
    return sum(policy(game.start).get(action, 0.0) * value for action, value in values.items())


def _evaluate(
    game: Game, to_states: Callable[[np.ndarray, np.ndarray], np.ndarray], gamma: float, steps: int | None
) -> dict[State, dict[str, float]]:
    """Q(s, a), where `to_states` makes V [S] of Q [pairs] and the place of each state's first pair [S]."""
    states = reachable(game)
    index = {state: i for i, state in enumerate(states)}
    pairs = [(state, action) for state, actions in states.items() for action in actions]
    first = np.cumsum([0, *(len(actions) for actions in states.values())])[:-1]
    reward, moves = np.zeros(len(pairs)), np.zeros((len(pairs), len(states)))
    for i, (state, action) in enumerate(pairs):
        for chance in game.outcomes(state, action):
            reward[i] += chance.probability * chance.reward
            if chance.state is not None:
                moves[i, index[chance.state]] += chance.probability
    q, values = np.zeros(len(pairs)), np.zeros(len(states))
    for _ in itertools.count() if steps is None else range(steps):
        q, before = reward + gamma * moves @ values, values
        values = to_states(q, first)
        if np.abs(values - before).max() < CONVERGED:
            break
    out: dict[State, dict[str, float]] = {state: {} for state in states}
    for (state, action), value in zip(pairs, q, strict=True):
        out[state][action] = float(value)
    return out

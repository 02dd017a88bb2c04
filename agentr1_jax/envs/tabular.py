"""Games with few states, told in words: their exact values, and their Task and Env."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Action, Expert, Observation, Row, Transition
from agentr1_jax.envs.datasets import LAYOUT_SPLITS, ProceduralTask, draw_row
from agentr1_jax.trajectory import Outcome
from agentr1_jax.validation import STRICT

State = Hashable
NO_ACTION = "That is no action here."
REWARD_PARTS = ("goal", "side")
EXPERT_GAMMA = 0.95
"""Discount under which the expert's actions are best: it also hurries."""
CONVERGED = 1e-12


class Chance(NamedTuple):
    """One of the ways in which an action can turn out.

    Attributes:
      probability: positive; those of all ways sum to 1.
      reward: reward of the step.
      state: next state; None where the game ends.
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
      start: first state. States are plain JSON, with tuples for lists.
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


@dataclass(frozen=True, config=STRICT)
class GameRewards:
    """Weights of the reward parts of a game."""

    goal: float = 1.0
    """of the reward of the step that ends the game well"""
    side: float = 1.0
    """of all other rewards"""


def reachable(game: Game) -> dict[State, Sequence[str]]:
    """Return the states that actions can lead to, each with its own actions."""
    out: dict[State, Sequence[str]] = {}
    ahead = [game.start]
    while ahead:
        state = ahead.pop()
        if state not in out:
            out[state] = game.actions(state)
            ahead += [c.state for a in out[state] for c in game.outcomes(state, a) if c.state is not None]
    return out


def action_values(game: Game, *, gamma: float = 1.0) -> dict[State, dict[str, float]]:
    """Return Q*(s, a), the expected return of an action that the best ones follow, by value iteration from 0.

    Q(s, a) = Σ p(r, s') [r + γ maxₐ' Q(s', a')]

    Args:
      game: returns must be bounded where `gamma` is 1.
      gamma: discount of a step.
    """
    states = reachable(game)
    index = {state: i for i, state in enumerate(states)}
    pairs = [(state, action) for state, actions in states.items() for action in actions]
    first_pairs = np.cumsum([0, *(len(actions) for actions in states.values())])[:-1]
    rewards, moves = np.zeros(len(pairs)), np.zeros((len(pairs), len(states)))
    for i, (state, action) in enumerate(pairs):
        for chance in game.outcomes(state, action):
            rewards[i] += chance.probability * chance.reward
            if chance.state is not None:
                moves[i, index[chance.state]] += chance.probability

    values, change = np.zeros(len(states)), np.inf
    while change >= CONVERGED:
        q = rewards + gamma * moves @ values
        new = np.maximum.reduceat(q, first_pairs)
        values, change = new, np.abs(new - values).max()
    out: dict[State, dict[str, float]] = {state: {} for state in states}
    for (state, action), value in zip(pairs, q, strict=True):
        out[state][action] = float(value)
    return out


def make_tabular_task(
    name: str,
    draw: Callable[[random.Random], Row | None],
    game: Callable[[Row], Game],
    mistakes: float,
    weights: GameRewards,
) -> ProceduralTask:
    """Return a Task whose rows are games. Its splits `train`, `eval` and `dev` have no layout in common.

    Args:
      name: begins the ids of rows.
      draw: a random row without id, plain JSON with `question` (the rules, which open an episode) and `layout` (text by
        which rows are dealt to splits); None where the draw is to be made again.
      game: row -> its game.
      mistakes: probability with which the expert does not choose, at each step; then it does what is named first, or
        anything, with equal probability.
      weights: of `REWARD_PARTS`; the metrics `return` and `expected_return` are the game's own, unweighted.

    Raises:
      ValueError: there are too few layouts for three splits.
    """

    def make_expert(row: Row, seed: int) -> Expert:
        rng = random.Random(f"{row['id']}/expert/{seed}")
        return _play(game(row), rng, mistakes).send  # type: ignore[return-value]

    def make_texts() -> Iterator[str]:
        yield NO_ACTION
        for index in itertools.count():
            row = task.row("train", index)
            its_game = game(row)
            states = reachable(its_game)
            yield from dict.fromkeys([row["question"], *map(its_game.tell, states), *itertools.chain(*states.values())])

    task = ProceduralTask(
        name=name,
        splits=LAYOUT_SPLITS,
        make_row=functools.partial(draw_row, name, draw=draw, layout=lambda row: row["layout"]),
        make_env=lambda: TabularEnv(game, dataclasses.asdict(weights)),
        reward_parts=REWARD_PARTS,
        make_expert=make_expert,
        make_texts=make_texts,
    )
    return task


class TabularEnv:
    """One episode of a row's game. A response that is no action costs a step, is told so and counted.

    Chance is drawn by row, seed, state and how often the episode was in that state: equal seeds and actions make equal
    episodes, other seeds others.
    """

    def __init__(self, game: Callable[[Row], Game], weights: Mapping[str, float]) -> None:
        self._make_game = game
        self._weights = weights

    async def reset(self, row: Row, seed: int) -> Observation:
        """Start an episode; the first observation is the row's rules and its first state."""
        self._row, self._seed, self._game = row, seed, self._make_game(row)
        self._state, self._return, self._expected, self._success = self._game.start, 0.0, 0.0, 0.0
        self._draws: collections.Counter[State] = collections.Counter()
        opening = f"{row['question']}\n{self._game.tell(self._state)}"
        return Observation(messages=[{"role": "user", "content": opening}], **self._anchor())

    async def step(self, action: Action) -> Transition:
        """Apply one response; case and spaces do not matter."""
        said = " ".join(action.text.lower().split())
        known = said in self._game.actions(self._state)
        chances = self._game.outcomes(self._state, said if known else None)
        chance = self._draw(chances)
        self._expected += sum(c.probability * c.reward for c in chances)
        self._return += chance.reward
        self._success += chance.success
        goal = chance.reward if chance.success else 0.0
        raw = dict(zip(REWARD_PARTS, (goal, chance.reward - goal), strict=True))
        parts = {name: self._weights[name] * x for name, x in raw.items()}
        ended = chance.state is None
        return Transition(
            observation=None if ended else self._enter(chance.state, known),
            reward=sum(parts.values()),
            reward_parts=parts,
            terminated=ended,
            outcome=Outcome.ENV_DONE if ended else None,
            metrics=self.truncate() if ended else {},
            action_key=said if known else NO_ACTION,
            info={"errors": {} if known else {"no_action": 1}},
        )

    def truncate(self) -> Mapping[str, float]:
        """Return `success`, which is also `em`, `return` and `expected_return` of the episode so far.

        The latter takes the mean of the rewards that an action can have in its state, Σ E[r | s, a]: it has the mean
        of `return`, without the noise of payments.
        """
        returns = {"return": self._return, "expected_return": self._expected}
        return {"em": self._success, "success": self._success, **returns}

    def _enter(self, state: State, known: bool) -> Observation:
        self._state = state
        told = self._game.tell(state)
        return Observation(text=told if known else f"{NO_ACTION} {told}", role="user", **self._anchor())

    def _anchor(self) -> dict[str, Any]:
        key = f"{self._row['id']}|{json.dumps(self._state)}"
        told = self._game.tell(self._state)
        return {"state_key": key, "potential": self._game.potential(self._state), "evidence": told}

    def _draw(self, chances: Sequence[Chance]) -> Chance:
        index = self._draws[self._state]
        self._draws[self._state] += 1
        rng = random.Random(f"{self._row['id']}/{self._seed}/{self._state}/{index}")
        return rng.choices(chances, [chance.probability for chance in chances])[0]


def _play(game: Game, rng: random.Random, mistakes: float) -> Generator[str, str | None, None]:
    values, state = action_values(game, gamma=EXPERT_GAMMA), game.start
    while True:
        most = max(values[state].values())
        best = [action for action, value in values[state].items() if value > most - 1e-9]
        named = list(values[state])
        action = rng.choice(best if rng.random() >= mistakes else rng.choice([named[:1], named]))
        told = yield action
        after = [c.state for c in game.outcomes(state, action) if c.state is not None and game.tell(c.state) == told]
        if not after:
            raise ValueError(
                f"the expert was shown {told!r}, which does not follow from {action!r}; if it was cut, raise "
                "budget.observation_tokens"
            )
        state = after[0]

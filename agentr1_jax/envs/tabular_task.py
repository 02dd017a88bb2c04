"""Games of `tabular` as a Task: rows, environments, an expert that errs, texts."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import random
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Action, Expert, Observation, Row, Transition
from agentr1_jax.envs.tabular import Chance, Game, State, action_values, reachable
from agentr1_jax.trajectory import Outcome
from agentr1_jax.validation import STRICT

NO_ACTION = "That is no action here."
SPLITS = ("eval", "dev", "train", "train", "train", "train", "train", "train")
"""Whose is each eighth of all layouts."""
REWARD_PARTS = ("goal", "side")
DRAWS = 3000
EXPERT_GAMMA = 0.95
"""Discount under which the expert's actions are best: it also hurries."""


@dataclass(frozen=True, config=STRICT)
class GameRewards:
    """Weights of the reward parts of a game."""

    goal: float = 1.0
    """of the reward of the step that ends the game well"""
    side: float = 1.0
    """of all other rewards"""


@dataclasses.dataclass(frozen=True)
class TabularTask:
    """A Task whose rows are games. Its splits `train`, `eval` and `dev` have no layout in common.

    Attributes:
      name: begins the ids of rows.
      draw: a random row without id, plain JSON with `question` (the rules, which open an episode) and `layout` (text by
        which rows are dealt to splits); None where the draw is to be made again.
      game: row -> its game.
      mistakes: probability with which the expert does not choose, at each step; then it does what is named first, or
        anything, with equal probability.
      reward_weights: of `REWARD_PARTS`; `return` and `optimum` are the game's own, unweighted.

    Raises:
      ValueError: `mistakes` is no probability, a weight has no part, or there are too few layouts for three splits.
    """

    name: str
    draw: Callable[[random.Random], Row | None]
    game: Callable[[Row], Game]
    mistakes: float
    reward_weights: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(REWARD_PARTS, 1.0))

    def __post_init__(self) -> None:
        for split in set(SPLITS):
            self.row(split, 0)

    @property
    def reward_parts(self) -> Sequence[str]:
        """Names of the rewards paid at the goal, and beside it."""
        return REWARD_PARTS

    def row(self, split: str, index: int) -> Row:
        """Row `index` of a split. Raises ValueError on another split or a negative index."""
        if split not in SPLITS or index < 0:
            known = ", ".join(sorted(set(SPLITS)))
            raise ValueError(f"{self.name} has no row {split!r} {index}; splits are {known}, rows start at 0")
        rng = random.Random(f"{self.name}/{split}/{index}")
        for _ in range(DRAWS):
            drawn = self.draw(rng)
            if drawn is not None and split_of(drawn["layout"]) == split:
                return {"id": f"{self.name}/{split}/{index}", **drawn}
        raise ValueError(f"{self.name}: its settings leave too few layouts, none of {DRAWS} is for the split {split!r}")

    def size(self, split: str) -> int | None:
        """None: rows are procedural, though layouts come again."""
        return None

    def env(self) -> TabularEnv:
        """A fresh environment."""
        return TabularEnv(self.game, self.reward_weights)

    def expert(self, row: Row, seed: int) -> Expert:
        """An expert that errs with probability `mistakes` at each step; equal seeds give equal decisions."""
        rng = random.Random(f"{row['id']}/expert/{seed}")
        return _play(self.game(row), rng, self.mistakes).send  # type: ignore[return-value]

    def texts(self, count: int) -> Sequence[str]:
        """Rules, observations and actions of training rows, one a text."""
        return list(itertools.islice(self._texts(), count))

    def optimum(self, row: Row, steps: int | None = None) -> float:
        """Expected return of the best policy on a row within so many steps; None for no limit."""
        game = self.game(row)
        return max(action_values(game, steps=steps)[game.start].values())

    def _texts(self) -> Iterator[str]:
        yield NO_ACTION
        for index in itertools.count():
            row = self.row("train", index)
            game = self.game(row)
            states = reachable(game)
            yield from dict.fromkeys([row["question"], *map(game.tell, states), *itertools.chain(*states.values())])


class TabularEnv:
    """One episode of a row's game. A response that is no action costs a step, is told so and counted.

    Chance is drawn by row, seed, state and how often the episode was in that state: equal seeds and actions make equal
    episodes, other seeds others.
    """

    def __init__(self, game: Callable[[Row], Game], weights: Mapping[str, float]) -> None:
        self._make = game
        self._weights = weights
        self._row: Row = {}

    async def reset(self, row: Row, seed: int) -> Observation:
        """Starts an episode; the first observation is the row's rules and its first state."""
        self._row, self._seed, self._game = row, seed, self._make(row)
        self._state, self._return, self._success = self._game.start, 0.0, 0.0
        self._draws: collections.Counter[State] = collections.Counter()
        opening = f"{row['question']}\n{self._game.tell(self._state)}"
        return Observation(messages=[{"role": "user", "content": opening}], **self._anchor())

    async def step(self, action: Action) -> Transition:
        """Applies one response; case and spaces do not matter."""
        said = " ".join(action.text.lower().split())
        known = said in self._game.actions(self._state)
        chance = self._draw(self._game.outcomes(self._state, said if known else None))
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
            info={"errors": {} if known else {"no_action": 1}},
        )

    def truncate(self) -> Mapping[str, float]:
        """`success`, which is also `em`, and `return` of the episode so far."""
        return {"em": self._success, "success": self._success, "return": self._return}

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


def split_of(layout: str) -> str:
    """The split that a layout belongs to."""
    return SPLITS[zlib.crc32(layout.encode()) % len(SPLITS)]


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

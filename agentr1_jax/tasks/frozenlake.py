"""FrozenLake as text: over the ice from S to G past the holes H, where a step may slide.

The rules are Gymnasium's (https://gymnasium.farama.org/environments/toy_text/frozen_lake/), with a map for each row:

    Go over the ice F from S to G, not into H.
    S F F F
    F H F H
    F F F H
    H F F G
    At 1 1: east ice south ice west wall north wall        go east
    At 1 2: east ice south hole west ice north wall        go east
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Row
from agentr1_jax.envs.datasets import ProceduralTask
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.tabular import Chance, Game, GameRewards, make_tabular_task
from agentr1_jax.validation import STRICT, Fraction

MOVES = {"east": (0, 1), "south": (1, 0), "west": (0, -1), "north": (-1, 0)}
CELLS = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}
RULES = "Go over the ice F from S to G, not into H."
Cell = tuple[int, int]


@dataclass(frozen=True, config=STRICT)
class FrozenLakeConfig:
    """Keys of `task.frozenlake`."""

    mistakes: Fraction = 0.7
    """probability that the expert errs, at each step"""
    size: Annotated[int, Ge(3), Le(9)] = 4
    """cells of a side"""
    holes: Fraction = 0.2
    """share of holes among all cells but the two corners"""
    slip: Fraction = 0.0
    """probability that a step slides to a side; 2/3 is Gymnasium's slippery lake"""
    rewards: GameRewards = GameRewards()
    """weights of the reward parts"""


@register("frozenlake", FrozenLakeConfig)
def make_frozenlake(config: FrozenLakeConfig, run: TaskContext) -> ProceduralTask:
    """Make FrozenLake: the goal pays 1, and an episode ends there, in a hole, or by the budget."""
    return make_tabular_task(
        name="frozenlake",
        draw=functools.partial(draw, size=config.size, holes=config.holes),
        game=functools.partial(game, slip=config.slip),
        mistakes=config.mistakes,
        weights=config.rewards,
    )


def game(row: Row, *, slip: float) -> Game:
    """Return the game of a row, whose states are cells [row, column]. By a wall, or what is no action, one stays.

    Φ = −(moves from here to the goal) / (moves from the start to the goal), on the shortest way past the holes.
    """
    lake = row["layout"].split("/")
    far = distances(lake)
    return Game(
        start=(0, 0),
        actions=lambda cell: [f"go {move}" for move in MOVES],
        outcomes=functools.partial(_outcomes, lake, slip),
        tell=functools.partial(_tell, lake),
        potential=lambda cell: -far[cell] / far[0, 0],  # type: ignore[index]
    )


def _outcomes(lake: Sequence[str], slip: float, cell: Any, action: str | None) -> list[Chance]:
    if action is None:
        return [Chance(1.0, 0.0, cell)]
    names = list(MOVES)
    ahead = names.index(action.removeprefix("go "))
    chances = []
    for turn, probability in ((0, 1 - slip), (-1, slip / 2), (1, slip / 2)):
        if probability > 0:
            to, kind = _look(lake, cell, names[(ahead + turn) % 4])
            ends = kind in ("hole", "goal")
            chances.append(Chance(probability, float(kind == "goal"), None if ends else to, success=kind == "goal"))
    return chances


def _tell(lake: Sequence[str], cell: Any) -> str:
    return f"At {cell[0] + 1} {cell[1] + 1}: {' '.join(f'{move} {_look(lake, cell, move)[1]}' for move in MOVES)}"


def _look(lake: Sequence[str], cell: Cell, move: str) -> tuple[Cell, str]:
    """The cell that a move leads to, and what is that way."""
    to = cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
    return (to, CELLS[lake[to[0]][to[1]]]) if _inside(lake, to) else (cell, "wall")


def distances(lake: Sequence[str]) -> dict[Cell, int]:
    """Return the moves to the goal, the lower right corner, from every cell that has a way past the holes."""
    goal = len(lake) - 1, len(lake[-1]) - 1
    out, ahead = {goal: 0}, [goal]
    for row, column in ahead:
        for down, right in MOVES.values():
            cell = row + down, column + right
            if _inside(lake, cell) and lake[cell[0]][cell[1]] != "H" and cell not in out:
                out[cell] = out[row, column] + 1
                ahead.append(cell)
    return out


def _inside(lake: Sequence[str], cell: Cell) -> bool:
    return 0 <= cell[0] < len(lake) and 0 <= cell[1] < len(lake[0])


def draw(rng: random.Random, *, size: int, holes: float) -> Row | None:
    """Draw a row: a map of size x size cells; None where no way leads past the holes."""
    cells = [*("H" if rng.random() < holes else "F" for _ in range(size**2))]
    cells[0], cells[-1] = "S", "G"
    lake = ["".join(cells[i : i + size]) for i in range(0, size**2, size)]
    if (0, 0) not in distances(lake):
        return None
    return {"question": "\n".join([RULES, *(" ".join(line) for line in lake)]), "layout": "/".join(lake)}

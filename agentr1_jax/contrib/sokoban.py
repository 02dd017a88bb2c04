"""Task `sokoban`: push every box onto a target, in a room drawn as text; boxes are never pulled.

    _ _ # _
    _ @ $ .
    _ _ _ _
    _ _ _ _        right

Signs as in level files: @ player, + player on a target, $ box, * box on a target, . target, # wall, _ floor. The edge
of the room is wall. Levels are drawn by playing backwards from a solved state, so that each has a solution.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Le, Lt
from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Row
from agentr1_jax.envs.datasets import ProceduralTask
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.tabular import Chance, Game, GameRewards, make_tabular_task
from agentr1_jax.validation import STRICT, Count, Fraction

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
RULES = "You are @. Push each box $ onto a target. Say up, down, left or right. # is wall, * a box on a target."
MOST_STATES = 2000
"""Limit on the states of a room; the exact values and the expert enumerate all of them."""
Cell = tuple[int, int]
Boxes = tuple[Cell, ...]
State = tuple[Cell, Boxes]
"""Cell of the player, and the sorted cells of the boxes."""


@dataclass(frozen=True, config=STRICT)
class SokobanConfig:
    """Keys of `task.sokoban`."""

    mistakes: Fraction = 0.7
    """probability that the expert errs, at each step"""
    size: Annotated[int, Ge(3), Le(6)] = 4
    """cells per side of the room"""
    boxes: Annotated[int, Ge(1), Le(4)] = 1
    """number of boxes; size and boxes may make 2000 states at most, as 6 and 1 or 4 and 2 do"""
    walls: Fraction = 0.15
    """probability that a cell is wall"""
    least_moves: Count = 3
    """least number of moves of a level's shortest solution"""
    most_moves: Count = 10
    """largest number of moves of a level's shortest solution"""
    on_target: Annotated[float, Ge(0), Lt(1)] = 0.1
    """reward for pushing a box other than the last onto a target, and cost of pushing it off"""
    rewards: GameRewards = GameRewards()
    """weights of the reward parts"""

    def __post_init__(self) -> None:
        states = self.size**2 * math.comb(self.size**2 - 1, self.boxes)
        if states > MOST_STATES:
            raise ValueError(
                f"size is {self.size} and boxes is {self.boxes}: {states} states; at most {MOST_STATES} are allowed, "
                "as 6 and 1 or 4 and 2 make"
            )
        if self.least_moves > self.most_moves:
            raise ValueError(f"least_moves is {self.least_moves}, more than most_moves ({self.most_moves})")


@register("sokoban", SokobanConfig)
def make_sokoban(config: SokobanConfig, run: TaskContext) -> ProceduralTask:
    """Return the Task: the last box on its target pays 1 and ends an episode; otherwise only the budget ends it.

    Raises:
      ValueError: the settings leave too few levels, or the budget too few moves.
    """
    most = config.most_moves
    why = f"solutions have up to task.sokoban.most_moves ({most}) moves"
    run.check_steps(most, "sokoban", why, "lower task.sokoban.most_moves")
    return make_tabular_task(
        name="sokoban",
        draw=functools.partial(_draw, config),
        game=functools.partial(game, on_target=config.on_target),
        mistakes=config.mistakes,
        weights=config.rewards,
    )


class Room(NamedTuple):
    """The fixed part of a level; there is a target for each box."""

    size: int
    walls: frozenset[Cell]
    targets: frozenset[Cell]

    def is_free(self, cell: Cell) -> bool:
        """Return True for a cell of the room that is no wall."""
        return 0 <= cell[0] < self.size and 0 <= cell[1] < self.size and cell not in self.walls


def game(row: Row, *, on_target: float) -> Game:
    """Return the game of a row. A move against a wall or a stuck box, or an invalid action, changes nothing.

    Φ(s) = −length(s) / length(start), the number of moves of the shortest solution. A state without solution counts one
    move more than the farthest state that has one.
    """
    room, start = read_level(row["layout"])
    lengths = solution_lengths(room, len(start[1]))
    unsolvable = max(lengths.values()) + 1
    return Game(
        start=start,
        actions=lambda state: list(MOVES),
        outcomes=functools.partial(_outcomes, room, on_target),
        tell=lambda state: "\n".join(" ".join(line) for line in draw_board(room, state)),  # type: ignore[arg-type]
        potential=lambda state: -lengths.get(state, unsolvable) / lengths[start],  # type: ignore[call-overload]
    )


def read_level(layout: str) -> tuple[Room, State]:
    """Return room and first state of a level, whose lines are joined by `/`, the top one first."""
    signs = {(r, c): sign for r, line in enumerate(layout.split("/")) for c, sign in enumerate(line)}
    cells = {kind: [cell for cell, sign in signs.items() if sign in kind] for kind in ("#", ".*+", "$*", "@+")}
    room = Room(layout.count("/") + 1, frozenset(cells["#"]), frozenset(cells[".*+"]))
    return room, (cells["@+"][0], tuple(sorted(cells["$*"])))


def draw_board(room: Room, state: State) -> list[str]:
    """Return the lines of the board, the top one first."""
    player, boxes = state

    def sign(cell: Cell) -> str:
        if cell in room.walls:
            return "#"
        on = cell in room.targets
        if cell == player:
            return "+" if on else "@"
        if cell in boxes:
            return "*" if on else "$"
        return "." if on else "_"

    return ["".join(sign((r, c)) for c in range(room.size)) for r in range(room.size)]


def next_state(room: Room, state: State, move: str) -> State:
    """Return the state after a move; the same state where the move is not possible."""
    player, boxes = state
    to = _next(player, move)
    if not room.is_free(to):
        return state
    if to not in boxes:
        return to, boxes
    beyond = _next(to, move)
    if not room.is_free(beyond) or beyond in boxes:
        return state
    return to, tuple(sorted({*boxes, beyond} - {to}))


@functools.lru_cache(maxsize=256)
def solution_lengths(room: Room, boxes: int) -> Mapping[State, int]:
    """Return the length of the shortest solution of every state that has one, by breadth-first search from the end."""
    ends = [tuple(sorted(ends)) for ends in itertools.combinations(room.targets, boxes)]
    inside = itertools.product(range(room.size), range(room.size))
    solved = [(cell, end) for cell in inside if room.is_free(cell) for end in ends if cell not in end]
    lengths: dict[State, int] = dict.fromkeys(solved, 0)
    queue = list(solved)
    for state in queue:
        for previous in _previous_states(room, state):
            if previous not in lengths:
                lengths[previous] = lengths[state] + 1
                queue.append(previous)
    return lengths


def _previous_states(room: Room, state: State) -> Iterator[State]:
    """Yield the states that one move leads to `state` from: the player steps back, with or without a box before it."""
    player, boxes = state
    for move, (down, right) in MOVES.items():
        back = player[0] - down, player[1] - right
        if not room.is_free(back) or back in boxes:
            continue
        yield back, boxes
        pushed = _next(player, move)
        if pushed in boxes:
            yield back, tuple(sorted({*boxes, player} - {pushed}))


def _next(cell: Cell, move: str) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


def _outcomes(room: Room, on_target: float, state: Any, action: str | None) -> list[Chance]:
    after = state if action is None else next_state(room, state, action)
    before, now = (len(room.targets.intersection(boxes)) for _, boxes in (state, after))
    if now == len(room.targets):
        return [Chance(1.0, 1.0, None, success=True)]
    return [Chance(1.0, on_target * (now - before), after)]


def _draw(config: SokobanConfig, rng: random.Random) -> Row | None:
    """Return a random level; None where the draw has too little floor or no solution of the right length."""
    cells = list(itertools.product(range(config.size), range(config.size)))
    walls = frozenset(cell for cell in cells if rng.random() < config.walls)
    floor = [cell for cell in cells if cell not in walls]
    if len(floor) < 2 * config.boxes + 1:
        return None
    room = Room(config.size, walls, frozenset(rng.sample(floor, config.boxes)))
    by_moves: dict[int, list[State]] = {}
    for state, moves in solution_lengths(room, config.boxes).items():
        by_moves.setdefault(moves, []).append(state)
    lengths = [moves for moves in by_moves if config.least_moves <= moves <= config.most_moves]
    if not lengths:
        return None
    start = rng.choice(sorted(by_moves[rng.choice(lengths)]))
    return {"question": RULES, "layout": "/".join(draw_board(room, start))}

"""Task `sokoban`: push every box onto a target, in a room drawn as text; boxes are never pulled.

    _ _ # _
    _ @ $ .
    _ _ _ _
    _ _ _ _        right

Signs as in level files: @ player, + player on a target, $ box, * box on a target, . target, # wall, _ floor. The edge
of the room is wall. Levels are drawn by playing backwards from a solved state, so that each has a solution.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Lt
from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Row
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.tabular import Chance, Game
from agentr1_jax.envs.tabular_task import GameRewards, TabularTask, check_rates
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
    size: Annotated[int, Ge(3)] = 4
    """cells of a side"""
    boxes: Count = 1
    """boxes; with size they may make 2000 states at most, as 6 and 1 or 4 and 2 do"""
    walls: Fraction = 0.15
    """share of walls among all cells"""
    least_moves: Count = 3
    """moves of the shortest solution of a level, at least"""
    most_moves: Count = 10
    """moves of the shortest solution of a level, at most"""
    on_target: Annotated[float, Ge(0), Lt(1)] = 0.1
    """what a box that is not the last one pays on a target, and costs where it leaves one"""
    rewards: GameRewards = GameRewards()
    """weights of the reward parts"""


@register("sokoban", SokobanConfig)
def make_sokoban(config: SokobanConfig, run: TaskContext) -> TabularTask:
    """Make Sokoban. Raises ValueError where the settings leave too few levels, or the budget too few moves."""
    most = config.most_moves
    why = f"solutions have up to task.sokoban.most_moves ({most}) moves"
    run.check_steps(most, "sokoban", why, "lower task.sokoban.most_moves")
    settings = dataclasses.asdict(config)
    return sokoban_task(reward_weights=settings.pop("rewards"), **settings)


class Room(NamedTuple):
    """The fixed part of a level.

    Attributes:
      size: cells per side.
      walls: cells that nothing can enter.
      targets: cells that the boxes belong on, one for each box.
    """

    size: int
    walls: frozenset[Cell]
    targets: frozenset[Cell]

    def free(self, cell: Cell) -> bool:
        """Return whether a cell lies in the room and is no wall."""
        return 0 <= cell[0] < self.size and 0 <= cell[1] < self.size and cell not in self.walls


def sokoban_task(
    *,
    size: int = 4,
    boxes: int = 1,
    walls: float = 0.15,
    least_moves: int = 3,
    most_moves: int = 10,
    on_target: float = 0.1,
    mistakes: float = 0.7,
    **options: Any,
) -> TabularTask:
    """Return the Task. The last box on its target pays 1 and ends an episode; otherwise only the budget ends it.

    Args:
      size: cells per side, at least 3.
      boxes: number of boxes, at least 1; `size` and `boxes` together may make `MOST_STATES` states at most.
      walls: probability that a cell is wall.
      least_moves, most_moves: range of the length of a level's shortest solution.
      on_target: reward for pushing a box other than the last onto a target, and cost of pushing it off.
      mistakes, options: see `TabularTask`.

    Raises:
      ValueError: a setting is out of its range, or leaves too few levels.
    """
    check_rates("sokoban", walls=walls)
    states = size**2 * math.comb(size**2 - 1, boxes) if size >= 3 and boxes >= 1 else 0
    if not 0 < states <= MOST_STATES:
        raise ValueError(
            f"sokoban: size is {size} and boxes is {boxes}; size must be at least 3, boxes at least 1, and they may "
            f"make {MOST_STATES} states at most, as 6 and 1 or 4 and 2 do"
        )
    if not 1 <= least_moves <= most_moves:
        raise ValueError(
            f"sokoban: least_moves is {least_moves} and most_moves is {most_moves}; write 1 <= least_moves <= "
            "most_moves"
        )
    if not 0 <= on_target < 1:
        raise ValueError(f"sokoban: on_target is {on_target}; it must be at least 0 and below the 1 of the end")
    draw = functools.partial(_draw, size=size, boxes=boxes, walls=walls, least_moves=least_moves, most_moves=most_moves)
    return TabularTask("sokoban", draw, functools.partial(game, on_target=on_target), mistakes, **options)


def game(row: Row, *, on_target: float) -> Game:
    """Return the game of a row. A move against a wall or a stuck box, or an invalid action, changes nothing.

    Φ(s) = −moves_left(s) / moves_left(start). A state without solution counts one move more than the farthest state
    that has one.

    Args:
      row: task row whose `layout` is the level.
      on_target: reward for pushing a box other than the last onto a target, and cost of pushing it off.
    """
    room, start = read_level(row["layout"])
    left = moves_left(room, len(start[1]))
    dead = max(left.values()) + 1
    return Game(
        start=start,
        actions=lambda state: list(MOVES),
        outcomes=functools.partial(_outcomes, room, on_target),
        tell=lambda state: "\n".join(" ".join(line) for line in draw_board(room, state)),  # type: ignore[arg-type]
        potential=lambda state: -left.get(state, dead) / left[start],  # type: ignore[call-overload]
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
    if not room.free(to):
        return state
    if to not in boxes:
        return to, boxes
    beyond = _next(to, move)
    if not room.free(beyond) or beyond in boxes:
        return state
    return to, tuple(sorted({*boxes, beyond} - {to}))


@functools.lru_cache(maxsize=256)
def moves_left(room: Room, boxes: int) -> Mapping[State, int]:
    """Return the length of the shortest solution of every state that has one, by breadth-first search from the end."""
    ends = [tuple(sorted(ends)) for ends in itertools.combinations(room.targets, boxes)]
    inside = itertools.product(range(room.size), range(room.size))
    solved = [(cell, end) for cell in inside if room.free(cell) for end in ends if cell not in end]
    left: dict[State, int] = dict.fromkeys(solved, 0)
    queue = list(solved)
    for state in queue:
        for previous in _previous_states(room, state):
            if previous not in left:
                left[previous] = left[state] + 1
                queue.append(previous)
    return left


def _previous_states(room: Room, state: State) -> Iterator[State]:
    """Yield the states that one move leads to `state` from: the player steps back, with or without a box before it."""
    player, boxes = state
    for move, (down, right) in MOVES.items():
        back = player[0] - down, player[1] - right
        if not room.free(back) or back in boxes:
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


def _draw(rng: random.Random, *, size: int, boxes: int, walls: float, least_moves: int, most_moves: int) -> Row | None:
    cells = list(itertools.product(range(size), range(size)))
    wall = frozenset(cell for cell in cells if rng.random() < walls)
    floor = [cell for cell in cells if cell not in wall]
    if len(floor) < 2 * boxes + 1:
        return None
    room = Room(size, wall, frozenset(rng.sample(floor, boxes)))
    by_moves: dict[int, list[State]] = {}
    for state, moves in moves_left(room, boxes).items():
        by_moves.setdefault(moves, []).append(state)
    lengths = [moves for moves in by_moves if least_moves <= moves <= most_moves]
    if not lengths:
        return None
    start = rng.choice(sorted(by_moves[rng.choice(lengths)]))
    return {"question": RULES, "layout": "/".join(draw_board(room, start))}

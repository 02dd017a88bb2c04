"""Sokoban as text: boxes $ are pushed onto targets, and never pulled.

    _ _ # _
    _ @ $ .
    _ _ _ _
    _ _ _ _        right

Signs are those of level files: @ the player, + the player on a target, $ a box, * a box on a target, . a target,
# a wall, _ floor; the edge is wall. Levels are our own, drawn backwards from where they are solved.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from agentr1_jax.envs.base import Row
from agentr1_jax.envs.tabular import Chance, Game
from agentr1_jax.envs.tabular_task import TabularTask, check_rates

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
RULES = "You are @. Push each box $ onto a target. Say up, down, left or right. # is wall, * a box on a target."
MOST_STATES = 2000
"""Exact values and the expert count all of them."""
Cell = tuple[int, int]
Boxes = tuple[Cell, ...]
State = tuple[Cell, Boxes]
"""Where the player is, and where the boxes are, sorted."""


class Room(NamedTuple):
    """What never moves.

    Attributes:
      size: cells of a side.
      walls: cells that nothing enters.
      targets: of the boxes, as many as there are boxes.
    """

    size: int
    walls: frozenset[Cell]
    targets: frozenset[Cell]

    def free(self, cell: Cell) -> bool:
        """Whether there is floor."""
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
    """Sokoban as a Task; the last box on its target pays 1 and ends an episode. Else only the budget does.

    Args:
      size: cells of a side, at least 3.
      boxes: 1 or more; with `size` they may make `MOST_STATES` states at most.
      walls: share of the cells.
      least_moves, most_moves: length of the shortest solution of a level.
      on_target: what a box that is not the last one pays where it comes onto a target, and costs where it leaves one.
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
    """The game of a row. Against a wall, a box that cannot move, and by what is no action, nothing changes.

    Φ = −(moves that the solution lacks) / (moves that it lacks at the start). A state that no solution leads out of
    counts one move more than the farthest that has one.
    """
    room, start = read_level(row["layout"])
    left = moves_left(room, len(start[1]))
    dead = max(left.values()) + 1
    return Game(
        start=start,
        actions=lambda state: list(MOVES),
        outcomes=functools.partial(_outcomes, room, on_target),
        tell=lambda state: "\n".join(" ".join(line) for line in drawn(room, state)),  # type: ignore[arg-type]
        potential=lambda state: -left.get(state, dead) / left[start],  # type: ignore[call-overload]
    )


def read_level(layout: str) -> tuple[Room, State]:
    """Room and first state of a level: its lines from the top, joined by `/`."""
    signs = {(r, c): sign for r, line in enumerate(layout.split("/")) for c, sign in enumerate(line)}
    cells = {kind: [cell for cell, sign in signs.items() if sign in kind] for kind in ("#", ".*+", "$*", "@+")}
    room = Room(layout.count("/") + 1, frozenset(cells["#"]), frozenset(cells[".*+"]))
    return room, (cells["@+"][0], tuple(sorted(cells["$*"])))


def drawn(room: Room, state: State) -> list[str]:
    """The lines of the board."""
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


def moved(room: Room, state: State, move: str) -> State:
    """The state after a move; the same where it is refused."""
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
    """Moves of the shortest solution from every state that has one, found by playing backwards from the solved ones."""
    ends = [tuple(sorted(ends)) for ends in itertools.combinations(room.targets, boxes)]
    inside = itertools.product(range(room.size), range(room.size))
    solved = [(cell, end) for cell in inside if room.free(cell) for end in ends if cell not in end]
    left: dict[State, int] = dict.fromkeys(solved, 0)
    ahead = list(solved)
    for state in ahead:
        for earlier in _earlier(room, state):
            if earlier not in left:
                left[earlier] = left[state] + 1
                ahead.append(earlier)
    return left


def _earlier(room: Room, state: State) -> Iterator[State]:
    """The states from which one move leads to this one: the player steps back, alone or with the box it has pushed."""
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
    after = state if action is None else moved(room, state, action)
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
    return {"question": RULES, "layout": "/".join(drawn(room, start))}

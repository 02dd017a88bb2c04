"""KeyDoor: a key that is taken first pays last, and everything between pays at once, a little and at random.

With `rooms_before` the random payments come before the choice of a key, so that no return of that choice has them.

After Key-to-Door (Hung et al. 2019, https://arxiv.org/abs/1810.06721; with noise in between, Mesnard et al. 2021,
https://arxiv.org/abs/2011.09464). One step a room:

    The last door is red. Say take, go on or open door.
    Here: blue key, coin, red key, gold key.              take red key     0
    Room 2: pear, leaf.                                   take pear        0.08 ± noise
    Room 3: apple, stone.                                 go on            0
    Last room: door, leaf.                                open door        1
"""

from __future__ import annotations

import functools
import random
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Row
from agentr1_jax.envs.datasets import ProceduralTask
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.tabular import Chance, Game, GameRewards, make_tabular_task
from agentr1_jax.validation import STRICT, Fraction, NonNegative, Whole

COLOURS = ("red", "blue", "green", "gold", "black", "white", "brown", "pink", "grey", "orange")
WORTH = {"stone": 0.0, "leaf": 0.02, "nut": 0.04, "apple": 0.06, "pear": 0.08, "coin": 0.1}
"""What a thing pays in the mean."""
GO_ON, OPEN = "go on", "open door"


@dataclass(frozen=True, config=STRICT)
class KeyDoorConfig:
    """Keys of `task.keydoor`."""

    mistakes: Fraction = 0.7
    """probability that the expert errs, at each step"""
    rooms: Whole = 5
    """rooms between the keys and the door; an episode has two steps more than there are such rooms"""
    rooms_before: Whole = 0
    """rooms before the keys"""
    key_count: Annotated[int, Ge(2), Le(len(COLOURS))] = 3
    """keys, one of which fits"""
    noise: NonNegative = 0.3
    """a thing pays its mean plus or minus this"""
    rewards: GameRewards = GameRewards()
    """weights of the reward parts"""


@register("keydoor", KeyDoorConfig)
def make_keydoor(config: KeyDoorConfig, run: TaskContext) -> ProceduralTask:
    """Make KeyDoor. Raises ValueError where the budget ends an episode before the door."""
    steps = config.rooms_before + config.rooms + 2
    why = f"its door is {steps} steps away (task.keydoor.rooms_before + rooms + 2)"
    run.check_steps(steps, "keydoor", why, "lower task.keydoor.rooms")
    return make_tabular_task(
        name="keydoor",
        draw=functools.partial(draw, before=config.rooms_before, rooms=config.rooms, key_count=config.key_count),
        game=functools.partial(game, noise=config.noise),
        mistakes=config.mistakes,
        weights=config.rewards,
    )


def game(row: Row, *, noise: float) -> Game:
    """Return the game of a row; its states are [room, colour of the key that is carried or ""].

    Going on and everything that is no action pays 0; the door pays 1 to who carries its key, and ends the game in any
    case. Φ = −½ (actions that the open door still lacks): −1 without the right key, −½ with it.
    """
    return Game(
        start=(0, ""),
        actions=functools.partial(_actions, row),
        outcomes=functools.partial(_outcomes, row, noise),
        tell=functools.partial(_tell, row),
        potential=lambda state: -0.5 if state[1] == row["door"] else -1.0,  # type: ignore[index]
    )


def _actions(row: Row, state: Any) -> list[str]:
    taking = [f"take {thing}" for thing in row["rooms"][state[0]]]
    return [OPEN, *taking] if _is_last(row, state[0]) else [*taking, GO_ON]


def _outcomes(row: Row, noise: float, state: Any, action: str | None) -> list[Chance]:
    room, carried = state
    if action == OPEN:
        opens = carried == row["door"]
        return [Chance(1.0, float(opens), None, success=opens)]
    taken = "" if action is None else action.removeprefix("take ")
    if taken.endswith(" key"):
        carried = taken.removesuffix(" key")
    after = None if _is_last(row, room) else (room + 1, carried)
    if taken in WORTH:
        return [Chance(0.5, WORTH[taken] + noise, after), Chance(0.5, WORTH[taken] - noise, after)]
    return [Chance(1.0, 0.0, after)]


def _tell(row: Row, state: Any) -> str:
    room, _ = state
    things = ", ".join(row["rooms"][room])
    if _is_last(row, room):
        return f"Last room: door, {things}."
    return f"{f'Room {room + 1}' if room else 'Here'}: {things}."


def _is_last(row: Row, room: int) -> bool:
    return room == len(row["rooms"]) - 1


def draw(rng: random.Random, *, before: int, rooms: int, key_count: int) -> Row:
    """Draw a row: `before` rooms, the room of the keys, `rooms` rooms and the last room."""
    things = list(WORTH)
    colours = rng.sample(COLOURS, key_count)
    door = rng.choice(colours)
    keys = [*(f"{colour} key" for colour in colours), rng.choice(things)]
    rng.shuffle(keys)
    earlier, later = ([rng.sample(things, 2) for _ in range(count)] for count in (before, rooms))
    return {
        "question": f"The last door is {door}. Say take, {GO_ON} or {OPEN}.",
        "layout": f"{door} of {', '.join(sorted(colours))}",
        "door": door,
        "rooms": [*earlier, keys, *later, [rng.choice(things)]],
    }

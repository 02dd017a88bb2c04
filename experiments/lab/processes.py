"""Decision processes of the credit lab: games of `envs.tabular` as arrays, with their exact values.

keydoor        the key of step 1 opens the door of the last step; what lies between pays at once, at random
noise_before   random payments, then the key, then the door: no choice of a key is followed by noise
noise_after    the key, then random payments, then the door: every return of a choice carries them
bifurcation    one decisive step among decoys, whose actions change nothing
late_reward    the first action decides the last reward, and nothing that is observed in between tells which it was
corridor       forward or back, 8 to 64 steps: only who reaches the end in time is paid
frozenlake     the lake of `tasks.frozenlake`: states that recur, ice that slides
stop_or_go     one action ends the episode at once: the policy decides who is there at step 2
revisits       three cells seen again and again
inquiry        looking reveals who is asked for; the answer can be probed after every step
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import numpy as np
import pydantic
from jaxtyping import Bool, Float, Int

from agentr1_jax.envs.tabular import Chance, Game, State, reachable
from agentr1_jax.errors import UserError
from agentr1_jax.registry import parse_call
from agentr1_jax.tasks import frozenlake, keydoor
from agentr1_jax.validation import STRICT, Count, Fraction, NonNegative, Whole


@flax.struct.dataclass
class Tables:
    """A decision process of S states, A actions and C chances of each, padded to the lab's capacities.

    Attributes:
      probability, reward: of each chance.
      following: state after it; S where the episode ends.
      allowed: True for the actions that a state has.
      observation: what the policy sees in each state; also the state's key.
      start: first state of each task row; rows are equally likely.
      horizon: steps after which an episode ends; nothing is worth anything then.
      gold: action that gives the row's answer, in each state; -1 where nothing is asked.
      answers: True for the actions that are answers.
    """

    probability: Float[Any, "states actions chances"]
    reward: Float[Any, "states actions chances"]
    following: Int[Any, "states actions chances"]
    allowed: Bool[Any, "states actions"]
    observation: Int[Any, "states"]
    start: Int[Any, "rows"]
    horizon: Int[Any, ""]
    gold: Int[Any, "states"]
    answers: Bool[Any, "actions"]


@dataclasses.dataclass(frozen=True)
class Process:
    """Games of a process, one for each task row.

    Attributes:
      about: what is hard about it.
      games: each with states of its own.
      horizon: most steps.
      observe: (number of the game, state) -> what the policy sees; None for both.
      gold: likewise the right answer; None where nothing is asked.
      answers: actions that are answers.
    """

    about: str
    games: Sequence[Game]
    horizon: int
    observe: Callable[[int, Any], State] | None = None
    gold: Callable[[int, Any], str] | None = None
    answers: Sequence[str] = ()


ROWS, STATES, ACTIONS, CHANCES = 4, 64, 6, 3
"""Capacities; the games of a process are repeated to make up its rows."""
HORIZONS = (8, 16, 32, 64)
"""Capacities for steps; processes of equal capacity share compiled programs."""


def capacity(process: Process) -> int:
    """Return the steps that arrays of a process are padded to. Raises UserError if it has too many."""
    for steps in HORIZONS:
        if process.horizon <= steps:
            return steps
    raise UserError(f"a process of {process.horizon} steps; the lab has arrays for {HORIZONS[-1]}: lower its horizon")


def make_process(text: str) -> Process:
    """Return the process that a text such as `corridor(horizon=16)` names.

    Raises:
      UserError: there is no such process or argument, or a value cannot be.
    """
    try:
        call = parse_call(text, "--processes")
        if call.name not in PROCESSES:
            raise UserError(f"--processes: unknown process {call.name!r}; choose some of {', '.join(PROCESSES)}")
        make = PROCESSES[call.name]
        checked = pydantic.validate_call(config=STRICT)(make)
        return checked(**call.bind(list(inspect.signature(make).parameters)))
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        raise UserError(f"--processes: {text}: {fault['loc'][0]}: {fault['msg']}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"--processes: {text}: {error}") from error


def tabulate(process: Process) -> Tables:
    """Return a process as arrays.

    Raises:
      UserError: it has more states, actions, chances or steps than the lab's arrays.
    """
    capacity(process)  # Before its states are counted, which may be no end of them.
    states = {(row, state): game for row, game in enumerate(process.games) for state in reachable(game)}
    index = {state: i for i, state in enumerate(states)}
    seen: dict[Any, int] = {}
    if len(states) > STATES:
        raise UserError(f"a process of {len(states)} states; the lab has arrays for {STATES}")
    shape = (STATES, ACTIONS, CHANCES)
    tables = Tables(
        probability=np.zeros(shape, np.float32),
        reward=np.zeros(shape, np.float32),
        following=np.full(shape, STATES, np.int32),
        allowed=np.zeros(shape[:2], bool),
        observation=np.zeros(STATES, np.int32),
        start=np.array(
            [index[r, process.games[r].start] for r in np.resize(range(len(process.games)), ROWS)], np.int32
        ),
        horizon=np.int32(process.horizon),
        gold=np.full(STATES, -1, np.int32),
        answers=np.zeros(ACTIONS, bool),
    )
    for (row, state), game in states.items():
        i, actions = index[row, state], list(game.actions(state))
        chances = [list(game.outcomes(state, action)) for action in actions]
        if len(actions) > ACTIONS or max(map(len, chances)) > CHANCES:
            raise UserError(f"a state of {len(actions)} actions; the lab has arrays for {ACTIONS} of {CHANCES} chances")
        key = (row, state) if process.observe is None else process.observe(row, state)
        tables.observation[i] = seen.setdefault(key, len(seen))
        tables.allowed[i, : len(actions)] = True
        if process.gold is not None:
            tables.gold[i] = actions.index(process.gold(row, state))
            tables.answers[[actions.index(a) for a in process.answers]] = True
        for a, of_action in enumerate(chances):
            for c, chance in enumerate(of_action):
                tables.probability[i, a, c] = chance.probability
                tables.reward[i, a, c] = chance.reward
                if chance.state is not None:
                    tables.following[i, a, c] = index[row, chance.state]
    tables.allowed[len(states) :, 0] = True  # Padding is never reached; its softmax must be defined.
    return tables


Moves = Mapping[str, Sequence[Chance]]
"""Action -> its chances."""


def _game(start: State, moves: Callable[[Any], Moves]) -> Game:
    """A game of a function from states to moves; its states are told by their numbers."""
    return Game(start, lambda s: list(moves(s)), lambda s, a: moves(s)[str(a)], str, lambda s: 0.0)


def _sure(state: State | None, reward: float = 0.0) -> list[Chance]:
    return [Chance(1.0, reward, state)]


def _key_doors(about: str, *, before: int, rooms: int, noise: float) -> Process:
    rng = random.Random(0)
    rows = [keydoor.draw(rng, before=before, rooms=rooms, key_count=3) for _ in range(2)]
    return Process(about, [keydoor.game(row, noise=noise) for row in rows], before + rooms + 2)


def key_door(rooms: Whole = 4, noise: NonNegative = 0.5) -> Process:
    """`tasks.keydoor` with some noise between key and door."""
    return _key_doors("delayed reward, payments between", before=0, rooms=rooms, noise=noise)


def noise_before(rooms: Whole = 4, noise: NonNegative = 1.5) -> Process:
    """`tasks.keydoor` with its rooms before the keys."""
    return _key_doors("noise before the choice", before=rooms, rooms=0, noise=noise)


def noise_after(rooms: Whole = 4, noise: NonNegative = 1.5) -> Process:
    """`tasks.keydoor` with noise of the same size after the keys."""
    return _key_doors("noise after the choice", before=0, rooms=rooms, noise=noise)


def bifurcation(decoys: Whole = 7, actions: Count = 4, chance: Fraction = 0.7) -> Process:
    """One step in the middle decides how likely the last pays 1; what is done at the others changes nothing.

    The right action makes it pay with probability `chance`, the others with 1 − `chance`. A controlled bifurcation task
    as the survey arXiv 2604.09459 asks for.
    """
    decisive = decoys // 2

    def moves(state: tuple[int, bool]) -> Moves:
        t, right = state

        def after(action: int) -> list[Chance]:
            now_right = action == 0 if t == decisive else right
            if t < decoys:
                return _sure((t + 1, now_right))
            pays = chance if now_right else 1 - chance
            return [Chance(pays, 1.0, None), Chance(1 - pays, 0.0, None)]

        return {f"action {a}": after(a) for a in range(actions)}

    return Process("one decisive step among decoys", [_game((0, False), moves)], decoys + 1)


def late_reward(delay: Whole = 6, actions: Count = 4) -> Process:
    """The first action decides the last reward. In between a sure trifle is to be had, and no observation tells which
    action was taken: neither a critic of observations nor a state key can carry the cause to its effect.
    """

    def moves(state: tuple[int, bool]) -> Moves:
        t, right = state
        if t == 0:
            return {f"action {a}": _sure((1, a == 0)) for a in range(actions)}
        last = float(right) if t == delay + 1 else 0.0
        after = None if t == delay + 1 else (t + 1, right)
        return {"take": _sure(after, last + 0.05), "go on": _sure(after, last)}

    return Process(
        "early cause, late reward, unseen between", [_game((0, False), moves)], delay + 2, lambda row, s: s[0]
    )


def corridor(horizon: Count = 16) -> Process:
    """Forward, back or wait on the way to the last cell, which pays 1; every step costs 1 / (2·horizon).

    The cell is as far as 1.8 standard deviations of the way of chance.
    """
    cells = round(1.8 * (2 * horizon / 3) ** 0.5)
    cost = -0.5 / horizon

    def moves(cell: int) -> Moves:
        return {
            "forward": _sure(None, 1 + cost) if cell + 1 == cells else _sure(cell + 1, cost),
            "back": _sure(max(cell - 1, 0), cost),
            "wait": _sure(cell, cost),
        }

    return Process(f"a way of up to {horizon} steps", [_game(0, moves)], horizon)


def frozen_lake(slip: Fraction = 0.2, steps: Count = 16) -> Process:
    """`tasks.frozenlake` on one map of 4 x 4 cells."""
    rng, row = random.Random(1), None
    while row is None:
        row = frozenlake.draw(rng, size=4, holes=0.2)
    return Process("states that recur, ice that slides", [frozenlake.game(row, slip=slip)], steps)


def stop_or_go() -> Process:
    """One action ends the episode at once, the other leads to a second choice."""

    def moves(state: int) -> Moves:
        if state == 0:
            return {"stop": [Chance(0.5, 0.6, None), Chance(0.5, 0.2, None)], "go": _sure(1)}
        return {"left": _sure(None), "right": [Chance(0.8, 1.0, None), Chance(0.2, 0.0, None)]}

    return Process("the policy decides when to stop", [_game(0, moves)], 2)


def revisits() -> Process:
    """Three cells in a row with the goal behind the last; moves slip, and a cell is seen again and again."""

    def moves(cell: int) -> Moves:
        goal = Chance(0.8, 1.0, None) if cell == 2 else Chance(0.8, -0.1, cell + 1)
        left = [Chance(0.8, -0.1, cell - 1), Chance(0.2, -0.1, cell)] if cell else _sure(0, -0.1)
        return {"left": left, "right": [goal, Chance(0.2, -0.1, cell)]}

    return Process("states seen again and again", [_game(start, moves) for start in (1, 0)], 5)


def inquiry() -> Process:
    """One of four people is asked for; a look to the left and one to the right tell together who. A look costs .02."""

    def moves(who: int, state: tuple[bool, bool]) -> Moves:
        left, right = state
        looks = {"look left": _sure((True, right), -0.02), "look right": _sure((left, True), -0.02)}
        return looks | {f"say {w}": _sure(None, float(w == who)) for w in range(4)}

    def observe(row: int, state: tuple[bool, bool]) -> State:
        return tuple(bit if seen else None for bit, seen in zip(divmod(row, 2), state, strict=True))

    games = [_game((False, False), functools.partial(moves, who)) for who in range(4)]
    answers = [f"say {w}" for w in range(4)]
    return Process("evidence, then an answer", games, 4, observe, lambda row, state: answers[row], answers)


PROCESSES: Mapping[str, Callable[..., Process]] = {
    "keydoor": key_door,
    "noise_before": noise_before,
    "noise_after": noise_after,
    "bifurcation": bifurcation,
    "late_reward": late_reward,
    "corridor": corridor,
    "frozenlake": frozen_lake,
    "stop_or_go": stop_or_go,
    "revisits": revisits,
    "inquiry": inquiry,
}

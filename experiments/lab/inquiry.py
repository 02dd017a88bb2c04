"""The lab's `inquiry` told in words: evidence first, then an answer.

One of Ann, Bob, Cid, Dan is meant. Say look left, look right, or say a name.
Nothing is seen.                              look right       −0.02
Right: Bob, Dan.                              look left        −0.02
Left: Ann, Bob. Right: Bob, Dan.              say bob          1

--config.task.file=experiments/lab/inquiry.py --config.task.name=inquiry
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Generator
from typing import Any

from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.datasets import ProceduralTask
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.tabular import Chance, Game, GameRewards, make_tabular_task
from agentr1_jax.validation import STRICT, Fraction

PEOPLE = ("Ann", "Bob", "Cid", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo")
LOOKS = ("look left", "look right")
COST = 0.02
BEST_RETURN = 1 - len(LOOKS) * COST
"""Most that a policy can expect: it looks both ways, then says the name."""


@dataclass(frozen=True, config=STRICT)
class InquiryConfig:
    """Keys of the task."""

    mistakes: Fraction = 0.75
    """probability that the expert says anything, at each step"""


@register("inquiry", InquiryConfig)
def make_inquiry(config: InquiryConfig, run: TaskContext) -> ProceduralTask:
    """Make the task. Its expert looks both ways before it answers: it must not show what it cannot have seen."""
    task = make_tabular_task("inquiry", draw, game, mistakes=0.0, weights=GameRewards())

    def make_expert(row: Row, seed: int) -> Expert:
        return _inquire(row, random.Random(f"{row['id']}/expert/{seed}"), config.mistakes).send  # type: ignore[return-value]

    return dataclasses.replace(task, make_expert=make_expert)


def draw(rng: random.Random) -> Row:
    """Draw a row: four people, who is meant, and what is seen on either side."""
    people = rng.sample(PEOPLE, 4)
    meant = rng.randrange(4)
    left = [people[i] for i in range(4) if i // 2 == meant // 2]
    right = [people[i] for i in range(4) if i % 2 == meant % 2]
    named = ", ".join(sorted(people))
    return {
        "question": f"One of {named} is meant. Say {LOOKS[0]}, {LOOKS[1]}, or say a name.",
        # Of what is told, not of how the people were dealt: another dealing may tell the same.
        "layout": f"{named}: {', '.join(sorted(left))}; {', '.join(sorted(right))}",
        "people": sorted(people),
        "answers": [people[meant]],
        "seen": [sorted(left), sorted(right)],
    }


def game(row: Row) -> Game:
    """Return the game of a row; its states tell which sides were looked at."""
    said = [f"say {name.lower()}" for name in row["people"]]
    right = f"say {row['answers'][0].lower()}"

    def outcomes(state: Any, action: str | None) -> list[Chance]:
        if action in said:
            return [Chance(1.0, float(action == right), None, success=action == right)]
        seen = tuple(was or action == look for was, look in zip(state, LOOKS, strict=True))
        return [Chance(1.0, -COST, seen)]

    def tell(state: Any) -> str:
        sides = zip(("Left", "Right"), state, row["seen"], strict=True)
        return " ".join(f"{side}: {', '.join(names)}." for side, seen, names in sides if seen) or "Nothing is seen."

    return Game((False, False), lambda state: [*LOOKS, *said], outcomes, tell, lambda state: 0.0)


def _inquire(row: Row, rng: random.Random, mistakes: float) -> Generator[str, str | None, None]:
    its_game, state = game(row), (False, False)
    right = f"say {row['answers'][0].lower()}"
    while True:
        wanted = next((look for look, seen in zip(LOOKS, state, strict=True) if not seen), right)
        action = wanted if rng.random() >= mistakes else rng.choice(list(its_game.actions(state)))
        yield action
        (chance,) = its_game.outcomes(state, action)
        state = chance.state if chance.state is not None else state  # type: ignore[assignment]

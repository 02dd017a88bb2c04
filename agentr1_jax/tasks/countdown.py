"""Countdown: reach a number with given ones, each used once; a calculator tells what an expression comes to.

Make 11 from 3 5 9.          calculator(9 + 5 + 3) -> 17
                             calculator(9 + 5 - 3) -> 11
                             answer: 9 + 5 - 3
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import StringConstraints
from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.datasets import LAYOUT_SPLITS, ProceduralTask, draw_row
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.rewards import Part, Reward, Turn
from agentr1_jax.envs.tool_env import NO_ACTION, ToolEnv
from agentr1_jax.tasks import qa
from agentr1_jax.text.tool_calls import PARSE_MESSAGES, ToolCall, render_answer, render_call
from agentr1_jax.tools.calculator import CalculationError, CalculatorTool, evaluate
from agentr1_jax.validation import STRICT, Fraction

SYSTEM = "Make the first number from the others, each used once. Calculate, then answer."


@dataclass(frozen=True, config=STRICT)
class CountdownRewards:
    """Weights of the reward parts of Countdown."""

    answer: float = 1.0
    """of an answer that solves the row"""
    format: float = 0.1
    """of the format, whose raw value is -1 for an ill-formed step"""
    wasted_call: float = -0.2
    """of each call with other numbers, or to a value seen before"""


@dataclass(frozen=True, config=STRICT)
class CountdownConfig:
    """Keys of `task.countdown`."""

    numbers: Annotated[int, Ge(2), Le(6)] = 3
    """how many numbers a row has"""
    largest: Annotated[int, Ge(2)] = 12
    """the largest of the numbers, which are drawn from 1 on"""
    operators: Annotated[str, StringConstraints(pattern=r"^[-+*/]+$")] = "+-"
    """operators that solve a row; some of + - * /"""
    hasty: Fraction = 0.7
    """probability that the expert answers with what it has just seen miss the target"""
    stubborn: Fraction = 0.3
    """probability that the expert tries the same expression again"""
    rewards: CountdownRewards = CountdownRewards()
    """weights of the reward parts"""


@register("countdown", CountdownConfig)
def make_countdown(config: CountdownConfig, run: TaskContext) -> ProceduralTask:
    """Make Countdown. Raises ValueError where the settings leave too few rows.

    Splits `train`, `eval` and `dev` have no pair of numbers and target in common, so that demonstrations, which are of
    `train`, show none that is tested.
    """
    reward = Reward(PARTS, dataclasses.asdict(config.rewards))
    calculator = run.wrap(CalculatorTool())
    opening = qa.question_messages(SYSTEM)
    make_row = functools.partial(
        draw_row,
        "countdown",
        draw=functools.partial(_draw, config),
        layout=lambda row: f"{' '.join(map(str, sorted(row['numbers'])))} = {row['target']}",
        remedy=f"raise numbers ({config.numbers}) or largest ({config.largest}), or allow more operators "
        f"({config.operators})",
    )
    return ProceduralTask(
        name="countdown",
        splits=LAYOUT_SPLITS,
        make_row=make_row,
        make_env=lambda: ToolEnv([calculator], opening, reward, metrics, state_key),
        reward_parts=list(reward.weights),
        make_expert=functools.partial(_make_expert, config),
        make_texts=functools.partial(_make_texts, make_row),
    )


def solves(answer: str | None, row: Row) -> bool:
    """Return True if an answer uses exactly the row's numbers, with its operators, and comes to its target."""
    if answer is None or not _plays_by_rules(answer, row):
        return False
    try:
        return evaluate(answer) == row["target"]
    except CalculationError:
        return False


def answer_part(row: Row, turns: Sequence[Turn]) -> float:
    """1 where the last turn ends the episode with an answer that solves it."""
    return float(bool(turns) and turns[-1].answers and solves(turns[-1].answer, row))


def wasted_call_part(row: Row, turns: Sequence[Turn]) -> float:
    """Number of the turn's calls that bring nothing: no expression of the row's numbers, or a value seen before.

    Give it a negative weight. It counts values, since each value has several expressions, and numbers, since other
    ones would always come to something new.
    """
    seen = {result.content for turn in turns[:-1] for result in turn.results}
    wasted = 0
    for call, result in zip(turns[-1].calls, turns[-1].results, strict=True):
        expression = str(call.arguments.get("expression")) if isinstance(call, ToolCall) else ""
        wasted += not result.ok or not _plays_by_rules(expression, row) or result.content in seen
        seen.add(result.content)
    return float(wasted)


PARTS: Mapping[str, Part] = {"answer": answer_part, "format": qa.format_part, "wasted_call": wasted_call_part}


def metrics(row: Row, turns: Sequence[Turn]) -> dict[str, float]:
    """`em`: whether it was solved; `seen`: whether a call showed the target; `tool_calls`."""
    calls = [result for turn in turns for result in turn.results]
    return {
        "em": answer_part(row, turns),
        "seen": float(any(result.ok and result.content == str(row["target"]) for result in calls)),
        "tool_calls": float(len(calls)),
    }


def state_key(row: Row, turns: Sequence[Turn]) -> str:
    """Row, expressions tried so far and what the last came to: equal states of a group have equal keys."""
    tried = {str(c.arguments.get("expression")) for t in turns for c in t.calls if isinstance(c, ToolCall)}
    last = ",".join(result.content for result in turns[-1].results) or "no action" if turns else "start"
    return "|".join([row["id"], ";".join(sorted(tried)), last])


def _draw(config: CountdownConfig, rng: random.Random) -> Row | None:
    numbers = [rng.randint(1, config.largest) for _ in range(config.numbers)]
    target = evaluate(_draw_expression(numbers, config.operators, rng))
    if target < 1 or target != int(target):
        return None
    question = f"{int(target)} from {' '.join(map(str, numbers))}."
    return {"question": question, "numbers": numbers, "target": int(target), "operators": config.operators}


def _plays_by_rules(expression: str, row: Row) -> bool:
    if not re.fullmatch(rf"[\d\s(){re.escape(row['operators'])}]+", expression) or re.search(r"\*\*|//", expression):
        return False
    return sorted(map(int, re.findall(r"\d+", expression))) == sorted(row["numbers"])


def _make_expert(config: CountdownConfig, row: Row, seed: int) -> Expert:
    """Try expressions in order, but for values seen before, with the flaws of the config."""
    rng = random.Random(f"{row['id']}/expert/{seed}")
    return _play(row, rng, config.hasty, config.stubborn).send  # type: ignore[return-value]


def _play(row: Row, rng: random.Random, hasty: float, stubborn: float) -> Generator[str, str | None, None]:
    numbers = rng.sample(row["numbers"], len(row["numbers"]))
    seen: set[str | None] = set()
    expression, thought = next(_expressions(numbers, row["operators"])), ""
    while True:
        shown = yield f"{thought}{_call(expression)}"
        seen.add(shown)
        hit = shown == str(row["target"])
        thought = f"{shown} is {'' if hit else 'not '}{row['target']}. "
        if hit or rng.random() < hasty:
            yield f"{thought}{render_answer(expression)}"
        if rng.random() >= stubborn:
            unseen = (each for each in _expressions(numbers, row["operators"]) if _value(each) not in seen)
            expression = next(unseen, expression)


def _make_texts(make_row: Callable[[str, int], Row]) -> Iterator[str]:
    """Questions, calls and results of training rows."""
    yield from [SYSTEM, NO_ACTION, *PARSE_MESSAGES.values()]
    for index in itertools.count():
        row = make_row("train", index)
        expression = _draw_expression(row["numbers"], row["operators"], random.Random(row["id"]))
        value = _value(expression)
        yield from [row["question"], _call(expression), value, f"{value} is not {row['target']}."]
        yield render_answer(expression)


def _expressions(numbers: Sequence[int], operators: str) -> Iterator[str]:
    for order in itertools.permutations(numbers):
        for chosen in itertools.product(operators, repeat=len(numbers) - 1):
            yield _join(order, chosen)


def _draw_expression(numbers: Sequence[int], operators: str, rng: random.Random) -> str:
    return _join(rng.sample(numbers, len(numbers)), [rng.choice(operators) for _ in numbers[1:]])


def _join(numbers: Sequence[int], operators: Sequence[str]) -> str:
    first, *others = map(str, numbers)
    return " ".join([first, *(f"{sign} {number}" for sign, number in zip(operators, others, strict=True))])


def _call(expression: str) -> str:
    return render_call(CalculatorTool.name, {"expression": expression})


def _value(expression: str) -> str:
    return CalculatorTool().execute({"expression": expression}).content

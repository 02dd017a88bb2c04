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
from typing import Annotated, ClassVar

from annotated_types import Ge, Le
from pydantic import StringConstraints
from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.rewards import Part, Reward, Turn
from agentr1_jax.envs.tabular_task import SPLITS, split_of
from agentr1_jax.envs.tool_env import NO_ACTION, ToolEnv
from agentr1_jax.tasks import qa
from agentr1_jax.text.tool_calls import PARSE_MESSAGES, ToolCall, render_answer, render_call
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.calculator import CalculationError, CalculatorTool, evaluate
from agentr1_jax.validation import STRICT, Fraction

SYSTEM = "Make the first number from the others, each used once. Calculate, then answer."
OPERATORS = "+-*/"
MOST_DRAWS = 10_000


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
def make_countdown(config: CountdownConfig, run: TaskContext) -> CountdownTask:
    """Make Countdown. Raises ValueError where the settings leave too few rows."""
    return CountdownTask(config, run.wrap)


@dataclasses.dataclass(frozen=True)
class CountdownTask:
    """A Task of expressions that come to a target; all numbers are to be used, each once.

    Splits `train`, `eval` and `dev` have no pair of numbers and target in common, so that demonstrations, which are of
    `train`, show none that is tested.

    Attributes:
      config: its keys.
      wrap: puts the run's limits around the calculator.

    Raises:
      ValueError: the keys leave too few rows.
    """

    config: CountdownConfig
    wrap: Callable[[Tool], Tool] = lambda tool: tool
    name: ClassVar[str] = "countdown"

    def __post_init__(self) -> None:
        for split in set(SPLITS):
            self.row(split, 0)

    @property
    def reward_parts(self) -> Sequence[str]:
        """The parts that have a weight."""
        return list(self._reward.weights)

    def row(self, split: str, index: int) -> Row:
        """Row `index` of a split. Raises ValueError on another split or a negative index."""
        if split not in SPLITS or index < 0:
            known = ", ".join(sorted(set(SPLITS)))
            raise ValueError(f"countdown has no row {split!r} {index}; splits are {known}, rows start at 0")
        numbers, target = self._pair_of(split, random.Random(f"countdown/{split}/{index}"))
        question = f"{target} from {' '.join(map(str, numbers))}."
        row = {"id": f"countdown/{split}/{index}", "question": question, "numbers": numbers, "target": target}
        return {**row, "operators": self.config.operators}

    def size(self, split: str) -> int | None:
        """None: rows are procedural, though pairs come again."""
        return None

    def env(self) -> ToolEnv:
        """A fresh environment with a calculator."""
        return ToolEnv(
            tools=[self._calculator],
            opening=qa.question_messages(SYSTEM),
            reward=self._reward,
            metrics=metrics,
            state_key=state_key,
        )

    def expert(self, row: Row, seed: int) -> Expert:
        """Tries expressions in order, but for values seen before, with its flaws; equal seeds give equal decisions."""
        rng = random.Random(f"{row['id']}/expert/{seed}")
        return _play(row, rng, self.config.hasty, self.config.stubborn).send  # type: ignore[return-value]

    def texts(self, count: int) -> Sequence[str]:
        """Questions, calls and results of training rows, one a text."""
        return list(itertools.islice(self._texts(), count))

    def _pair_of(self, split: str, rng: random.Random) -> tuple[list[int], int]:
        for _ in range(MOST_DRAWS):
            numbers = [rng.randint(1, self.config.largest) for _ in range(self.config.numbers)]
            target = evaluate(_expression(numbers, self.config.operators, rng))
            if target >= 1 and target == int(target) and split_of(_pair(numbers, int(target))) == split:
                return numbers, int(target)
        raise ValueError(
            f"countdown: {MOST_DRAWS} draws found no numbers and target for split {split!r}; raise numbers "
            f"({self.config.numbers}) or largest ({self.config.largest}), or allow more operators "
            f"({self.config.operators})"
        )

    @functools.cached_property
    def _reward(self) -> Reward:
        return Reward(PARTS, dataclasses.asdict(self.config.rewards))

    @functools.cached_property
    def _calculator(self) -> Tool:
        return self.wrap(CalculatorTool())

    def _texts(self) -> Iterator[str]:
        yield from [SYSTEM, NO_ACTION, *PARSE_MESSAGES.values()]
        for index in itertools.count():
            row = self.row("train", index)
            expression = _expression(row["numbers"], self.config.operators, random.Random(row["id"]))
            value = _value(expression)
            yield from [row["question"], _call(expression), value, f"{value} is not {row['target']}."]
            yield render_answer(expression)


def solves(answer: str | None, row: Row) -> bool:
    """Return True if an answer uses exactly the row's numbers, with its operators, and comes to its target."""
    if answer is None or not _plays_by_rules(answer, row):
        return False
    try:
        return evaluate(answer) == row["target"]
    except CalculationError:
        return False


def answer_part(row: Row, turns: Sequence[Turn]) -> float:
    """1 where the turn ends the episode with an answer that solves it."""
    return float(turns[-1].answers and solves(turns[-1].answer, row))


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
        "em": float(bool(turns) and turns[-1].answers and solves(turns[-1].answer, row)),
        "seen": float(any(result.ok and result.content == str(row["target"]) for result in calls)),
        "tool_calls": float(len(calls)),
    }


def state_key(row: Row, turns: Sequence[Turn]) -> str:
    """Row, expressions tried so far and what the last came to: equal states of a group have equal keys."""
    tried = {str(c.arguments.get("expression")) for t in turns for c in t.calls if isinstance(c, ToolCall)}
    last = ",".join(result.content for result in turns[-1].results) or "no action" if turns else "start"
    return "|".join([row["id"], ";".join(sorted(tried)), last])


def _plays_by_rules(expression: str, row: Row) -> bool:
    if not re.fullmatch(rf"[\d\s(){re.escape(row['operators'])}]+", expression) or re.search(r"\*\*|//", expression):
        return False
    return sorted(map(int, re.findall(r"\d+", expression))) == sorted(row["numbers"])


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


def _expressions(numbers: Sequence[int], operators: str) -> Iterator[str]:
    for order in itertools.permutations(numbers):
        for chosen in itertools.product(operators, repeat=len(numbers) - 1):
            yield _join(order, chosen)


def _expression(numbers: Sequence[int], operators: str, rng: random.Random) -> str:
    return _join(rng.sample(numbers, len(numbers)), [rng.choice(operators) for _ in numbers[1:]])


def _join(numbers: Sequence[int], operators: Sequence[str]) -> str:
    first, *others = map(str, numbers)
    return " ".join([first, *(f"{sign} {number}" for sign, number in zip(operators, others, strict=True))])


def _call(expression: str) -> str:
    return render_call(CalculatorTool.name, {"expression": expression})


def _value(expression: str) -> str:
    return CalculatorTool().execute({"expression": expression}).content


def _pair(numbers: Sequence[int], target: int) -> str:
    return f"{' '.join(map(str, sorted(numbers)))} = {target}"

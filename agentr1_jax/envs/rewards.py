"""Rewards as weighted, named parts, and the measures of question answering that they are made of."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import math
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence

from agentr1_jax.envs.base import Row
from agentr1_jax.text.tool_calls import ParseError, ToolCall
from agentr1_jax.tools.base import ToolResult


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step of an episode with tools, as rewards and metrics see it.

    Attributes:
      text: the response.
      calls: its tool calls in order, unreadable ones included.
      results: one per call.
      answer: text of its `<answer>`, if it has one.
    """

    text: str
    calls: Sequence[ToolCall | ParseError]
    results: Sequence[ToolResult]
    answer: str | None

    @property
    def answers(self) -> bool:
        """True if the response is an answer and no call, which ends an episode without a user."""
        return self.answer is not None and not self.calls


Part = Callable[[Row, Sequence[Turn]], float | None]
"""The raw value that the LAST of the turns so far earns; None where it cannot be told for this row. A pure function."""


@dataclasses.dataclass(frozen=True)
class Reward:
    """rₜ = Σₚ weightₚ · partₚ(row, turns up to t). Parts without a weight are computed for the logs only.

    A part that is None for a row (gold passages that nobody named) is left out of both sum and logs.

    Raises:
      ValueError: a weight names no part (the message lists the names), or is not finite.
    """

    parts: Mapping[str, Part]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"the weight of reward part {name!r} is {weight}; it must be a finite number")
            if name not in self.parts:
                near = difflib.get_close_matches(name, self.parts, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown reward part {name!r}{hint} Parts are {sorted(self.parts)}")

    def raw(self, row: Row, turns: Sequence[Turn]) -> dict[str, float]:
        """Every part of the last turn, unweighted."""
        values = {name: part(row, turns) for name, part in self.parts.items()}
        return {name: float(value) for name, value in values.items() if value is not None}

    def contributions(self, raw: Mapping[str, float]) -> dict[str, float]:
        """Contributions of the weighted parts; their sum is the reward."""
        weights = {name: weight for name, weight in self.weights.items() if name in raw}
        return {name: weight * raw[name] if raw[name] else 0.0 for name, weight in weights.items()}


def totals(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Parts summed over the steps of an episode: from `raw_reward_parts` of each to the values of metrics."""
    sums: dict[str, float] = {}
    for parts in steps:
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = ("yes", "no", "noanswer")


def normalise(text: str) -> str:
    """SQuAD normalisation: lower case; without punctuation, articles (a, an, the) and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, answers: Sequence[str]) -> float:
    """1.0 if the prediction equals one of the answers (aliases) after normalisation; None never matches."""
    if prediction is None:
        return 0.0
    return float(normalise(prediction) in {normalise(answer) for answer in answers})


def f1(prediction: str | None, answers: Sequence[str]) -> float:
    """F1 of the normalised words, the best over the answers (aliases); None scores 0.

    As in HotpotQA's evaluation, a `yes`, `no` or `noanswer` on either side scores only where both sides are equal.
    """
    if prediction is None:
        return 0.0
    return max((_f1(normalise(prediction), normalise(answer)) for answer in answers), default=0.0)


def _f1(prediction: str, answer: str) -> float:
    if prediction != answer and (prediction in _CLOSED_ANSWERS or answer in _CLOSED_ANSWERS):
        return 0.0
    predicted, expected = prediction.split(), answer.split()
    common = sum((collections.Counter(predicted) & collections.Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0

"""Rewards as weighted, named parts: the measures of question answering, and functions of the user."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import importlib
import inspect
import math
import numbers
import re
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

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
        """Return every part of the last turn, unweighted."""
        values = {name: part(row, turns) for name, part in self.parts.items()}
        return {name: float(value) for name, value in values.items() if value is not None}

    def contributions(self, raw: Mapping[str, float]) -> dict[str, float]:
        """Return the weighted parts, whose sum is the reward."""
        weights = {name: weight for name, weight in self.weights.items() if name in raw}
        return {name: weight * raw[name] if raw[name] else 0.0 for name, weight in weights.items()}


def totals(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of the parts over the steps of an episode."""
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


_SPEC = re.compile(r"([\w.]+):(\w+)=(.+)")


def load_functions(specs: Sequence[str], taken: Collection[str]) -> tuple[dict[str, Part], dict[str, float]]:
    """Import reward functions of the user; each becomes a part of its own name.

    A function has the signature of `Part`. One that raises, or returns anything but a finite number or None, fails the
    episode.

    Args:
      specs: `module:function=weight`, the module as one would import it.
      taken: names that other parts have.

    Returns:
      the parts and their weights, by name.

    Raises:
      ValueError: a spec cannot be read, its module cannot be imported, or what it names is no such function.
    """
    parts: dict[str, Part] = {}
    weights: dict[str, float] = {}
    for spec in specs:
        found = _SPEC.fullmatch(spec)
        try:
            module, name, weight = found[1], found[2], float(found[3])  # type: ignore[index]
        except (TypeError, ValueError):
            raise ValueError(
                f"reward_functions: {spec!r} is not 'module:function=weight', e.g. 'my_rewards:brevity=0.2'"
            ) from None
        if name in taken or name in parts:
            raise ValueError(
                f"reward_functions: {spec!r}: there is a reward part {name!r} already; rename the function"
            )
        parts[name] = _check_values(_import_function(spec, module, name), f"{module}:{name}")
        weights[name] = weight
    return parts, weights


def _import_function(spec: str, module: str, name: str) -> Any:
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # Whatever the user's module raises when it is imported.
        raise ValueError(
            f"reward_functions: {spec!r}: cannot import {module!r} ({type(error).__name__}: {error}); it must be "
            "importable from the folder that the run is started in, or installed"
        ) from error
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ValueError(
            f"reward_functions: {spec!r}: {module!r} has no such function; it must be def {name}(row, turns), not async"
        )
    try:
        inspect.signature(function).bind({}, [])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward_functions: {spec!r}: {name!r} cannot be called as {name}(row, turns): {error}"
        ) from error
    return function


def _check_values(function: Any, name: str) -> Part:
    def part(row: Row, turns: Sequence[Turn]) -> float | None:
        try:
            value = function(row, turns)
        except Exception as error:
            raise RuntimeError(f"reward function {name} raised {type(error).__name__}: {error}") from error
        if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
            raise RuntimeError(f"reward function {name} returned {value!r:.80}, which is no finite number")
        return None if value is None else float(value)

    return part

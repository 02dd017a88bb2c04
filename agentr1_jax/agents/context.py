"""Context rules: how the next prompt is built from what happened, C(z₀..zₜ) → ids.

They cut and join ids, and tell an environment's own words anew; what was sampled is never written and read again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence

import numpy as np

from agentr1_jax.registry import Registry, parse_call


@dataclasses.dataclass(frozen=True)
class Turn:
    """One finished step, or a summary of those before.

    Attributes:
      response_ids: int32 [R], as sampled.
      observation_ids: int32 [O], what came back as it is rendered behind the response, glue included.
      thought: how many ids at the start of the response are thinking, `</think>` included.
      evidence: all that the environment has shown until then, in its words; None where it does not say.
    """

    response_ids: np.ndarray
    observation_ids: np.ndarray
    thought: int = 0
    evidence: str | None = None


@dataclasses.dataclass(frozen=True)
class History:
    """What a rule builds a prompt from.

    Attributes:
      opening: int32 [P], ids of the first prompt.
      turns: since then; where `summarised`, the first is the summary of all that came before the others.
      summarised: whether it is.
      retold: evidence -> int32 ids of an opening whose last message ends with it.
    """

    opening: np.ndarray
    turns: Sequence[Turn] = ()
    summarised: bool = False
    retold: Callable[[str], np.ndarray] | None = None

    def then(self, turn: Turn) -> History:
        """With one turn more."""
        return dataclasses.replace(self, turns=[*self.turns, turn])


@dataclasses.dataclass(frozen=True)
class Kind:
    """A registered rule.

    Attributes:
      prompt: (history, **arguments) -> int32 ids of the next prompt.
      due: (history, **arguments) -> whether the policy is to write a summary first; None for never.
      needs_evidence: whether environments have to say what they have shown.
    """

    prompt: Callable[..., np.ndarray]
    due: Callable[..., bool] | None = None
    needs_evidence: bool = False


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule with its arguments.

    Attributes:
      name: as in the config, e.g. `window(3)`.
      prompt, due, needs_evidence: see `Kind`.
    """

    name: str
    prompt: Callable[[History], np.ndarray]
    due: Callable[[History], bool] | None = None
    needs_evidence: bool = False


RULES: Registry[Kind] = Registry("context rule", "context.file")

Function = Callable[..., np.ndarray]


def register(
    name: str, *, due: Callable[..., bool] | None = None, needs_evidence: bool = False
) -> Callable[[Function], Function]:
    """Decorator that adds a rule under `name`; see `Kind`. Raises ValueError if the name is taken."""

    def add(prompt: Function) -> Function:
        RULES.add(name, Kind(prompt, due, needs_evidence), prompt)
        return prompt

    return add


def joined(opening: np.ndarray, turns: Sequence[Turn]) -> np.ndarray:
    """The opening and the turns, one after another."""
    return np.concatenate([opening, *(part for t in turns for part in (t.response_ids, t.observation_ids))])


@register("append")
def append(history: History) -> np.ndarray:
    """Everything so far: each prompt extends the one before."""
    return joined(history.opening, history.turns)


@register("window")
def window(history: History, k: int) -> np.ndarray:
    """The opening and the last `k` turns; older ones are dropped whole."""
    if not k:
        raise ValueError("a window without a turn never shows what came back")
    return joined(history.opening, history.turns[max(0, len(history.turns) - k) :])


@register("token_budget")
def token_budget(history: History, tokens: int) -> np.ndarray:
    """The opening and as many of the last turns as fit so many tokens with it; the newest is there in any case."""
    room, first = tokens - len(history.opening), len(history.turns)
    for turn in reversed(history.turns):
        room -= len(turn.response_ids) + len(turn.observation_ids)
        if room < 0 and first < len(history.turns):
            break
        first -= 1
    return joined(history.opening, history.turns[first:])


@register("evidence", needs_evidence=True)
def evidence(history: History) -> np.ndarray:
    """An opening that tells what the environment has shown so far, and nothing of what the policy said."""
    if not history.turns:
        return history.opening
    shown = history.turns[-1].evidence
    if shown is None or history.retold is None:
        raise ValueError("the context rule 'evidence' needs an environment that says what it has shown")
    return history.retold(shown)


@register("strip_thinking")
def strip_thinking(history: History, keep: int = 0) -> np.ndarray:
    """Everything so far but the thinking of all responses except the last `keep`."""
    old = max(len(history.turns) - keep, 0)
    turns = [dataclasses.replace(t, response_ids=t.response_ids[t.thought :]) for t in history.turns[:old]]
    return joined(history.opening, [*turns, *history.turns[old:]])


def summary_due(history: History, turns: int = 0, tokens: int = 0) -> bool:
    """Whether so many turns, or a prompt of more than so many tokens, came since the last summary."""
    since = len(history.turns) - history.summarised
    return bool(turns and since >= turns or tokens and since and len(append(history)) > tokens)


@register("summary", due=summary_due)
def summary(history: History, turns: int = 0, tokens: int = 0) -> np.ndarray:
    """Everything since the last summary, which stands in place of what came before it.

    Where one is due (see `summary_due`), the policy writes it as a step of its own, before the next prompt is built.
    """
    if not turns and not tokens:
        raise ValueError("summary needs a time: summary(turns=3), or summary(tokens=800)")
    return append(history)


def context_rule(spec: str) -> Rule:
    """The rule that a config value names, e.g. `append`, `window(3)` or `summary(tokens=800)`.

    Raises:
      ValueError: unknown name or wrong argument; the message says what there is.
    """
    name, values, named = parse_call(spec, "context.rule")
    kind = RULES.called(name)
    parameters = list(inspect.signature(kind.prompt).parameters)[1:]
    form = f"{name}({', '.join(parameters)})" if parameters else name
    given = dict(zip(parameters, values, strict=False)) | named
    twice = set(parameters[: len(values)]) & set(named)
    if len(values) > len(parameters) or twice or not given.keys() <= set(parameters):
        raise ValueError(f"context.rule is {spec!r}; write {form}, with whole numbers")
    wrong = [value for value in given.values() if not value.isdecimal()]
    if wrong:
        raise ValueError(f"context.rule is {spec!r}; {wrong[0]!r} is no whole number: write {form}")
    arguments = {key: int(value) for key, value in given.items()}
    prompt = functools.partial(kind.prompt, **arguments)
    try:
        prompt(History(np.zeros(1, np.int32)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"context.rule is {spec!r}; write {form}, with whole numbers ({error})") from error
    due = functools.partial(kind.due, **arguments) if kind.due else None
    return Rule(spec, prompt, due, kind.needs_evidence)

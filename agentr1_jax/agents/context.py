"""Context rules: functions from what happened to the next prompt, C(z₀..zₜ) → ids.

They select and join ids, and render text of the environment again; sampled ids are never decoded and tokenised again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import pydantic.dataclasses

from agentr1_jax.registry import Registry, parse_call
from agentr1_jax.validation import STRICT, Count

F = TypeVar("F", bound=Callable[..., np.ndarray])


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ContextConfig:
    """Settings of the section `context`.

    Attributes:
      rule: name and arguments of a context rule, e.g. `append` or `window(3)`; see `context_rule`.
      file: Python file that registers rules; empty for none.
      summary_tokens: most tokens of a summary.
      train_summary: False leaves summaries out of the loss.
    """

    rule: str = "append"
    file: str = ""
    summary_tokens: Count = 64
    train_summary: bool = True

    def __post_init__(self) -> None:
        if not self.bound_rule.makes_summaries and not self.train_summary:  # In this order: every rule is checked.
            raise ValueError(f"train_summary is False, and the rule {self.rule!r} makes no summaries")

    @functools.cached_property
    def bound_rule(self) -> ContextRule:
        """The rule with its arguments; the `file` must be loaded before (`RULES.load`)."""
        return context_rule(self.rule)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One finished step, or a summary of the steps before.

    Attributes:
      response_ids: int32 [R], as sampled.
      observation_ids: int32 [O], the observation as it is rendered behind the response, glue included.
      thinking_tokens: number of ids at the start of the response that are thinking, `</think>` included.
      evidence: everything the environment has shown up to this turn, as text; None if the environment does not say.
    """

    response_ids: np.ndarray
    observation_ids: np.ndarray
    thinking_tokens: int = 0
    evidence: str | None = None


@dataclasses.dataclass(frozen=True)
class History:
    """Input of a context rule.

    Attributes:
      opening: int32 [P], ids of the first prompt.
      starts_with_summary: True if the first of `turns` is a summary of all earlier ones.
      render_evidence: evidence -> int32 ids of an opening whose last message ends with it.
    """

    opening: np.ndarray
    turns: Sequence[Turn] = ()
    starts_with_summary: bool = False
    render_evidence: Callable[[str], np.ndarray] | None = None

    def with_turn(self, turn: Turn) -> History:
        """Return the history with one turn more."""
        return dataclasses.replace(self, turns=[*self.turns, turn])


@dataclasses.dataclass(frozen=True)
class ContextRule:
    """A rule. `register` makes it, and `context_rule` binds its arguments.

    Attributes:
      name: as in the config, e.g. `window(3)`.
      next_prompt: (history, **arguments) -> int32 ids of the next prompt.
      summary_due: (history, **arguments) -> True if the policy is to write a summary first; None for never.
      needs_evidence: True if environments must give `Observation.evidence`.
    """

    name: str
    next_prompt: Callable[..., np.ndarray]
    summary_due: Callable[..., bool] | None = None
    needs_evidence: bool = False

    @property
    def makes_summaries(self) -> bool:
        """True if the policy writes summaries, which are steps of their own."""
        return self.summary_due is not None

    def most_steps(self, responses: int) -> int:
        """Return the most steps of a trajectory of so many responses, summaries included; none follows the last."""
        return 2 * responses - 1 if self.makes_summaries else responses


RULES: Registry[ContextRule] = Registry("context rule", "context.file")


def register(
    name: str, *, summary_due: Callable[..., bool] | None = None, needs_evidence: bool = False
) -> Callable[[F], F]:
    """Return a decorator that adds a rule; see `ContextRule`. Raises ValueError if the name is taken."""

    def add(next_prompt: F) -> F:
        RULES.add(name, ContextRule(name, next_prompt, summary_due, needs_evidence), next_prompt)
        return next_prompt

    return add


def join(opening: np.ndarray, turns: Sequence[Turn]) -> np.ndarray:
    """Return the ids of the opening and of the turns, one after another."""
    return np.concatenate([opening, *(part for t in turns for part in (t.response_ids, t.observation_ids))])


@register("append")
def append(history: History) -> np.ndarray:
    """Return everything so far: each prompt extends the one before."""
    return join(history.opening, history.turns)


@register("window")
def window(history: History, k: int) -> np.ndarray:
    """Return the opening and the last `k` turns; older turns are dropped whole."""
    if not k:
        raise ValueError("a window of 0 turns never shows an observation")
    return join(history.opening, history.turns[max(0, len(history.turns) - k) :])


@register("token_budget")
def token_budget(history: History, tokens: int) -> np.ndarray:
    """Return the opening and as many of the last turns as fit `tokens` with it; the newest turn in any case."""
    room, first = tokens - len(history.opening), len(history.turns)
    for turn in reversed(history.turns):
        room -= len(turn.response_ids) + len(turn.observation_ids)
        if room < 0 and first < len(history.turns):
            break
        first -= 1
    return join(history.opening, history.turns[first:])


@register("evidence", needs_evidence=True)
def evidence(history: History) -> np.ndarray:
    """Return an opening with everything the environment has shown so far, and nothing that the policy wrote."""
    if not history.turns:
        return history.opening
    shown = history.turns[-1].evidence
    if shown is None or history.render_evidence is None:
        raise ValueError("the context rule 'evidence' needs an environment that sets Observation.evidence")
    return history.render_evidence(shown)


@register("strip_thinking")
def strip_thinking(history: History, keep: int = 0) -> np.ndarray:
    """Return everything so far except the thinking of all responses but the last `keep`."""
    old = max(len(history.turns) - keep, 0)
    turns = [dataclasses.replace(t, response_ids=t.response_ids[t.thinking_tokens :]) for t in history.turns[:old]]
    return join(history.opening, [*turns, *history.turns[old:]])


def summary_due(history: History, turns: int = 0, tokens: int = 0) -> bool:
    """Return True after so many turns, or at a prompt of more than so many tokens, since the last summary."""
    since = len(history.turns) - history.starts_with_summary
    return bool(turns and since >= turns or tokens and since and len(append(history)) > tokens)


@register("summary", summary_due=summary_due)
def summary(history: History, turns: int = 0, tokens: int = 0) -> np.ndarray:
    """Return everything since the last summary, which stands for what came before it.

    Where one is due (see `summary_due`), the policy writes it as a step of its own, before the next prompt is built.
    """
    if not turns and not tokens:
        raise ValueError("summary needs a time: summary(turns=3), or summary(tokens=800)")
    return append(history)


def context_rule(spec: str) -> ContextRule:
    """Return the rule that a config value names, e.g. `append`, `window(3)` or `summary(tokens=800)`.

    Raises:
      ValueError: unknown name or wrong argument; the message says what there is.
    """
    call = parse_call(spec, "context.rule")
    rule = RULES.get_entry(call.name)
    parameters = list(inspect.signature(rule.next_prompt).parameters)[1:]
    form = f"{call.name}({', '.join(parameters)})" if parameters else call.name
    try:
        arguments = call.bind(parameters)
        for value in arguments.values():
            if type(value) is not int or value < 0:
                raise ValueError(f"{str(value)!r} is no whole number")
        next_prompt = functools.partial(rule.next_prompt, **arguments)
        next_prompt(History(np.zeros(1, np.int32)))  # Finds arguments that are missing, or of no use to the rule.
    except (TypeError, ValueError) as error:
        raise ValueError(f"context.rule is {spec!r}; write {form}, with whole numbers ({error})") from error
    due = functools.partial(rule.summary_due, **arguments) if rule.summary_due else None
    return ContextRule(spec, next_prompt, due, rule.needs_evidence)

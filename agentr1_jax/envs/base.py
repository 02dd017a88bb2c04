"""The Env and Task contracts. An environment turns actions of the policy into observations and rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from agentr1_jax.trajectory import Outcome

Row = Mapping[str, Any]
Expert = Callable[[str | None], str]
"""From the text of an observation (None before the first) or `SUMMARY_REQUEST` to the text of the next response; holds
the state of one episode."""
SUMMARY_REQUEST = "Sum up what matters so far; nothing else of it will be kept."
"""Request to the policy, in place of an observation, where the context rule `summary` wants a summary."""


@dataclasses.dataclass(frozen=True)
class Observation:
    """Next input of the policy: chat messages, text or texts of a tool or user turn, or token ids (exactly one).

    Attributes:
      messages: the opening messages, rendered by the tokenizer's chat template.
      text: a later turn of the environment (tool results, error messages); it is data, never template.
      texts: several texts in place of `text`, each rendered by the chat template and shortened by itself.
      token_ids: ids appended as they are.
      role: role of the turn that `text` or `texts` become, `tool` or `user`.
      tools: schemas of the tools on offer, for the opening messages.
      state_key: anchor of the state, for credit schemes that compare equal states of a group.
      potential: Φ of the state, for potential-based shaping; None where the environment has none.
      evidence: all that the environment has shown so far, the only content of the next prompt under the context rule
        `evidence`; None where the environment does not say.
    """

    messages: Sequence[Mapping[str, str]] | None = None
    text: str | None = None
    texts: Sequence[str] | None = None
    token_ids: np.ndarray | None = None
    role: str = "tool"
    tools: Sequence[Mapping[str, Any]] = ()
    state_key: str | None = None
    potential: float | None = None
    evidence: str | None = None

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.messages, self.text, self.texts, self.token_ids)) != 1:
            raise ValueError("an Observation holds exactly one of messages, text, texts and token_ids")
        if self.texts is not None and (isinstance(self.texts, str) or not self.texts):
            raise ValueError(f"texts of an Observation are a list with at least one text, not {self.texts!r}")

    @property
    def content(self) -> str | None:
        """`text`, or `texts` on lines of their own; None if it has neither."""
        return self.text if self.texts is None else "\n".join(self.texts)


@dataclasses.dataclass(frozen=True)
class Action:
    """A response of the policy.

    Attributes:
      token_ids: int32 [R], as sampled.
      text: its decoding, without the stop token.
      truncated: True if the response ran into its length limit.
      final: True if the budget allows no further step; an environment may say so to the policy before it.
      lenient: True if calls that cannot be read may be mended.
    """

    token_ids: np.ndarray
    text: str
    truncated: bool = False
    final: bool = False
    lenient: bool = False


@dataclasses.dataclass(frozen=True)
class Transition:
    """Result of one action.

    Attributes:
      observation: next input of the policy; None only where the episode ended.
      reward: reward of this step, the sum that training uses.
      reward_parts: its weighted parts by name.
      raw_reward_parts: the parts before weighting, by name; for metrics.
      terminated: the episode ended by itself; its future is worth 0.
      truncated: the environment ended the episode early; its future is bootstrapped.
      outcome: reason of the end; None stands for `env_done` where `terminated`, else for `max_steps`. One that is
        bootstrapped (`POLICIES`) needs `truncated`.
      tool_calls: one JSON record per call: `name, arguments, ok, error, result`.
      metrics: scalars of the finished episode (`em`, `f1`); only where it ended.
      action_key: canonical form of the action, for credit schemes that compare equal actions; None leaves it to the
        agent loop, which takes calls with sorted arguments, else the answer, else the text of the response.
      info: JSON for people; nothing is computed from it.
    """

    observation: Observation | None
    reward: float
    reward_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    raw_reward_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    outcome: Outcome | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    action_key: str | None = None
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Env(Protocol):
    """One episode at a time on one task row.

    An environment may also have `judge_summary(text) -> {part: weighted reward}`, which rewards a summary that the
    policy wrote under the context rule `summary`; without it a summary earns nothing of its own.
    """

    async def reset(self, row: Row, seed: int) -> Observation:
        """Start an episode."""
        ...

    async def step(self, action: Action) -> Transition:
        """Apply one response of the policy."""
        ...

    def truncate(self) -> Mapping[str, float]:
        """Return the metrics of the episode that the budget ends here (an unanswered question has em 0)."""
        ...


class Task(Protocol):
    """A source of rows, of environments for them and, where there is one, of an expert.

    Rows are plain JSON with at least `id`; `question` and `answers` where the task is question answering, `kind` where
    it has kinds, `max_steps` where fewer steps are allowed than by the budget.

    A task may also say `has_expert = False`, `has_texts = False` and `expert_writes_summaries = True` (the expert
    answers `SUMMARY_REQUEST` with a summary).
    """

    @property
    def name(self) -> str:
        """Name of the task, stored with each trajectory."""
        ...

    @property
    def reward_parts(self) -> Sequence[str]:
        """Names of the parts of its rewards."""
        ...

    def row(self, split: str, index: int) -> Row:
        """Row `index` >= 0 of a split: `train`, `eval` or one of its own; finite data sets wrap around, reshuffled.

        Raises:
          ValueError: no such split; the message lists them.
        """
        ...

    def size(self, split: str) -> int | None:
        """Distinct rows of a split; None if procedural."""
        ...

    def env(self) -> Env:
        """A fresh environment."""
        ...

    def expert(self, row: Row, seed: int) -> Expert:
        """A (flawed) expert for one episode on `row`."""
        ...

    def texts(self, count: int) -> Sequence[str]:
        """Sample texts of the task (training worlds only), for training a tokenizer."""
        ...


def summary_rewards(env: Env, text: str) -> Mapping[str, float]:
    """Return the weighted reward parts of a summary; none where the environment does not judge summaries."""
    judge = getattr(env, "judge_summary", None)
    return {} if judge is None else dict(judge(text))


def has_expert(task: Task) -> bool:
    """Return True if a task has experts to imitate."""
    return bool(getattr(task, "has_expert", True))


def has_texts(task: Task) -> bool:
    """Return True if a task has texts to train a tokenizer on."""
    return bool(getattr(task, "has_texts", True))


def writes_summaries(task: Task) -> bool:
    """Return True if a task's experts write summaries."""
    return bool(getattr(task, "expert_writes_summaries", False))

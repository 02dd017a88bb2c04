"""Steps, trajectories and how they end: the record that every other package reads or writes.

A step is one RL transition with the exact prompt ids the policy saw and the exact response ids it sampled.
Nothing in this file depends on a tokenizer, an environment or JAX.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic.dataclasses

from agentr1_jax.validation import STRICT, Count, Positive

ROW_FACTS = ("id", "task", "dataset", "question", "answers", "kind", "hops", "max_steps")
"""Keys of a task row that its trajectories keep."""


class Outcome(enum.StrEnum):
    """How a trajectory ended. `POLICIES` says what each one means for reward, bootstrap and training."""

    ANSWERED = "answered"
    ENV_DONE = "env_done"
    MAX_STEPS = "max_steps"
    CONTEXT_OVERFLOW = "context_overflow"
    TIME_LIMIT = "time_limit"
    RESPONSE_TRUNCATED = "response_truncated"
    PARSE_FAILURE = "parse_failure"
    TOOL_FAILURE = "tool_failure"
    ENV_FAILURE = "env_failure"
    ENGINE_FAILURE = "engine_failure"
    STALE = "stale"
    FAILURE_AS_ZERO = "failure_as_zero"
    """A `tool_failure` or `env_failure` after a step that, by `rollout.failures=zero`, counts as a return of 0."""


@dataclasses.dataclass(frozen=True)
class OutcomePolicy:
    """Meaning of an outcome for learning.

    Attributes:
      reward: `use` the recorded rewards; count them as `zero`; `none` exist.
      bootstrap: True if the trajectory was truncated, so that the value of its last observation stands for the future;
        False if it ended, so that the future is worth 0.
      training: `train` on its tokens; `mask` them but keep its rewards in the group's statistics;
        `drop` it from its group before statistics are taken.
    """

    reward: Literal["use", "zero", "none"]
    bootstrap: bool
    training: Literal["train", "mask", "drop"]


POLICIES: Mapping[Outcome, OutcomePolicy] = {
    Outcome.ANSWERED: OutcomePolicy("use", False, "train"),
    Outcome.ENV_DONE: OutcomePolicy("use", False, "train"),
    Outcome.MAX_STEPS: OutcomePolicy("use", True, "train"),
    Outcome.CONTEXT_OVERFLOW: OutcomePolicy("use", True, "train"),
    Outcome.TIME_LIMIT: OutcomePolicy("use", True, "train"),
    Outcome.RESPONSE_TRUNCATED: OutcomePolicy("use", True, "train"),
    Outcome.PARSE_FAILURE: OutcomePolicy("use", False, "train"),
    Outcome.TOOL_FAILURE: OutcomePolicy("none", False, "drop"),
    Outcome.ENV_FAILURE: OutcomePolicy("none", False, "drop"),
    Outcome.ENGINE_FAILURE: OutcomePolicy("none", False, "drop"),
    Outcome.STALE: OutcomePolicy("none", False, "drop"),
    Outcome.FAILURE_AS_ZERO: OutcomePolicy("zero", False, "train"),
}


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Budget:
    """Every length limit of a trajectory, and what happens where it is reached.

    Attributes:
      max_steps: steps (responses) of one trajectory; then the outcome is `max_steps`.
      response_tokens: tokens sampled in one step, stop token included; see `on_truncated_response`.
      observation_tokens: tokens of one tool result; a longer result is truncated with a visible marker.
      context_tokens: prompt + response of any one step; a prompt that leaves no room for a response
        ends the trajectory with `context_overflow`.
      trajectory_tokens: tokens sampled or observed over the whole trajectory; then `context_overflow`.
      on_truncated_response: `end` the trajectory with `response_truncated`, or `continue`: the environment receives
        the truncated text like any other action.
      final_answer_step: when the steps run out without an answer, one forced step more, whose observation asks for
        the answer.
      step_seconds: time of one step, from its prompt to the answer of the environment, waiting for a slot included;
        then the outcome is `time_limit`, and the unfinished step is left out. None for no limit.
      trajectory_seconds: time of one trajectory, likewise.
    """

    max_steps: Count
    response_tokens: Count
    observation_tokens: Count
    context_tokens: Count
    trajectory_tokens: Count
    on_truncated_response: Literal["end", "continue"] = "end"
    final_answer_step: bool = False
    step_seconds: Positive | None = None
    trajectory_seconds: Positive | None = None

    def __post_init__(self) -> None:
        if self.response_tokens >= self.context_tokens:
            raise ValueError(
                f"response_tokens ({self.response_tokens}) leaves no room for a prompt within "
                f"context_tokens ({self.context_tokens})"
            )


class Term(NamedTuple):
    """One addend of an advantage: weight · (Σ plus − Σ minus) / std; the terms of an advantage sum to it.

    Numbers in the record of a step; arrays in a credit scheme.

    Attributes:
      plus: quantities that are added, by name, e.g. `{"return": 1.2}`.
      minus: quantities that are subtracted, e.g. `{"group mean": 1.2875}`.
      weight: factor of the term, e.g. a hyper-parameter of the scheme.
      std: what the difference is divided by.
    """

    plus: Mapping[str, Any]
    minus: Mapping[str, Any] = {}
    weight: Any = 1.0
    std: Any = 1.0

    @property
    def difference(self) -> Any:
        """Σ plus − Σ minus."""
        return sum(self.plus.values()) - sum(self.minus.values())

    @property
    def total(self) -> Any:
        """Share of the term in the advantage."""
        return self.weight * self.difference / self.std


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One transition: the prompt the policy saw, the tokens it sampled, what the environment answered.

    Attributes:
      prompt_ids: int32 [P], exactly what the policy was given.
      response_ids: int32 [R], exactly what was sampled, with the stop token if one was sampled.
      logprobs: float32 [R], log-probabilities (nats) under the very distribution that was sampled from.
      reward: reward of the step; None while unknown (never silently 0).
      reward_parts: weighted parts of the reward by name; their sum is the reward.
      raw_reward_parts: the same parts, and those without a weight, before weighting; for metrics.
      observation: text that the policy is given next: the answer of the environment or, before a summary, the request
        for one (the answer is then the observation of the summary's step).
      tool_calls: one record per parsed call: `name, arguments, ok, error, result`.
      state_key: anchor of the state that the prompt ends with, given by the environment.
      action_key: canonical form of the action, by the environment or the agent loop; None where neither gave one.
      potential: Φ of the state that the prompt ends with; None where the environment has none.
      next_potential: Φ of the state after the step; likewise.
      trainable: False leaves the step's tokens out of the loss.
      advantages: float32 [R], advantages that training assigned to the response; None before.
      account: terms by name that sum to the mean of `advantages`; empty where the credit scheme names none.
      shaped_reward: reward as the credit scheme saw it, shaped and with the rewards of its tokens (KL in the reward);
        None where it is `reward`.
      values: float16 [R], the critic's values from which the advantages follow; None without a critic. float32 where
        one is too large.
      value_targets: likewise, what the critic was trained towards; NaN at tokens without a target.
      belief: mean log-prob of the gold answer's tokens at `prompt_ids`; None where training did not probe it.
      context_rule: name of the rule that built `prompt_ids`.
      observation_tokens: number of ids at the end of `prompt_ids` that the environment made in answer to the step
        before; all of them where the prompt holds nothing that was sampled. None where nobody said: then they are what
        the prompt adds to the previous prompt + response, if it extends these (see `observation_tokens`).
      policy_version: number of updates the sampling parameters had seen.
      version_changes: pairs (index of a response token, version) where it went on with other parameters.
      info: JSON for people; nothing is computed from it.

    Raises:
      ValueError: there is not one log-probability, advantage, value or value target for each response id, or there are
        more observation tokens than prompt ids.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    reward: float | None = None
    reward_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    raw_reward_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    observation: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    state_key: str | None = None
    action_key: str | None = None
    potential: float | None = None
    next_potential: float | None = None
    trainable: bool = True
    advantages: np.ndarray | None = None
    account: Mapping[str, Term] = dataclasses.field(default_factory=dict)
    shaped_reward: float | None = None
    values: np.ndarray | None = None
    value_targets: np.ndarray | None = None
    belief: float | None = None
    context_rule: str = "append"
    observation_tokens: int | None = None
    policy_version: int = 0
    version_changes: Sequence[tuple[int, int]] = ()
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def tokens_by_version(self) -> dict[int, int]:
        """Return the number of response tokens that each policy version sampled."""
        starts = [(0, self.policy_version), *self.version_changes]
        ends = [*(at for at, _ in self.version_changes), len(self.response_ids)]
        return {version: end - at for (at, version), end in zip(starts, ends, strict=True)}

    def __post_init__(self) -> None:
        per_token = {"log-probability": self.logprobs, "advantage": self.advantages}
        per_token |= {"value": self.values, "value target": self.value_targets}
        for what, values in per_token.items():
            if values is not None and values.shape != self.response_ids.shape:
                raise ValueError(
                    f"a step needs one {what} for each response id, and has {values.size} for {self.response_ids.size}"
                )
        if (self.observation_tokens or 0) > len(self.prompt_ids):
            raise ValueError(f"a prompt of {len(self.prompt_ids)} ids has {self.observation_tokens} observation tokens")


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """All steps that one agent took on one task row.

    Attributes:
      uid: unique within a run, e.g. `train/000012/3`: phase, prompt index, sample.
      group: index of the group (all samples of one task row) within its batch.
      sample: index within the group.
      task: name of the task.
      seed: seed of the environment.
      steps: in order of time.
      outcome: how it ended.
      final_prompt_ids: int32 [P], prompt of the step after a truncated episode, for its bootstrap value.
      greedy_return: return of the greedy rollout of the same row; None where there is none.
      final_value: the critic's value of `final_prompt_ids`, by which training bootstrapped a truncated trajectory; 0
        where truncation counted as an end; None without a critic, and where it was not truncated.
      metrics: scalars such as `em` and `f1`.
      row: facts of the task row (`ROW_FACTS`, as far as it has them), by which metrics are grouped; JSON.
      info: JSON for people; nothing is computed from it.
    """

    uid: str
    group: int
    sample: int
    task: str
    seed: int
    steps: Sequence[Step]
    outcome: Outcome
    final_prompt_ids: np.ndarray | None = None
    greedy_return: float | None = None
    final_value: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def total_reward(self) -> float:
        """R_i = Σₜ rₜ, as the outcome's reward policy says. Raises ValueError if a reward that counts is missing."""
        if POLICIES[self.outcome].reward != "use":
            return 0.0
        missing = [t for t, step in enumerate(self.steps) if step.reward is None]
        if missing:
            raise ValueError(f"trajectory {self.uid} ({self.outcome}): steps {missing} have no reward")
        return float(sum(step.reward for step in self.steps))  # type: ignore[misc]


def observation_tokens(trajectory: Trajectory) -> list[int]:
    """Return the number of ids at the end of each step's prompt that the environment made in answer to the step before.

    They are tool results and template glue, never what the policy sampled, which most context rules show again: as many
    as the step recorded. Of a prompt that holds nothing sampled they are what stands behind the longest prefix in
    common with the previous prompt + response, without the first id of all, which no token predicts. Where nothing is
    recorded, a prompt that extends these has what it adds, and any other one 0. The first step, whose prompt is the
    task, has 0.
    """
    counts = [0] * len(trajectory.steps)
    for t, (before, step) in enumerate(itertools.pairwise(trajectory.steps), start=1):
        previous = np.concatenate([before.prompt_ids, before.response_ids])
        known = common_prefix(step.prompt_ids, previous)
        recorded = len(step.prompt_ids) if step.observation_tokens is None else step.observation_tokens
        if recorded < len(step.prompt_ids):
            counts[t] = recorded
        elif step.observation_tokens is not None or known == len(previous):
            counts[t] = max(len(step.prompt_ids) - max(known, 1), 0)
    return counts


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the longest common prefix of two id sequences [P] and [Q]."""
    shared = min(len(one), len(other))
    differs = np.flatnonzero(one[:shared] != other[:shared])
    return int(differs[0]) if len(differs) else shared

"""Steps, trajectories and how they end: the record that every other room reads or writes.

A step is one RL transition with the exact prompt ids the policy saw and the exact response ids it sampled.
Nothing in this file depends on a tokenizer, an environment or JAX.
"""

from __future__ import annotations

import dataclasses
import enum
import gzip
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from agentr1_jax import files


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


@dataclasses.dataclass(frozen=True)
class OutcomePolicy:
    """What an outcome means for learning.

    Attributes:
      reward: `use` the recorded rewards, count them as `zero`, or there is `none` to speak of.
      bootstrap: True if the trajectory was cut, so that the value of its last observation stands for the future;
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
}


CORRUPT = (
    *(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError),  # of JSON and its shape
    *(EOFError, zlib.error, gzip.BadGzipFile),  # of gzip
)
"""What reading a corrupt line raises."""

NONFINITE = ("nan", "inf", "-inf")
"""How numbers that are not finite are written."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Every length limit of a trajectory, and what happens where it is reached.

    Attributes:
      max_steps: steps (responses) of one trajectory; then the outcome is `max_steps`.
      response_tokens: tokens sampled in one step, stop token included; see `on_response_cut`.
      observation_tokens: tokens of one tool result; what exceeds it is cut with a visible marker.
      context_tokens: prompt + response of any one step; a prompt that leaves no room for a response
        ends the trajectory with `context_overflow`.
      trajectory_tokens: tokens sampled or observed over the whole trajectory; then `context_overflow`.
      on_response_cut: `end` the trajectory with `response_truncated`, or `continue`: the environment sees
        the cut text like any other action.
      final_answer_step: when the steps run out without an answer, one forced step more, whose observation asks for
        the answer.
      step_seconds: of one step, from its prompt to what comes back, waiting for a slot included; then the outcome is
        `time_limit`, and the step that was under way is left out. None for no limit.
      trajectory_seconds: of one trajectory, likewise.
    """

    max_steps: int
    response_tokens: int
    observation_tokens: int
    context_tokens: int
    trajectory_tokens: int
    on_response_cut: Literal["end", "continue"] = "end"
    final_answer_step: bool = False
    step_seconds: float | None = None
    trajectory_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in ("max_steps", "response_tokens", "observation_tokens", "context_tokens", "trajectory_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"budget.{field} is {getattr(self, field)}; it must be at least 1")
        for field in ("step_seconds", "trajectory_seconds"):
            seconds = getattr(self, field)
            if seconds is not None and not seconds > 0:
                raise ValueError(f"budget.{field} is {seconds}; it must be positive, or None for no limit")
        if self.response_tokens >= self.context_tokens:
            raise ValueError(
                f"budget.response_tokens ({self.response_tokens}) leaves no room for a prompt within "
                f"budget.context_tokens ({self.context_tokens})"
            )
        if self.on_response_cut not in ("end", "continue"):
            raise ValueError(f"budget.on_response_cut is {self.on_response_cut!r}; choose 'end' or 'continue'")


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One transition: the prompt the policy saw, the tokens it sampled, what came back.

    Attributes:
      prompt_ids: int32 [P], exactly what the policy was given.
      response_ids: int32 [R], exactly what was sampled, with the stop token if one was sampled.
      logprobs: float32 [R], log-probabilities (nats) under the very distribution that was sampled from.
      reward: the step's reward; None while unknown (never silently 0).
      reward_parts: named parts of the reward, for logs.
      observation: what the policy was told next, as text: what the environment answered, or where a summary follows
        the request for it, whose step then has the answer.
      tool_calls: one record per parsed call: `name, arguments, ok, error, result`.
      state_key: anchor of the state the prompt ends with, given by the environment.
      context_rule: the rule that built `prompt_ids`.
      policy_version: number of updates the sampling parameters had seen.
      info: anything else worth keeping; must be JSON. A step that says `"trained": False` is left out of the loss.

    Raises:
      ValueError: there is not one log-probability for each response id.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    reward: float | None = None
    reward_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    observation: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    state_key: str | None = None
    context_rule: str = "append"
    policy_version: int = 0
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.logprobs.shape != self.response_ids.shape:
            raise ValueError(
                f"a step needs one log-probability for each response id, and has {self.logprobs.size} for "
                f"{self.response_ids.size}"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """All steps that one agent took on one task row.

    Attributes:
      uid: unique within a run, e.g. `train/000012/00034/3`.
      group: index of the group (all samples of one task row) within its batch.
      sample: index within the group.
      task: task name and row id.
      seed: seed of the environment.
      steps: in order of time.
      outcome: how it ended.
      final_prompt_ids: int32 [P] next prompt had it gone on; set where it was cut, so that V can be bootstrapped there.
      metrics: scalars such as `em` and `f1`.
      info: anything else worth keeping (question, gold answer); must be JSON.
    """

    uid: str
    group: int
    sample: int
    task: str
    seed: int
    steps: Sequence[Step]
    outcome: Outcome
    final_prompt_ids: np.ndarray | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def total_reward(self) -> float:
        """R_i = Σₜ rₜ, as the outcome's reward policy says. Raises if a reward that counts is missing."""
        if POLICIES[self.outcome].reward != "use":
            return 0.0
        missing = [t for t, step in enumerate(self.steps) if step.reward is None]
        if missing:
            raise ValueError(f"trajectory {self.uid} ({self.outcome}): steps {missing} have no reward")
        return float(sum(step.reward for step in self.steps))  # type: ignore[misc]


def observation_tokens(trajectory: Trajectory) -> list[int]:
    """How many tokens at the end of each step's prompt came from elsewhere than the policy, since the step before.

    They are the ids behind the longest common prefix with the previous prompt + response: under the rule `append` what
    tools and template glue added, under others also what was written anew. Where nothing is common, the first id is not
    counted, since no token stands before it that could predict it.

    Returns:
      a count for each step; 0 for the first, whose prompt is the task.
    """
    counts = [0] * len(trajectory.steps)
    for t, (before, step) in enumerate(itertools.pairwise(trajectory.steps), start=1):
        previous = np.concatenate([before.prompt_ids, before.response_ids])
        known = max(_common_prefix(step.prompt_ids, previous), 1)
        counts[t] = max(len(step.prompt_ids) - known, 0)
    return counts


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    shared = min(len(one), len(other))
    differs = np.flatnonzero(one[:shared] != other[:shared])
    return int(differs[0]) if len(differs) else shared


def _delta(prompt: np.ndarray, previous: np.ndarray) -> dict[str, Any]:
    """A prompt as the longest common prefix with `previous` and the ids that follow it."""
    reuse = _common_prefix(prompt, previous)
    return {"reuse": reuse, "new": prompt[reuse:].tolist()}


def _ids(values: Any) -> np.ndarray:
    ids = np.asarray(values, np.int32)
    if ids.ndim != 1 or ids.tolist() != values:
        raise ValueError(f"{values!r:.80} is not a list of ids")
    return ids


def _undelta(record: Mapping[str, Any], previous: np.ndarray) -> np.ndarray:
    if not 0 <= record["reuse"] <= len(previous):
        raise ValueError(f"a prompt reuses {record['reuse']} of {len(previous)} ids")
    return np.concatenate([previous[: record["reuse"]], _ids(record["new"])])


def _finite(value: Any) -> Any:
    """The same with `nan`, `inf` and `-inf` as strings, for which JSON has no numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(x) for key, x in value.items()}
    return [_finite(x) for x in value] if isinstance(value, list | tuple) else value


def _number(value: Any) -> Any:
    return float(value) if value in NONFINITE else value


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as plain JSON; each prompt is stored against the previous prompt + response."""
    steps = []
    previous = np.zeros(0, np.int32)
    for step in trajectory.steps:
        record = {f.name: getattr(step, f.name) for f in dataclasses.fields(Step)}
        record["prompt_ids"] = _delta(step.prompt_ids, previous)
        record["response_ids"] = step.response_ids.tolist()
        record["logprobs"] = [float(x) for x in step.logprobs]
        steps.append(record)
        previous = np.concatenate([step.prompt_ids, step.response_ids])
    out = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(Trajectory)}
    out["steps"] = steps
    if trajectory.final_prompt_ids is not None:
        out["final_prompt_ids"] = _delta(trajectory.final_prompt_ids, previous)
    return out


def from_json(record: Mapping[str, Any]) -> Trajectory:
    """The inverse of `to_json`. Raises one of `CORRUPT` on a record of another shape."""
    steps: list[Step] = []
    previous = np.zeros(0, np.int32)
    for fields in record["steps"]:
        fields = dict(fields)
        fields["prompt_ids"] = _undelta(fields["prompt_ids"], previous)
        fields["response_ids"] = _ids(fields["response_ids"])
        fields["logprobs"] = np.asarray([float(x) for x in fields["logprobs"]], np.float32)
        fields["reward"] = _number(fields["reward"])
        fields["reward_parts"] = {name: _number(x) for name, x in fields["reward_parts"].items()}
        steps.append(Step(**fields))
        previous = np.concatenate([steps[-1].prompt_ids, steps[-1].response_ids])
    out = dict(record)
    out["steps"] = tuple(steps)
    out["outcome"] = Outcome(out["outcome"])
    out["metrics"] = {name: _number(x) for name, x in out["metrics"].items()}
    if out.get("final_prompt_ids") is not None:
        out["final_prompt_ids"] = _undelta(out["final_prompt_ids"], previous)
    return Trajectory(**out)


def write_jsonl(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> None:
    """Writes one gzipped JSONL file, which appears whole; equal content gives equal bytes (mtime 0).

    Numbers that are not finite are written as strings, so that what spoilt a trajectory can be looked at.
    """
    with (
        files.published(path, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=5) as out,
    ):
        for trajectory in trajectories:
            record = to_json(trajectory)
            try:
                line = json.dumps(record, allow_nan=False)
            except ValueError:
                line = json.dumps(_finite(record), allow_nan=False)
            # Plain ASCII, since text of tools may hold lone surrogates, which UTF-8 has no bytes for.
            out.write(line.encode() + b"\n")


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
    """Reads what `write_jsonl` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not a trajectory; the message names file and line.
    """
    with files.opened(path) as raw, gzip.GzipFile(fileobj=raw) as lines:
        for number in itertools.count(1):
            try:
                line = lines.readline()
                if not line:
                    return
                trajectory = from_json(json.loads(line))
            except CORRUPT as error:
                raise ValueError(
                    f"{os.fspath(path)}, line {number}: not a trajectory ({type(error).__name__}: {error}); "
                    "delete or repair the file"
                ) from error
            yield trajectory

"""The Session and Agent contracts: everything that an agent sees of the engine that generates its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, Unpack

import numpy as np

from agentr1_jax.envs.base import Row
from agentr1_jax.trajectory import Outcome, Step

__all__ = ["Agent", "Completion", "Row", "Session", "StepFacts"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One generated response.

    Attributes:
      ids: int32 [R] sampled ids, with the stop token where one was sampled.
      logprobs: float32 [R], log-probabilities under the distribution that was sampled from.
      finish_reason: `stop` (a stop token or sequence) or `length` (the token limit).
      policy_version: number of updates that the sampling parameters had seen.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: Literal["stop", "length"]
    policy_version: int = 0


class StepFacts(TypedDict, total=False):
    """Fields of a `Step` that its agent determines, apart from the reward; see `Step`."""

    reward_parts: Mapping[str, float]
    raw_reward_parts: Mapping[str, float]
    observation: str
    tool_calls: Sequence[Mapping[str, Any]]
    state_key: str | None
    action_key: str | None
    potential: float | None
    next_potential: float | None
    trainable: bool
    context_rule: str
    info: Mapping[str, Any]


class Session(Protocol):
    """One trajectory's view of the engine: `generate` opens a step, `record` completes it, `finish` ends it all.

    Attributes:
      seed: seed of the environment.
      steps: steps completed so far.
    """

    seed: int

    @property
    def steps(self) -> Sequence[Step]: ...

    async def generate(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]] = ()) -> Completion:
        """Sample a response.

        Args:
          prompt_ids: int32 [P].
          max_tokens: most tokens of the response, its stop token included.
          stop: id sequences that end the response.
        """
        ...

    def record(self, reward: float | None, **facts: Unpack[StepFacts]) -> None:
        """Complete the open step.

        Raises:
          RuntimeError: no step is open.
          BoundaryError: a value has the wrong type or range.
        """
        ...

    def finish(
        self,
        outcome: Outcome,
        final_prompt_ids: np.ndarray | None = None,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """End the trajectory; for the arguments see `Trajectory`.

        Raises:
          RuntimeError: a step is open, or the trajectory has ended.
          BoundaryError: a value has the wrong type or range, or a reward that counts is missing.
        """
        ...

    def abort(self, outcome: Outcome, reason: str, metrics: Mapping[str, float] | None = None) -> None:
        """End the trajectory within a step, which is left out; its prompt becomes the final one."""
        ...


class Agent(Protocol):
    """A workflow over one task row; it talks to the policy only through its session."""

    async def run(self, session: Session, row: Row) -> None:
        """Run one episode: any number of generate / record pairs, then one finish."""
        ...

"""The Session and Agent contracts: all that an agent sees of whatever generates its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from agentr1_jax.envs.base import Row
from agentr1_jax.trajectory import Outcome, Step

__all__ = ["Agent", "Completion", "Row", "Session"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One generated response.

    Attributes:
      ids: int32 [R] sampled ids, with the stop token where one was sampled.
      logprobs: float32 [R] under the distribution sampled from.
      finish_reason: `stop` (a stop token or sequence) or `length` (the budget).
      policy_version: number of updates the parameters that it was sampled with had seen.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: Literal["stop", "length"]
    policy_version: int = 0


class Session(Protocol):
    """One trajectory's view of the engine: `generate` opens a step, `record` completes it, `finish` ends the whole.

    Attributes:
      seed: of the environment.
      steps: completed so far.
    """

    seed: int

    @property
    def steps(self) -> Sequence[Step]: ...

    async def generate(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]] = ()) -> Completion:
        """Samples a response to `prompt_ids`; `stop` holds id sequences that end it."""
        ...

    def record(
        self,
        reward: float | None,
        reward_parts: Mapping[str, float] | None = None,
        observation: str = "",
        tool_calls: Sequence[Mapping[str, Any]] = (),
        state_key: str | None = None,
        context_rule: str = "append",
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """Completes the open step. Raises RuntimeError if none is open."""
        ...

    def finish(
        self,
        outcome: Outcome,
        final_prompt_ids: np.ndarray | None = None,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """Ends the trajectory."""
        ...

    def cut_off(
        self,
        outcome: Outcome,
        reason: str,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """Ends the trajectory in the middle of a step, which is left out; its prompt becomes the final one."""
        ...


class Agent(Protocol):
    """A workflow over one task row; it talks to the policy only through its session."""

    async def run(self, session: Session, row: Row) -> None:
        """Runs one episode: any number of generate / record pairs, then one finish."""
        ...

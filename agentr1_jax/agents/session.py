"""Sessions that keep the record of their trajectory, and one whose responses are an expert's texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax.agents.base import Completion
from agentr1_jax.envs.base import Expert
from agentr1_jax.text.dialects import Dialect, hermes
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.trajectory import Outcome, Step, Trajectory


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which trajectory a session stands for; see `Trajectory`."""

    uid: str
    group: int
    sample: int
    task: str
    seed: int


class RecordedSession:
    """The part of `Session` that does not depend on where responses come from; children implement `respond`."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.seed = identity.seed
        self._steps: list[Step] = []
        self._open: Step | None = None
        self._generating = False
        self._prompt: np.ndarray | None = None
        self._trajectory: Trajectory | None = None

    @property
    def steps(self) -> Sequence[Step]:
        """See `Session.steps`."""
        return tuple(self._steps)

    @property
    def finished(self) -> bool:
        """Whether `finish` was called."""
        return self._trajectory is not None

    async def respond(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]]) -> Completion:
        """Produces the response to a prompt."""
        raise NotImplementedError

    async def generate(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]] = ()) -> Completion:
        """See `Session.generate`."""
        if self._generating or self._open is not None or self._trajectory is not None:
            raise RuntimeError(f"{self.identity.uid}: generate() before record() or after finish()")
        prompt_ids = np.array(prompt_ids, np.int32)  # A copy: the agent may go on writing in its own.
        self._generating, self._prompt = True, prompt_ids
        try:
            completion = await self.respond(prompt_ids, max_tokens, stop)
        finally:
            self._generating = False
        self._open = Step(
            prompt_ids=prompt_ids,
            response_ids=completion.ids,
            logprobs=completion.logprobs,
            policy_version=completion.policy_version,
        )
        return completion

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
        """See `Session.record`."""
        if self._open is None:
            raise RuntimeError(f"{self.identity.uid}: record() without generate()")
        step = dataclasses.replace(
            self._open,
            reward=reward,
            reward_parts=dict(reward_parts or {}),
            observation=observation,
            tool_calls=tuple(tool_calls),
            state_key=state_key,
            context_rule=context_rule,
            info=dict(info or {}),
        )
        self._steps.append(step)
        self._open = self._prompt = None

    def finish(
        self,
        outcome: Outcome,
        final_prompt_ids: np.ndarray | None = None,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """See `Session.finish`."""
        if self._trajectory is not None:
            raise RuntimeError(f"{self.identity.uid}: finish() was called twice")
        if self._generating or self._open is not None:
            raise RuntimeError(f"{self.identity.uid}: finish() before record(), which would lose a step")
        self._trajectory = Trajectory(
            **dataclasses.asdict(self.identity),
            steps=tuple(self._steps),
            outcome=outcome,
            final_prompt_ids=None if final_prompt_ids is None else np.asarray(final_prompt_ids, np.int32),
            metrics=dict(metrics or {}),
            info=dict(info or {}),
        )

    def cut_off(
        self,
        outcome: Outcome,
        reason: str,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """See `Session.cut_off`."""
        if self._trajectory is not None:
            raise RuntimeError(f"{self.identity.uid}: cut_off() after finish()")
        final = self._prompt
        if final is None and self._steps:  # Between two steps: the next prompt is unknown.
            final = np.concatenate([self._steps[-1].prompt_ids, self._steps[-1].response_ids])
        self._open, self._generating = None, False
        self.finish(outcome, final, metrics, {**(info or {}), "error": reason})

    def abandoned(self, outcome: Outcome, error: BaseException) -> Trajectory:
        """The trajectory as far as it got when `error` broke it off."""
        self._trajectory = self._open = None
        self.finish(outcome, info={"error": f"{type(error).__name__}: {error}"})
        return self.trajectory()

    def trajectory(self) -> Trajectory:
        """The finished trajectory. Raises RuntimeError if the agent returned without finish()."""
        if self._trajectory is None:
            raise RuntimeError(f"{self.identity.uid}: the agent returned without finish()")
        return self._trajectory


class ScriptedSession(RecordedSession):
    """A session whose responses are an expert's texts, in the policy's dialect: demonstrations become trajectories.

    Log-probabilities are 0: demonstrations are trained with clip `none`, which does not use them.
    """

    def __init__(
        self, identity: Identity, expert: Expert, tokenizer: Tokenizer, dialect: Dialect | None = None
    ) -> None:
        super().__init__(identity)
        self._expert = expert
        self._tokenizer = tokenizer
        self._dialect = dialect or hermes.dialect()
        self._observation: str | None = None

    async def respond(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]]) -> Completion:
        text = self._dialect.from_house(self._expert(self._observation))
        ids = [*self._tokenizer.encode_template(text), self._tokenizer.stop_id]
        cut = np.asarray(ids[:max_tokens], np.int32)
        logprobs = np.zeros(len(cut), np.float32)
        return Completion(cut, logprobs, finish_reason="stop" if len(ids) <= max_tokens else "length")

    def record(
        self,
        reward: float | None,
        reward_parts: Mapping[str, float] | None = None,
        observation: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Keeps the observation for the expert's next turn."""
        self._observation = observation
        super().record(reward, reward_parts, observation, *args, **kwargs)

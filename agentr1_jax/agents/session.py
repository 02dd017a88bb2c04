"""Sessions: one trajectory's view of what generates its tokens, and all that an agent sees of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from agentr1_jax.agents import boundary
from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.text.call_formats import CallFormat, hermes
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.trajectory import POLICIES, Outcome, Step, Trajectory


@dataclasses.dataclass(frozen=True)
class Identity:
    """Name and seed of a session's trajectory; see `Trajectory`."""

    uid: str
    group: int
    sample: int
    task: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """One generated response.

    Attributes:
      ids: int32 [R] sampled ids, with the stop token where one was sampled.
      logprobs: float32 [R], log-probabilities under the distribution that was sampled from.
      finish_reason: `stop` (a stop token or sequence) or `length` (the token limit).
      policy_version: number of updates that the sampling parameters had seen.
      version_changes: see `Step`.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: Literal["stop", "length"]
    policy_version: int = 0
    version_changes: Sequence[tuple[int, int]] = ()


class Session:
    """Record of one trajectory: `generate` opens a step, `record` completes it, `finish` ends it all.

    A source of responses is a child with a `respond`. Calls in another order raise RuntimeError, and values of the
    wrong type or range BoundaryError.

    Attributes:
      seed: seed of the environment.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.seed = identity.seed
        self._row: Mapping[str, Any] = {}
        self._steps: list[Step] = []
        self._open: Step | None = None
        self._generating = False
        self._prompt: np.ndarray | None = None
        self._trajectory: Trajectory | None = None

    @property
    def steps(self) -> Sequence[Step]:
        """Steps completed so far."""
        return tuple(self._steps)

    @property
    def is_finished(self) -> bool:
        """True after `finish`."""
        return self._trajectory is not None

    def begin(self, row: Row) -> None:
        """Keep the facts of the task row; see `Trajectory.row`."""
        self._row = boundary.check_row(row)

    async def respond(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]]) -> Completion:
        """Return the response to a prompt; the arguments are those of `generate`."""
        raise NotImplementedError

    async def generate(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]] = ()) -> Completion:
        """Sample a response.

        Args:
          prompt_ids: int32 [P].
          max_tokens: most tokens of the response, its stop token included.
          stop: id sequences that end the response.
        """
        if self._generating or self._open is not None or self._trajectory is not None:
            raise RuntimeError(f"{self.identity.uid}: generate() before record() or after finish()")
        prompt_ids = boundary.check_ids(prompt_ids, "prompt_ids").copy()  # The agent may go on writing in its own.
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
            version_changes=completion.version_changes,
        )
        return completion

    def retract(self) -> None:
        """Drop the response of the open step, as if it had not been sampled: `generate` opens the step anew."""
        if self._open is None:
            raise RuntimeError(f"{self.identity.uid}: retract() without generate()")
        self._open = self._prompt = None

    def record(self, reward: float | None, **facts: Any) -> None:
        """Complete the open step; `facts` are further fields of `Step`, those of `boundary.STEP_CHECKS`."""
        if self._open is None:
            raise RuntimeError(f"{self.identity.uid}: record() without generate()")
        self._steps.append(dataclasses.replace(self._open, **boundary.check_step(reward, facts)))
        self._open = self._prompt = None

    def finish(
        self,
        outcome: Outcome,
        final_prompt_ids: np.ndarray | None = None,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """End the trajectory; the arguments are fields of `Trajectory`."""
        if self._trajectory is not None:
            raise RuntimeError(f"{self.identity.uid}: finish() was called twice")
        if self._generating or self._open is not None:
            raise RuntimeError(f"{self.identity.uid}: finish() before record(), which would lose a step")
        ending = boundary.check_ending(outcome, metrics, info)
        if POLICIES[ending["outcome"]].reward == "use":
            missing = [t for t, step in enumerate(self._steps) if step.reward is None]
            if missing:
                raise boundary.BoundaryError(f"{self.identity.uid}: steps {missing} have no reward")
        self._trajectory = Trajectory(
            **dataclasses.asdict(self.identity),
            steps=tuple(self._steps),
            final_prompt_ids=None
            if final_prompt_ids is None
            else boundary.check_ids(final_prompt_ids, "final_prompt_ids"),
            row=self._row,
            **ending,
        )

    def abort(self, outcome: Outcome, reason: str, metrics: Mapping[str, float] | None = None) -> None:
        """End the trajectory within a step, which is left out; its prompt becomes the final one."""
        final = self._prompt
        if final is None and self._steps:  # Between two steps: the next prompt is unknown.
            final = np.concatenate([self._steps[-1].prompt_ids, self._steps[-1].response_ids])
        self._open, self._generating = None, False
        self.finish(outcome, final, metrics, {"error": reason})

    def fail(self, outcome: Outcome, error: BaseException) -> Trajectory:
        """Return the trajectory up to the step in which `error` ended it; the response of that step has no reward."""
        if self._open is not None:
            self._steps.append(self._open)
        self._trajectory = self._open = None
        self._generating = False
        self.finish(outcome, info={"error": boundary.describe_error(error)})
        return self.trajectory()

    def trajectory(self) -> Trajectory:
        """Return the finished trajectory. Raises RuntimeError if the agent returned without finish()."""
        if self._trajectory is None:
            raise RuntimeError(f"{self.identity.uid}: the agent returned without finish()")
        return self._trajectory


class Agent(Protocol):
    """A workflow over one task row; it talks to the policy only through its session."""

    async def run(self, session: Session, row: Row) -> None:
        """Run one episode: any number of generate / record pairs, then one finish."""
        ...


class ScriptedSession(Session):
    """A session whose responses are an expert's texts, in the policy's call format: a source of demonstrations.

    Log-probabilities are 0: demonstrations are trained with clip `none`, which does not use them.
    """

    def __init__(
        self, identity: Identity, expert: Expert, tokenizer: Tokenizer, call_format: CallFormat | None = None
    ) -> None:
        super().__init__(identity)
        self._expert = expert
        self._tokenizer = tokenizer
        self._call_format = call_format or hermes.call_format()
        self._observation: str | None = None

    async def respond(self, prompt_ids: np.ndarray, max_tokens: int, stop: Sequence[Sequence[int]]) -> Completion:
        text = self._call_format.render(self._expert(self._observation))
        ids = [*self._tokenizer.encode_template(text), self._tokenizer.stop_id]
        response = np.asarray(ids[:max_tokens], np.int32)
        logprobs = np.zeros(len(response), np.float32)
        return Completion(response, logprobs, finish_reason="stop" if len(ids) <= max_tokens else "length")

    def record(self, reward: float | None, **facts: Any) -> None:
        """Keep the observation for the expert's next turn, and the step."""
        self._observation = facts.get("observation", "")
        super().record(reward, **facts)

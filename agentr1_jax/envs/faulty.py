"""Fault injection: an environment that misbehaves by plan, repeatably."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import cast

from agentr1_jax.envs.base import Action, Env, Observation, Row, Transition, judged
from agentr1_jax.tools.faulty import FaultPlan
from agentr1_jax.tools.keyed import uniform

KINDS = ("exception", "hang", "garbage", "crash", "latency")


@dataclasses.dataclass(eq=False)
class FaultyEnv:
    """An environment whose `reset` and `step` get the faults of a plan.

    A fault depends on the plan's seed, the episode's seed, how often that seed was reset before (its attempt) and the
    index of the step, where the reset is number 0. Garbage is None or, after a step, messages for an observation.

    Attributes:
      injected: counts the faults by kind; shared by all environments of a run.
      attempts: counts the resets by seed; shared likewise.

    Raises:
      ValueError: the plan holds a kind that only tools have.
    """

    env: Env
    plan: FaultPlan
    injected: collections.Counter[str]
    attempts: collections.Counter[int]
    _key: tuple[int, int] = dataclasses.field(default=(0, 0), init=False)
    _steps: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        for kind in self.plan.kinds:
            if kind not in KINDS:
                raise ValueError(f"environments have no fault of kind {kind!r}; choose among {', '.join(KINDS)}")

    async def reset(self, row: Row, seed: int) -> Observation:
        """Starts an episode, or fails to. Raises as `FaultPlan.happen` does."""
        self._key, self._steps = (seed, self.attempts[seed]), 0
        self.attempts[seed] += 1
        garbage = await self._fault()
        return cast(Observation, None) if garbage else await self.env.reset(row, seed)

    async def step(self, action: Action) -> Transition:
        """Applies one response, or fails to. Raises as `FaultPlan.happen` does."""
        self._steps += 1
        garbage = await self._fault()
        if not garbage:
            return await self.env.step(action)
        if uniform("garbage", self.plan.seed, *self._key, self._steps) < 0.5:
            return cast(Transition, None)
        return Transition(Observation(messages=[{"role": "user", "content": "injected"}]), 0.0)

    def summarised(self, text: str) -> Mapping[str, float]:
        """As the environment inside."""
        return judged(self.env, text)

    def cut(self) -> Mapping[str, float]:
        """As the environment inside."""
        return self.env.cut()

    async def _fault(self) -> bool:
        """Lets the next fault happen; True if garbage is to be returned."""
        kind = self.plan.fault(*self._key, self._steps)
        if kind is None:
            return False
        self.injected[kind] += 1
        await self.plan.happen(kind)
        return kind == "garbage"


def faulty_env(
    make_env: Callable[[], Env], plan: FaultPlan, injected: collections.Counter[str]
) -> Callable[[], FaultyEnv]:
    """Makes environments that share the counts of faults and attempts."""
    attempts: collections.Counter[int] = collections.Counter()
    return lambda: FaultyEnv(make_env(), plan, injected, attempts)

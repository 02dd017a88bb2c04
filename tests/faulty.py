"""Fault injection: tools and environments that misbehave by plan, repeatably."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from agentr1_jax.envs.base import Action, Env, Observation, Row, Transition, summary_rewards
from agentr1_jax.tools import base
from agentr1_jax.tools.base import ToolResult, run_in_thread
from agentr1_jax.tools.wrappers import Wrapper

KINDS = ("exception", "hang", "garbage", "huge", "crash", "latency")
ENV_KINDS = ("exception", "hang", "garbage", "crash", "latency")


def canonical_json(arguments: Mapping[str, Any]) -> str:
    """Returns arguments as JSON text, equal for equal arguments."""
    return json.dumps(dict(arguments), sort_keys=True)


def keyed_uniform(*key: str | int) -> float:
    """Returns u with 0 <= u < 1, uniform over keys; equal keys have equal numbers in every process."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


class InjectedError(Exception):
    """The exception that fault injection raises."""


@dataclasses.dataclass(frozen=True)
class FaultPlan:
    """How often what goes wrong.

    Attributes:
      rate: share of the attempts that get a fault, 0 to 1.
      kinds: which, in equal shares: `exception`; `hang`, which ends after `hang_seconds` as if nothing had been;
        `garbage`, something of another type than the contract asks for; `huge`, a content of `huge_characters`;
        `crash`, SystemExit; `latency`, a late but proper result.
      seed: equal seeds inject equal faults.
      hang_seconds: length of a hang, far beyond any time limit.
      latency_seconds: length of a latency, within the time limits.
      huge_characters: length of a huge content.
      blocking: whether hangs and latencies block a thread or wait on the event loop.
    """

    rate: float
    kinds: tuple[str, ...] = KINDS
    seed: int = 0
    hang_seconds: float = 60.0
    latency_seconds: float = 0.05
    huge_characters: int = 10_000_000
    blocking: bool = False

    def fault(self, *key: str | int) -> str | None:
        """The kind of fault that an attempt gets, by its key alone; None for none."""
        u = keyed_uniform("fault", self.seed, *key)
        return self.kinds[int(u / self.rate * len(self.kinds))] if u < self.rate else None

    async def happen(self, kind: str | None) -> None:
        """Raises or waits as a kind of fault does; the others are for the caller to return.

        Raises:
          InjectedError, SystemExit: for `exception` and `crash`.
        """
        if kind == "exception":
            raise InjectedError("injected")
        if kind == "crash":
            raise SystemExit("injected")
        if kind in ("hang", "latency"):
            seconds = self.hang_seconds if kind == "hang" else self.latency_seconds
            await (run_in_thread(time.sleep, seconds) if self.blocking else asyncio.sleep(seconds))


@dataclasses.dataclass(frozen=True, eq=False)
class FaultyTool(Wrapper):
    """A tool whose attempts get the faults of a plan.

    An attempt's fault depends on the plan's seed, the arguments, and how many calls with these arguments came before:
    not on what other calls do, nor on when.

    Attributes:
      injected: counts the faults by kind.
      attempts: counts the calls by arguments.
    """

    plan: FaultPlan
    injected: collections.Counter[str]
    attempts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    async def execute(self, arguments: Mapping[str, Any]) -> Any:
        """A ToolResult, unless it is garbage. Raises as `FaultPlan.happen` does."""
        key = canonical_json(arguments)
        kind = self.plan.fault(key, self.attempts[key])
        self.attempts[key] += 1
        if kind is not None:
            self.injected[kind] += 1
        await self.plan.happen(kind)
        if kind == "garbage":
            return {"content": "injected"}
        if kind == "huge":
            return ToolResult("x" * self.plan.huge_characters)
        return await base.execute(self.tool, arguments)


@dataclasses.dataclass(eq=False)
class FaultyEnv:
    """An environment whose `reset` and `step` get the faults of a plan.

    A fault depends on the plan's seed, the episode's seed, how often that seed was reset before (its attempt) and the
    index of the step, where the reset is number 0. Garbage is None or, after a step, messages for an observation.

    Attributes:
      injected: counts the faults by kind; shared by all environments of a run.
      attempts: counts the resets by seed; shared likewise.
    """

    env: Env
    plan: FaultPlan
    injected: collections.Counter[str]
    attempts: collections.Counter[int]
    _key: tuple[int, int] = dataclasses.field(default=(0, 0), init=False)
    _steps: int = dataclasses.field(default=0, init=False)

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
        if keyed_uniform("garbage", self.plan.seed, *self._key, self._steps) < 0.5:
            return cast(Transition, None)
        return Transition(Observation(messages=[{"role": "user", "content": "injected"}]), 0.0)

    def judge_summary(self, text: str) -> Mapping[str, float]:
        """As the environment inside."""
        return summary_rewards(self.env, text)

    def truncate(self) -> Mapping[str, float]:
        """As the environment inside."""
        return self.env.truncate()

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

"""Fault injection: a tool that misbehaves by plan, repeatably."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from agentr1_jax.tools import base
from agentr1_jax.tools.base import ToolResult
from agentr1_jax.tools.keyed import canonical, uniform
from agentr1_jax.tools.threads import in_thread
from agentr1_jax.tools.wrappers import Wrapper

KINDS = ("exception", "hang", "garbage", "huge", "crash", "latency")


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

    Raises:
      ValueError: a rate, length or kind that makes no sense; the message names it.
    """

    rate: float
    kinds: tuple[str, ...] = KINDS
    seed: int = 0
    hang_seconds: float = 60.0
    latency_seconds: float = 0.05
    huge_characters: int = 10_000_000
    blocking: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate is {self.rate}; it must be within 0 and 1")
        for name in ("hang_seconds", "latency_seconds", "huge_characters"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and at least 0")
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"unknown kind of fault {kind!r}; choose among {', '.join(KINDS)}")
        if not self.kinds:
            raise ValueError(f"kinds is empty; choose among {', '.join(KINDS)}, or set rate to 0")

    def fault(self, *key: str | int) -> str | None:
        """The kind of fault that an attempt gets, by its key alone; None for none."""
        u = uniform("fault", self.seed, *key)
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
            await (in_thread(time.sleep, seconds) if self.blocking else asyncio.sleep(seconds))


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
        key = canonical(arguments)
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

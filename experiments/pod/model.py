"""What the simulation of a pod is made of: recorded work, an engine's shape, speeds of a device, tool latencies."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agentr1_jax.errors import UserError
from agentr1_jax.rollout.device import rows_bucket

Z95 = 1.6448536269514722
"""Standard deviations between median and 95th percentile of a normal distribution."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A recorded trajectory as an engine sees it, step by step.

    Attributes:
      response: tokens sampled, each at least 1.
      prefill: prompt tokens to compute before that, where the cache holds what its own line and its group know.
      again: the same where the weights have changed since, so that only the group's lines help.
      calls: tool calls made together after the response.
      tokens: of the whole trajectory, as the learner reads it.
    """

    response: tuple[int, ...]
    prefill: tuple[int, ...]
    again: tuple[int, ...]
    calls: tuple[int, ...]
    tokens: int

    @functools.cached_property
    def steps(self) -> tuple[tuple[Work, Work], ...]:
        """Each step as a trajectory of its own, as rounds need it: with its cache, and with a void one."""
        return tuple(
            (Work((response,), (new,), (new,), (0,), 0), Work((response,), (again,), (again,), (0,), 0))
            for response, new, again in zip(self.response, self.prefill, self.again, strict=True)
        )


class Job(NamedTuple):
    """A trajectory to simulate: its work, and the seconds until its tools have answered after each response."""

    work: Work
    waits: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Shape:
    """An engine's shape, as in `EngineConfig`; one data shard on each host."""

    slots: int
    parking: int
    chunk: int
    leave_after: int
    prefill_width: int
    prefill_rows: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in ("slots", "chunk", "prefill_width"):
            if getattr(self, field) < 1:
                raise UserError(f"{field} is {getattr(self, field)}; it must be at least 1")
        for field in ("parking", "leave_after"):
            if getattr(self, field) < 0:
                raise UserError(f"{field} is {getattr(self, field)}; it must not be negative")

    def rows(self, tokens: int) -> int:
        """Rows of a prefill call that so many consecutive tokens take."""
        return -(-tokens // self.prefill_width)

    def padded(self, rows: int) -> int:
        """Tokens that prefill calls for so many rows compute, padding included."""
        return _rows_computed(rows, self.prefill_rows) * self.prefill_width


@functools.cache
def _rows_computed(rows: int, buckets: tuple[int, ...]) -> int:
    computed = 0
    while rows > 0:
        count = rows_bucket(rows, buckets)
        computed, rows = computed + count, rows - count
    return computed


@dataclasses.dataclass(frozen=True)
class Speeds:
    """What a host's devices take, in seconds.

    Attributes:
      step: of a decode iteration, however few of its slots are live.
      slot: what each live slot adds to it.
      prefill_token: for each prompt token computed, padding included.
      turn: of a turn of the engine, beside what follows.
      response: for each response that a turn completes: the host decodes text, runs the environment, encodes.
      learner_token: of an update, for each token that falls to a host.
      update: of an update, whatever its size.
      transfer: new weights on their way to all engines.
      jitter: standard deviation of the log of a turn's time on a host, whose mean stays.
    """

    step: float
    slot: float = 0.0
    prefill_token: float = 0.0
    turn: float = 0.0
    response: float = 0.0
    learner_token: float = 0.0
    update: float = 0.0
    transfer: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for field, value in dataclasses.asdict(self).items():
            if not 0 <= value < math.inf:
                raise UserError(f"speed {field!r} is {value}; it must be a finite number of seconds, not negative")
        if self.step + self.slot <= 0:
            raise UserError("a decode iteration must take time; give --step_seconds or --slot_seconds")


KINDS = {
    "constant": ("seconds",),
    "exponential": ("mean",),
    "lognormal": ("median", "sigma"),
    "uniform": ("low", "high"),
}
"""Distributions of tool latencies, and their parameters."""


@dataclasses.dataclass(frozen=True)
class Latency:
    """How long a tool call takes: a distribution of `KINDS` and its parameters, in seconds (sigma: of the log)."""

    kind: str
    parameters: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"tool latency {self}: unknown distribution; choose one of {described_kinds()}")
        names = KINDS[self.kind]
        if len(self.parameters) != len(names):
            raise UserError(f"tool latency {self}: write {self.kind}({','.join(names)})")
        for name, value in zip(names, self.parameters, strict=True):
            if not 0 <= value < math.inf:
                raise UserError(f"tool latency {self}: {name} is {value:g}; it must be finite and not negative")
        if self.kind == "uniform" and self.parameters[0] > self.parameters[1]:
            raise UserError(f"tool latency {self}: low is above high")

    def __str__(self) -> str:
        return f"{self.kind}({','.join(f'{p:.3g}' for p in self.parameters)})"

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Seconds of so many calls, float64 [count]; a longer draw begins like a shorter one."""
        p = self.parameters
        match self.kind:
            case "lognormal":
                return p[0] * np.exp(p[1] * rng.standard_normal(count))
            case "exponential":
                return p[0] * rng.standard_exponential(count)
            case "uniform":
                return p[0] + (p[1] - p[0]) * rng.random(count)
            case _:
                return np.full(count, p[0])


def described_kinds() -> str:
    """The distributions as they are written."""
    return ", ".join(f"{name}({','.join(parameters)})" for name, parameters in KINDS.items())


def parse_latency(text: str) -> Latency:
    """`lognormal(1.0,0.8)` and the like.

    Raises:
      UserError: not such a text, an unknown distribution, a parameter too many, too few or negative.
    """
    match = re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", text)
    if match is None:
        raise UserError(f"--tool_latency={text}: write `measured` or one of {described_kinds()}")
    try:
        parameters = tuple(float(part) for part in match[2].split(","))
    except ValueError as error:
        raise UserError(f"--tool_latency={text}: {match[2]!r} are not numbers; e.g. lognormal(1.0,0.8)") from error
    return Latency(match[1], parameters)


def lognormal_of(p50: float, p95: float) -> Latency:
    """The lognormal distribution with this median and 95th percentile (seconds)."""
    if not 0 < p50 <= p95:
        raise UserError(f"tool latencies of median {p50} s and 95th percentile {p95} s are those of no distribution")
    return Latency("lognormal", (p50, math.log(p95 / p50) / Z95))


def draw_batch(
    recorded: Sequence[Sequence[Work]], count: int, latency: Latency, seed: int, batch: int
) -> list[list[Job]]:
    """A batch of `count` groups, each drawn whole from the recorded ones with replacement, and its tools' latencies.

    Whole groups, so that what samples of one question have in common stays. A larger batch of the same seed and number
    begins with the same groups and latencies.
    """
    choice, tools = np.random.default_rng([seed, batch, 0]), np.random.default_rng([seed, batch, 1])
    groups = [recorded[int(len(recorded) * u)] for u in choice.random(count)]
    calls = np.asarray([n for group in groups for work in group for n in work.calls], np.int64)
    waits = np.zeros(len(calls))
    # A step waits for the slowest of its calls, which begin together.
    with_calls = np.flatnonzero(calls)
    if len(with_calls):
        made = calls[with_calls]
        waits[with_calls] = np.maximum.reduceat(latency.draw(tools, int(made.sum())), np.cumsum(made) - made)
    seconds, at, out = waits.tolist(), 0, []
    for group in groups:
        jobs = []
        for work in group:
            jobs.append(Job(work, seconds[at : at + len(work.calls)]))
            at += len(work.calls)
        out.append(jobs)
    return out


def deal(groups: Sequence[Sequence[Job]], hosts: int) -> list[list[Job]]:
    """The trajectories of each host: consecutive groups, as evenly as whole groups allow."""
    ends = [len(groups) * host // hosts for host in range(hosts + 1)]
    return [[job for group in groups[a:b] for job in group] for a, b in zip(ends, ends[1:], strict=False)]

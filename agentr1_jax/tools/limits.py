"""From limits to a tool that keeps them."""

from __future__ import annotations

import dataclasses
import math

from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.batched import Batched
from agentr1_jax.tools.meter import Meter
from agentr1_jax.tools.replay import Recorded, Recording, Replay, Replayed
from agentr1_jax.tools.wrappers import Capped, Measured, Retried, Shortened, TimeLimited


@dataclasses.dataclass(frozen=True)
class ToolLimits:
    """What a tool may take; 0 leaves a limit out.

    A call ends within attempts · seconds plus its pauses, not counting the time that it queues for a place among
    `calls`.

    Attributes:
      seconds: time limit of one attempt.
      attempts: attempts at a call that fails by a fault of the infrastructure; 1 makes none again.
      backoff: seconds before the second attempt, doubled for each further one (with jitter, at most 30).
      calls: calls that run at once.
      batch_milliseconds: how long calls are collected for a tool that has `execute_batch`.
      batch: most calls of such a batch (no more than `calls` come together).
      characters: longest content of a result; the rest is cut.

    Raises:
      ValueError: a value makes no sense; the message names it as `tools.<field>`.
    """

    seconds: float = 30.0
    attempts: int = 3
    backoff: float = 0.5
    calls: int = 64
    batch_milliseconds: float = 2.0
    batch: int = 32
    characters: int = 20_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = isinstance(field.default, int)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"tools.{field.name} is {value!r}; it must be {'an integer' if whole else 'a number'}")
            if not 0 <= value < math.inf:
                raise ValueError(f"tools.{field.name} is {value}; it must be finite and at least 0 (0 for none)")


def wrapped(tool: Tool, limits: ToolLimits, meter: Meter, tape: Recording | Replay | None = None) -> Tool:
    """The tool within its limits, measured; its results recorded, or replayed without calling it.

    From the inside: batch, time limit, cap (queueing is not timed), retries (a pause holds no place), cut, recording,
    meter. What is recorded is thus what the policy saw, and a replay needs no limits.
    """
    if isinstance(tape, Replay):
        return Measured(Replayed(tool, tape), meter)
    inner = tool
    if limits.batch and hasattr(tool, "execute_batch"):
        inner = Batched(inner, limits.batch_milliseconds, limits.batch)
    if limits.seconds:
        inner = TimeLimited(inner, limits.seconds)
    if limits.calls:
        inner = Capped(inner, limits.calls)
    if limits.attempts > 1:
        inner = Retried(inner, limits.attempts, limits.backoff, on_retry=meter.retried)
    if limits.characters:
        inner = Shortened(inner, limits.characters)
    if tape is not None:
        inner = Recorded(inner, tape)
    return Measured(inner, meter)

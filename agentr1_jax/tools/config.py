"""Settings of tool calls, and the wrappers that keep them."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.batching import Batched
from agentr1_jax.tools.metrics import ToolMetrics
from agentr1_jax.tools.wrappers import ConcurrencyLimited, Measured, Retried, TimeLimited, Truncated
from agentr1_jax.validation import STRICT, Count, NonNegative, Whole


@dataclass(frozen=True, config=STRICT)
class ToolsConfig:
    """Limits of every tool call; 0 leaves a limit out.

    A call ends within max_attempts · timeout_seconds plus its pauses, not counting the time that it queues while
    `max_concurrent` others run.

    Attributes:
      timeout_seconds: time limit of one attempt.
      max_attempts: attempts at a call that fails by a fault of the infrastructure.
      backoff_seconds: pause before the second attempt, doubled for each further one (with jitter, at most 30 s).
      max_concurrent: calls of one tool that run at once, in each process.
      max_batch: calls in one batch of a tool that has `execute_batch` (no more than `max_concurrent` come together).
      batch_milliseconds: time for which calls are collected for a batch.
      max_characters: length of a result's content; the rest is truncated.
      lenient: repair calls whose JSON is broken; see docs/formats.md.
    """

    timeout_seconds: NonNegative = 30.0
    max_attempts: Count = 3
    backoff_seconds: NonNegative = 0.5
    max_concurrent: Whole = 64
    max_batch: Whole = 32
    batch_milliseconds: NonNegative = 2.0
    max_characters: Whole = 20_000
    lenient: bool = False


def wrap_tool(tool: Tool, config: ToolsConfig, metrics: ToolMetrics) -> Tool:
    """Return the tool within its limits, measured.

    From the inside: batches, time limit, concurrency limit (queueing is not timed), retries (a pause holds no place),
    truncation, metrics.
    """
    inner = tool
    if config.max_batch and hasattr(tool, "execute_batch"):
        inner = Batched(inner, config.batch_milliseconds, config.max_batch)
    if config.timeout_seconds:
        inner = TimeLimited(inner, config.timeout_seconds)
    if config.max_concurrent:
        inner = ConcurrencyLimited(inner, config.max_concurrent)
    if config.max_attempts > 1:
        inner = Retried(inner, config.max_attempts, config.backoff_seconds, on_retry=metrics.record_retry)
    if config.max_characters:
        inner = Truncated(inner, config.max_characters)
    return Measured(inner, metrics)

"""Static shapes of the rollout engine."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

Reuse = Literal["all", "own", "none"]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Shapes and habits of an engine; the shapes decide what is compiled.

    Attributes:
      slots: responses decoded together by this process.
      parking: further lines of the cache, for trajectories whose tool is at work while their slot serves another.
      length: tokens a line can hold; at least `budget.context_tokens`.
      decode_chunk: most tokens sampled between two looks of the host.
      leave_after: a decode call ends early once so many of a shard's responses have ended in it; 0 for never.
      fetch_lag: 0: the host looks at a chunk before it starts the next; 1: it starts the next one first.
      prefill_width: consecutive tokens of a line that make one row of a prefill call.
      prefill_rows: buckets of rows per call and data shard, ascending.
      attention_block: positions that attention reads at once; divides `length`. Small ones follow the lengths of lines
        closely, large ones make fewer turns of a loop.
      attention_slots: slots whose lines decoding reads at once, as far as the longest of them reaches; fewer where they
        do not divide the slots of a data shard. Trajectories of like length are seated together.
      reuse: what is not computed again: what `all` lines hold of a prompt, only its `own` line, or `none`; the last two
        are there to be compared with.
      stop_sequences: most stop sequences of a request.
      stop_width: most ids of a stop sequence.
      deterministic: before every turn the engine waits until no tool is at work, so that what is computed together
        depends on the seeds alone and not on who came back first.
    """

    slots: int
    length: int
    decode_chunk: int
    prefill_width: int
    prefill_rows: tuple[int, ...]
    attention_block: int
    attention_slots: int
    parking: int = 0
    leave_after: int = 1
    fetch_lag: int = 0
    reuse: Reuse = "all"
    stop_sequences: int = 4
    stop_width: int = 4
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("slots", "length", "decode_chunk", "prefill_width", "attention_block", "attention_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("parking", "leave_after"):
            if getattr(self, name) < 0:
                raise ValueError(f"rollout.{name} is {getattr(self, name)}; it must not be negative")
        if self.fetch_lag not in (0, 1):
            raise ValueError(f"rollout.fetch_lag is {self.fetch_lag}; choose 0 or 1")
        if self.reuse not in get_args(Reuse):
            raise ValueError(f"rollout.reuse is {self.reuse!r}; choose one of {', '.join(get_args(Reuse))}")
        rows = self.prefill_rows
        if not rows or list(rows) != sorted(set(rows)) or rows[0] < 1:
            raise ValueError(f"rollout.prefill_rows must ascend from at least 1, got {rows}")
        if self.length % self.attention_block:
            raise ValueError(
                f"rollout.attention_block ({self.attention_block}) must divide rollout.length ({self.length})"
            )
        if self.prefill_width > self.length:
            raise ValueError(f"rollout.prefill_width ({self.prefill_width}) exceeds rollout.length ({self.length})")

    def check_shards(self, shards: int) -> None:
        """Refuses slots or parking lines that do not spread evenly over the data shards of the engine's mesh."""
        for name in ("slots", "parking"):
            if getattr(self, name) % shards:
                raise ValueError(
                    f"rollout.{name} ({getattr(self, name)}) must be a multiple of the {shards} data shards of the "
                    "rollout mesh (devices of a process over rollout.tensor)"
                )

    def together(self, shards: int) -> int:
        """Slots whose lines are read at once: a divisor of those of a shard."""
        return math.gcd(self.attention_slots, self.slots // shards)

    def lines(self, shards: int) -> int:
        """Lines of the cache: slots, parking, and one more for each shard, where nobody lives."""
        return self.slots + self.parking + shards

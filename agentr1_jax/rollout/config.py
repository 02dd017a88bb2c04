"""Settings of rollouts: the engine's shapes, the sampling distribution, and the groups of a batch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic.dataclasses import dataclass

from agentr1_jax.validation import STRICT, Count, NonNegative, Positive, Share, Whole

MOST_STOP_SEQUENCES = 4
"""Most stop sequences of a request."""
STOP_WIDTH = 4
"""Most ids of a stop sequence."""


@dataclass(frozen=True, config=STRICT)
class SamplingConfig:
    """Distribution from which a response is sampled.

    Attributes:
      temperature: divides the logits; 0 is greedy.
      top_k: only the k most likely ids are sampled (more where several tie with the last); 0 for all.
      top_p: of these, only the most likely ids up to the one with which their probabilities sum to p; 1 for all.
    """

    temperature: NonNegative = 1.0
    top_k: Whole = 0
    top_p: Share = 1.0


@dataclass(frozen=True, config=STRICT)
class EngineConfig:
    """Shapes and scheduling of an engine; the shapes decide what is compiled.

    Attributes:
      slots: responses that this process decodes together.
      slot_tokens: tokens that a KV slot can hold; at least `budget.context_tokens`.
      decode_chunk: most tokens sampled per slot in one decode call.
      prefill_width: consecutive tokens of a sequence that make one row of a prefill call.
      prefill_rows: buckets of rows per prefill call and data shard, ascending.
      attention_block: positions per attention block; divides `slot_tokens`.
      attention_group: decode slots per attention group, which attends as far as its longest sequence; lowered where it
        does not divide the decode slots of a data shard.
      swap_slots: further KV slots, for sequences that are swapped out while their tool runs; with pages the
        trajectories admitted beyond `slots`, which hold pages alone.
      early_exit_after: a decode call ends early once this many responses of a data shard have ended in it; 0: never.
      fetch_lag: 0: the host fetches a chunk before it dispatches the next one; 1: it dispatches the next one first.
      cache: `slots`: each trajectory has a KV slot of its own; `pages`: they share a pool of pages.
      page_tokens: positions of a page; divides `attention_block`.
      pages: pages of this process, with one of each data shard that holds nothing; None: as much memory as the KV slots
        would take.
      kv_dtype: of cached keys and values: `float8_e4m3fn` is half of bfloat16, rounds them by up to 6 %, and clips them
        at ±448; below 1/64 its steps are of 1/512. None: that in which the policy computes.
      adopt: `drain`: new parameters are adopted once no response is in progress, and the cache is void then;
        `in_flight`: they are adopted between two decode calls, and each trajectory keeps its cache.
      prefix_reuse: cached prefixes that are not computed again: those of `all` KV slots, or, for comparison, those of
        the `own` slot of the sequence or `none`.
      deterministic: wait for all running tools before each cycle, so that device calls depend on seeds alone.
    """

    slots: Count
    slot_tokens: Count
    decode_chunk: Count
    prefill_width: Count
    prefill_rows: tuple[Count, ...]
    attention_block: Count
    attention_group: Count
    swap_slots: Whole = 0
    early_exit_after: Whole = 1
    fetch_lag: Literal[0, 1] = 0
    cache: Literal["slots", "pages"] = "slots"
    page_tokens: Count = 64
    pages: Count | None = None
    kv_dtype: Literal["float8_e4m3fn"] | None = None
    adopt: Literal["drain", "in_flight"] = "drain"
    prefix_reuse: Literal["all", "own", "none"] = "all"
    deterministic: bool = False

    def __post_init__(self) -> None:
        rows = self.prefill_rows
        if not rows or list(rows) != sorted(set(rows)):
            raise ValueError(f"prefill_rows is {rows}; it must be one or more ascending numbers")
        if self.slot_tokens % self.attention_block:
            raise ValueError(f"attention_block ({self.attention_block}) must divide slot_tokens ({self.slot_tokens})")
        if self.prefill_width > self.slot_tokens:
            raise ValueError(f"prefill_width ({self.prefill_width}) exceeds slot_tokens ({self.slot_tokens})")
        if self.cache == "pages" and self.attention_block % self.page_tokens:
            raise ValueError(
                f"page_tokens ({self.page_tokens}) must divide attention_block ({self.attention_block}), which divides "
                f"slot_tokens ({self.slot_tokens})"
            )
        if self.cache == "pages" and self.prefix_reuse != "all":
            raise ValueError(
                f"prefix_reuse={self.prefix_reuse} compares KV slots; set cache=slots, or prefix_reuse=all"
            )

    def check_shards(self, shards: int) -> None:
        """Raise ValueError unless decode and swap slots spread evenly over the data shards of the engine's mesh."""
        for name in ("slots", "swap_slots"):
            if getattr(self, name) % shards:
                raise ValueError(
                    f"rollout.{name} ({getattr(self, name)}) must be a multiple of the {shards} data shards of the "
                    "rollout mesh (devices of a process over rollout.tensor)"
                )
        if self.cache == "pages":
            pages, needed = self.page_count(shards), self.slot_tokens // self.page_tokens + 1
            if pages % shards or pages // shards < needed:
                raise ValueError(
                    f"rollout.pages is {pages}; it must be a multiple of the {shards} data shards of the rollout mesh, "
                    f"and at least {shards * needed}: one trajectory of rollout.slot_tokens ({self.slot_tokens}) takes "
                    f"{needed - 1} pages of rollout.page_tokens ({self.page_tokens}), and one page of a shard is empty"
                )

    def attention_group_size(self, shards: int) -> int:
        """Decode slots per attention group, a divisor of the decode slots of a data shard."""
        return math.gcd(self.attention_group, self.slots // shards)

    def kv_slots(self, shards: int) -> int:
        """Number of KV slots: decode slots, swap slots, and one spare slot for each data shard."""
        return self.slots + self.swap_slots + shards

    def page_count(self, shards: int) -> int:
        """Number of pages, with the one of each data shard that holds nothing."""
        if self.pages is not None:
            return self.pages
        return self.kv_slots(shards) * (self.slot_tokens // self.page_tokens)


@dataclass(frozen=True, config=STRICT)
class RolloutConfig:
    """Groups of a training batch, and where and when they are sampled.

    Attributes:
      groups: task rows per batch, over all processes.
      samples: trajectories per group.
      attempts: attempts at a trajectory that fails by the fault of a tool or environment; the last one stands.
      failures: meaning of such a failure for training: `drop` the trajectory, or let it count as a return of `zero`.
      staleness: batches by which rollouts may run ahead of the learner; 0: each batch is sampled when it is needed.
      dynamic_sampling_groups: most further groups per batch in place of zero-variance groups (DAPO's dynamic sampling).
      tensor: devices that share the heads of a KV slot; the slots are sharded over the other devices of the process.
    """

    groups: Count
    samples: Count
    attempts: Count = 1
    failures: Literal["drop", "zero"] = "drop"
    staleness: Whole = 0
    dynamic_sampling_groups: Whole = 0
    tensor: Count = 1

    def __post_init__(self) -> None:
        if self.dynamic_sampling_groups and self.samples < 2:
            raise ValueError(
                "dynamic_sampling_groups replaces groups whose returns are all equal; with samples=1 all groups are"
            )
        if self.dynamic_sampling_groups and self.staleness:
            raise ValueError(
                f"staleness is {self.staleness} and dynamic_sampling_groups is {self.dynamic_sampling_groups}: the "
                "groups of a batch are settled before those of the batch before are complete; set one of them only"
            )


@dataclass(frozen=True, config=STRICT)
class AttemptLimits:
    """Limits of the runner on one trajectory.

    Attributes:
      attempts: attempts at a trajectory that fails by the fault of the infrastructure; the last one stands.
      seconds: most seconds per attempt, including tools and waiting for a slot; None for no limit.
      failures: `zero` gives a trajectory that failed at last, and has a step, the outcome `failure_as_zero`.
    """

    attempts: Count = 1
    seconds: Positive | None = None
    failures: Literal["drop", "zero"] = "drop"

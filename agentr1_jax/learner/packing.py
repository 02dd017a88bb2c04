"""Packing: trajectories become rows of nodes (tokens to compute) and reads (tokens to train).

    mode steps     | p p p r r |              one segment for each step: its whole prompt, its response
                   | p p p r r o o r r r |
    mode chains    | p p p r r o o r r r |    one segment for each maximal chain: every prompt that extends the
                           ^ ^     ^ ^ ^      chain adds only what is new; every response token is read once
    subtree_end      10 10 10 ...             segment end: token i sees j iff j <= i < subtree_end[j]

Packing looks only at ids, so it holds for any context rule: a prompt that does not extend its trajectory's chain opens
a new one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from agentr1_jax.trajectory import Trajectory

MODES = ("steps", "chains")


@flax.struct.dataclass
class Nodes:
    """Tokens to run through the decoder, each once; written as numpy arrays, seen as JAX arrays by the programs."""

    tokens: Int[Any, "*rows length"]
    position: Int[Any, "*rows length"]
    subtree_end: Int[Any, "*rows length"]


@flax.struct.dataclass
class Reads:
    """Tokens to train, each predicted at the node `src` of its own row. Padding has weight 0 and step -1.

    Attributes:
      src: node whose hidden state predicts the token.
      target: its id.
      step, trajectory, group: index of its unit in this process's packing; -1 for padding.
      is_action: True if the policy sampled it.
      old_logprob: log π_old, the centre of ratio and clip.
      advantage: A_k.
      weight: its share of the policy loss; all weights of a batch sum to 1 (aggregate `fixed` apart).
      old_value, value_target, value_weight: of the critic; None without one.
    """

    src: Int[Any, "*rows reads"]
    target: Int[Any, "*rows reads"]
    step: Int[Any, "*rows reads"]
    trajectory: Int[Any, "*rows reads"]
    group: Int[Any, "*rows reads"]
    is_action: Bool[Any, "*rows reads"]
    old_logprob: Float[Any, "*rows reads"]
    advantage: Float[Any, "*rows reads"]
    weight: Float[Any, "*rows reads"]
    old_value: Float[Any, "*rows reads"] | None = None
    value_target: Float[Any, "*rows reads"] | None = None
    value_weight: Float[Any, "*rows reads"] | None = None


@flax.struct.dataclass
class Batch:
    """What score and update consume: leaves of shape [microbatches, rows, ...]."""

    nodes: Nodes
    reads: Reads


@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of one batch on this process.

    Attributes:
      nodes: [B, L].
      reads: [B, M]; advantages and weights still 0.
      token_read: int [K, 2] (row, column) of each sampled token in (trajectory, step, token) order.
      final_read: int [N, 2] (row, column) of the value read at each trajectory's `final_prompt_ids`; -1 where none.
      tokens_stored: prompt + response tokens of all steps.
      tokens_computed: nodes without padding.
    """

    nodes: Nodes
    reads: Reads
    token_read: Int[np.ndarray, "tokens 2"]
    final_read: Int[np.ndarray, "trajectories 2"]
    tokens_stored: int
    tokens_computed: int

    @property
    def rows(self) -> int:
        """B."""
        return self.nodes.tokens.shape[0]


@dataclasses.dataclass
class _Segment:
    """A sequence of ids in which some tokens are read: (first position, count, step index) for each read span."""

    trajectory: int
    ids: np.ndarray
    spans: list[tuple[int, int, int]]
    final: bool = False

    @property
    def reads(self) -> int:
        return sum(count for _, count, _ in self.spans) + self.final

    def extended_by(self, prompt: np.ndarray) -> bool:
        return len(prompt) >= len(self.ids) and bool(np.array_equal(prompt[: len(self.ids)], self.ids))


def _segments(trajectories: Sequence[Trajectory], mode: str, final_reads: bool) -> list[_Segment]:
    segments = []
    step_index = 0
    for i, trajectory in enumerate(trajectories):
        own: list[_Segment] = []

        def branch(prompt: np.ndarray, i: int = i, own: list[_Segment] = own) -> _Segment:
            """The segment that this prompt extends (the longest), or a new one."""
            open_chains = [s for s in own if not s.final and s.extended_by(prompt)] if mode == "chains" else []
            if not open_chains:
                own.append(_Segment(i, prompt, []))
                return own[-1]
            return max(open_chains, key=lambda s: len(s.ids))

        for step in trajectory.steps:
            segment = branch(step.prompt_ids)
            segment.ids = np.concatenate([step.prompt_ids, step.response_ids])
            segment.spans.append((len(step.prompt_ids), len(step.response_ids), step_index))
            step_index += 1
        if final_reads and trajectory.final_prompt_ids is not None:
            segment = branch(trajectory.final_prompt_ids)
            segment.ids, segment.final = trajectory.final_prompt_ids, True
        segments.extend(own)
    return segments


def _first_fit_decreasing(segments: Sequence[_Segment], row_tokens: int, row_reads: int) -> list[list[_Segment]]:
    rows: list[list[_Segment]] = []
    room_tokens, room_reads = np.zeros(len(segments), np.int64), np.zeros(len(segments), np.int64)
    for segment in sorted(segments, key=lambda s: -len(s.ids)):
        fits = (room_tokens[: len(rows)] >= len(segment.ids)) & (room_reads[: len(rows)] >= segment.reads)
        row = int(np.argmax(fits)) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            room_tokens[row], room_reads[row] = row_tokens, row_reads
        rows[row].append(segment)
        room_tokens[row] -= len(segment.ids)
        room_reads[row] -= segment.reads
    return rows


def pack(
    trajectories: Sequence[Trajectory], *, mode: str, row_tokens: int, row_reads: int, final_reads: bool
) -> Packing:
    """Lays trajectories out in rows of one fixed length.

    Args:
      trajectories: each with at least one step, each step with at least one prompt and one response token.
      mode: one of `MODES`.
      row_tokens: L.
      row_reads: M, most reads of a row.
      final_reads: also read the value at `final_prompt_ids` (needed by a critic).

    Raises:
      ValueError: unknown mode, an empty prompt or response, or a segment that exceeds a row.
    """
    if mode not in MODES:
        raise ValueError(f"unknown packing mode {mode!r}; choose one of {', '.join(MODES)}")
    for t in trajectories:
        _check(t)
    segments = _segments(trajectories, mode, final_reads)
    for s in segments:
        if len(s.ids) > row_tokens or s.reads > row_reads:
            raise ValueError(
                f"trajectory {trajectories[s.trajectory].uid}: {len(s.ids)} tokens with {s.reads} reads do not fit "
                f"a row of {row_tokens} tokens and {row_reads} reads; raise learner.row_tokens or learner.row_reads"
            )
    rows = _first_fit_decreasing(segments, row_tokens, row_reads)
    nodes = _empty_nodes(len(rows), row_tokens)
    reads = _empty_reads(len(rows), row_reads)
    first_token = np.concatenate([[0], np.cumsum([len(s.response_ids) for t in trajectories for s in t.steps])]).astype(
        np.int64
    )
    token_read = np.full((first_token[-1], 2), -1, np.int64)
    final_read = np.full((len(trajectories), 2), -1, np.int64)
    logprobs = [s.logprobs for t in trajectories for s in t.steps]
    for row, content in enumerate(rows):
        at, column = 0, 0
        for segment in content:
            n = len(segment.ids)
            nodes.tokens[row, at : at + n] = segment.ids
            nodes.position[row, at : at + n] = np.arange(n)
            nodes.subtree_end[row, at : at + n] = at + n
            unit = (segment.trajectory, trajectories[segment.trajectory].group)
            for start, count, step in segment.spans:
                cells = (row, slice(column, column + count))
                reads.src[cells] = np.arange(at + start - 1, at + start - 1 + count)
                reads.target[cells] = segment.ids[start : start + count]
                reads.step[cells], reads.trajectory[cells], reads.group[cells] = step, *unit
                reads.is_action[cells] = True
                reads.old_logprob[cells] = logprobs[step]
                span = slice(first_token[step], first_token[step + 1])
                token_read[span, 0], token_read[span, 1] = row, np.arange(column, column + count)
                column += count
            if segment.final:
                reads.src[row, column] = at + n - 1
                final_read[segment.trajectory] = row, column
                column += 1
            at += n
    return Packing(
        nodes=nodes,
        reads=reads,
        token_read=token_read,
        final_read=final_read,
        tokens_stored=sum(len(s.prompt_ids) + len(s.response_ids) for t in trajectories for s in t.steps),
        tokens_computed=sum(len(s.ids) for s in segments),
    )


def _check(t: Trajectory) -> None:
    """A read needs a token before it, and a log-prob of its own; raises ValueError where they lack."""
    if not t.steps or not all(len(s.prompt_ids) and len(s.response_ids) for s in t.steps):
        raise ValueError(f"trajectory {t.uid} has no step, or a step without prompt or response tokens; drop it first")
    for number, s in enumerate(t.steps):
        if len(s.logprobs) != len(s.response_ids):
            raise ValueError(
                f"trajectory {t.uid}: step {number} has {len(s.logprobs)} log-probs for {len(s.response_ids)} response "
                "tokens; record one for each"
            )
    if t.final_prompt_ids is not None and not len(t.final_prompt_ids):
        raise ValueError(f"trajectory {t.uid}: final_prompt_ids is empty; give the next prompt, or None")


def _empty_nodes(rows: int, length: int) -> Nodes:
    # A padding node sees itself alone, so that its softmax is defined.
    alone = np.broadcast_to(np.arange(1, length + 1, dtype=np.int32), (rows, length)).copy()
    return Nodes(
        tokens=np.zeros((rows, length), np.int32),
        position=np.zeros((rows, length), np.int32),
        subtree_end=alone,
    )


def _empty_reads(rows: int, reads: int) -> Reads:
    def full(value: float, dtype: type) -> np.ndarray:
        return np.full((rows, reads), value, dtype)

    return Reads(
        src=full(0, np.int32),
        target=full(0, np.int32),
        step=full(-1, np.int32),
        trajectory=full(-1, np.int32),
        group=full(-1, np.int32),
        is_action=full(False, bool),
        old_logprob=full(0, np.float32),
        advantage=full(0, np.float32),
        weight=full(0, np.float32),
    )


def batch_shapes(*, microbatches: int, rows: int, row_tokens: int, row_reads: int, critic: bool) -> Batch:
    """The shape structs of a batch, as `to_microbatches` makes it; with the critic's reads or without."""
    reads = _empty_reads(1, row_reads)
    if critic:
        reads = dataclasses.replace(reads, old_value=reads.weight, value_target=reads.weight, value_weight=reads.weight)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((microbatches, rows, *x.shape[1:]), x.dtype),
        Batch(_empty_nodes(1, row_tokens), reads),
    )


def to_microbatches(nodes: Nodes, reads: Reads, *, microbatches: int, rows: int) -> Batch:
    """Pads B rows with rows of zero weight to [microbatches, rows, ...].

    Raises:
      ValueError: B exceeds microbatches · rows.
    """
    have, capacity = nodes.tokens.shape[0], microbatches * rows
    if have > capacity:
        raise ValueError(
            f"{have} rows exceed the {microbatches} microbatches of {rows} rows of this run; "
            "an agent of its own that branches more than its context rule says needs a larger capacity"
        )
    empty = Batch(
        _empty_nodes(capacity - have, nodes.tokens.shape[1]), _empty_reads(capacity - have, reads.src.shape[1])
    )
    if reads.old_value is not None:
        zeros = np.zeros_like(empty.reads.weight)
        reads_ = dataclasses.replace(empty.reads, old_value=zeros, value_target=zeros, value_weight=zeros)
        empty = dataclasses.replace(empty, reads=reads_)
    return jax.tree.map(
        lambda x, pad: np.concatenate([x, pad]).reshape(microbatches, rows, *x.shape[1:]), Batch(nodes, reads), empty
    )

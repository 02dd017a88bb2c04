"""Packing: trajectories become rows of nodes (tokens to compute) and reads (tokens to train).

    mode steps     | p p p r r |              one segment for each step: its whole prompt, its response
                   | p p p r r o o r r r |
    mode chains    | p p p r r o o r r r |    one segment for each maximal chain: every prompt that extends the
                           ^ ^     ^ ^ ^      chain adds only what is new; every response token is read once, with
                                              reads=all also every observation token (o)
    mode tree      | p p p r r o o r r r  r r r o r r |    prefixes shared by several trajectories are laid out once;
                                         (of p p p)        two samples of one prompt

    subtree_end    token i sees j iff j <= i < subtree_end[j]; in a segment all nodes have the segment's end

`padded` is `steps` with a row for each step, as published systems lay them out. Packing looks only at ids, so it holds
for any context rule. What does not fit a row is cut between sequences, and the prefix that the next piece needs is
repeated there, without reads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from agentr1_jax.learner.batch import Nodes, Reads, empty_nodes, empty_reads
from agentr1_jax.learner.forest import Sequences, observation_reads, ragged_arange, sequences, shared_prefixes
from agentr1_jax.trajectory import Trajectory

MODES = ("padded", "steps", "chains", "tree")
READS = ("sampled", "all")

WORTH_SHARING = 1 / 32
"""A prefix that is a smaller share of a chain does not tie it to others: first-fit gains more by its freedom."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of one batch on this process.

    Attributes:
      nodes: [B, L].
      reads: [B, M]; advantages and weights still 0, and so `old_logprob` of what was not sampled.
      token_read: int [K, 2] (row, column) of each token that is read, in (trajectory, step, token) order: the sampled
        ones of a step, with reads `all` its observation tokens before them.
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

    @property
    def sharing(self) -> float:
        """Tokens stored for each token computed."""
        return self.tokens_stored / max(self.tokens_computed, 1)

    @property
    def fill(self) -> float:
        """Share of the rows that is not padding."""
        return self.tokens_computed / max(self.nodes.tokens.size, 1)


def pack(
    trajectories: Sequence[Trajectory],
    *,
    mode: str,
    row_tokens: int,
    row_reads: int,
    final_reads: bool,
    reads: str = "sampled",
) -> Packing:
    """Lays trajectories out in rows of one fixed length.

    Args:
      trajectories: each with at least one step, each step with at least one prompt and one response token.
      mode: one of `MODES`.
      row_tokens: L.
      row_reads: M, most reads of a row.
      final_reads: also read the value at `final_prompt_ids` (needed by a critic).
      reads: one of `READS`: the `sampled` tokens, or `all`, so that an ablation may train observation tokens too (see
        `observation_tokens`). These have `is_action` False, and the unit of the step whose prompt brought them.

    Raises:
      ValueError: unknown mode or reads, an empty prompt or response, or a step that exceeds a row (see `misfit`).
    """
    if mode not in MODES:
        raise ValueError(f"unknown packing mode {mode!r}; choose one of {', '.join(MODES)}")
    if reads not in READS:
        raise ValueError(f"unknown reads {reads!r}; choose one of {', '.join(READS)}")
    for t in trajectories:
        fault = misfit(t, row_tokens=row_tokens, row_reads=row_reads, final_reads=final_reads, reads=reads)
        if fault:
            raise ValueError(f"trajectory {t.uid}: {fault}")
    s = sequences(trajectories, final_prompts=final_reads, reads=reads)
    order, shared = shared_prefixes(s, mode)
    s = s[order]
    count = s.reads + (s.step < 0)
    piece = _pieces(s.length, shared, count, row_tokens, row_reads, together=mode == "tree")
    shared = np.where(np.diff(piece, prepend=-1) > 0, 0, shared)
    own = s.length - shared
    tokens_of, reads_of = (np.bincount(piece, weights=x).astype(np.int64) for x in (own, count))
    row_of_piece = np.arange(len(tokens_of))
    if mode != "padded":
        row_of_piece = _first_fit_decreasing(tokens_of, reads_of, row_tokens, row_reads)
    by_row = np.argsort(row_of_piece[piece], kind="stable")
    groups = np.array([t.group for t in trajectories], np.int64)
    nodes, filled, token_read, final_read = _lay_out(
        s[by_row], shared[by_row], row_of_piece[piece][by_row], groups, row_tokens, row_reads
    )
    if len(token_read):
        logprobs = np.concatenate([step.logprobs for t in trajectories for step in t.steps])
        row, column = token_read[filled.is_action[token_read[:, 0], token_read[:, 1]]].T
        filled.old_logprob[row, column] = logprobs
    return Packing(
        nodes=nodes,
        reads=filled,
        token_read=token_read,
        final_read=final_read,
        tokens_stored=int(s.length[s.step >= 0].sum()),
        tokens_computed=int(own.sum()),
    )


def misfit(t: Trajectory, *, row_tokens: int, row_reads: int, final_reads: bool, reads: str = "sampled") -> str | None:
    """Why a trajectory cannot be packed, or None: a read needs a token before it and a log-prob of its own, and a step
    is never split over rows."""
    if not t.steps or not all(len(s.prompt_ids) and len(s.response_ids) for s in t.steps):
        return "it has no step, or a step without prompt or response tokens; drop it first"
    for number, (s, observed) in enumerate(zip(t.steps, observation_reads(t, reads), strict=True)):
        tokens, count = len(s.prompt_ids) + len(s.response_ids), observed + len(s.response_ids)
        if not np.isfinite(s.logprobs).all():
            return f"step {number} has a log-prob that is not finite; no such token can have been sampled"
        if tokens > row_tokens or count > row_reads:
            return (
                f"step {number} has {tokens} tokens with {count} reads, which do not fit a row of {row_tokens} tokens "
                f"and {row_reads} reads; raise learner.row_tokens or learner.row_reads"
            )
    if final_reads and t.final_prompt_ids is not None and not 0 < len(t.final_prompt_ids) <= row_tokens:
        return (
            f"final_prompt_ids has {len(t.final_prompt_ids)} tokens; give the next prompt, of at most "
            f"learner.row_tokens ({row_tokens}) tokens, or None"
        )
    return None


def _pieces(
    length: np.ndarray, shared: np.ndarray, reads: np.ndarray, row_tokens: int, row_reads: int, *, together: bool
) -> np.ndarray:
    """Piece of each sequence: runs that lie in one row. A chain is cut only where its reads exceed a row; with
    `together`, chains that share a prefix are one piece as far as a row goes."""
    piece = np.zeros(len(length), np.int64)
    # A chain is as long as its last sequence; it begins wherever a sequence does not extend the one before.
    begins = [i for i in range(len(length)) if not i or not shared[i] or shared[i] < length[i - 1]]
    number, tokens_used, reads_used = -1, 0, 0
    for a, b in itertools.pairwise([*begins, len(length)]):
        chain_reads = int(reads[a:b].sum())
        worth = together and a and shared[a] >= WORTH_SHARING * length[b - 1]
        fits = tokens_used + length[b - 1] - shared[a] <= row_tokens and reads_used + chain_reads <= row_reads
        if worth and fits:
            piece[a:b] = number
            tokens_used, reads_used = tokens_used + int(length[b - 1] - shared[a]), reads_used + chain_reads
            continue
        number, reads_used = number + 1, 0
        for i in range(a, b):
            if reads_used + reads[i] > row_reads:
                number, reads_used = number + 1, 0
            piece[i] = number
            reads_used += int(reads[i])
        tokens_used = int(length[b - 1])
    return piece


def _first_fit_decreasing(
    tokens: np.ndarray, reads: np.ndarray, row_tokens: int, row_reads: int
) -> Int[np.ndarray, "pieces"]:
    """Row of each piece: the longest first, each into the first row with room for it."""
    row_of, rows = np.zeros(len(tokens), np.int64), 0
    token_room, read_room = np.full(len(tokens), row_tokens), np.full(len(tokens), row_reads)
    for i in np.argsort(-tokens, kind="stable"):
        fits = (token_room[:rows] >= tokens[i]) & (read_room[:rows] >= reads[i])
        row = int(np.argmax(fits)) if fits.any() else rows
        rows = max(rows, row + 1)
        row_of[i] = row
        token_room[row] -= tokens[i]
        read_room[row] -= reads[i]
    return row_of


def _lay_out(
    s: Sequences, shared: np.ndarray, row: np.ndarray, groups: np.ndarray, row_tokens: int, row_reads: int
) -> tuple[Nodes, Reads, np.ndarray, np.ndarray]:
    """Writes sequences, ordered by row, into nodes and reads; says where each token read and final prompt went."""
    rows = int(row[-1]) + 1 if len(row) else 0
    own, count = s.length - shared, s.reads + (s.step < 0)
    start = row * row_tokens + _within_row(own, row)
    src, end = _paths(s, shared, start)
    nodes, reads = empty_nodes(rows, row_tokens), empty_reads(rows, row_reads)
    node = ragged_arange(start, own)
    nodes.tokens.flat[node] = s.ids[ragged_arange(s.start + shared, own)]
    nodes.position.flat[node] = ragged_arange(shared, own)
    nodes.subtree_end.flat[node] = end - np.repeat(row * row_tokens, own)

    read = ragged_arange(row * row_reads + _within_row(count, row), count)
    reads.src.flat[read] = src - np.repeat(row * row_tokens, count)
    token = np.repeat(s.step >= 0, count)
    cell, of = read[token], np.repeat(np.arange(len(own)), s.reads)
    reads.target.flat[cell] = s.ids[ragged_arange(s.start + s.first_read, s.reads)]
    reads.step.flat[cell], reads.trajectory.flat[cell] = s.step[of], s.trajectory[of]
    reads.group.flat[cell] = groups[s.trajectory[of]]
    reads.is_action.flat[cell] = ragged_arange(-s.observed, s.reads) >= 0

    of_step = np.zeros(int((s.step >= 0).sum()), np.int64)
    of_step[s.step[s.step >= 0]] = s.reads[s.step >= 0]
    first_token = np.cumsum(of_step) - of_step
    token_read, final_read = np.zeros((len(cell), 2), np.int64), np.full((len(groups), 2), -1, np.int64)
    token_read[ragged_arange(first_token[s.step], s.reads)] = np.stack(np.divmod(cell, row_reads), axis=1)
    final_read[s.trajectory[s.step < 0]] = np.stack(np.divmod(read[~token], row_reads), axis=1)
    return nodes, reads, token_read, final_read


def _within_row(count: np.ndarray, row: np.ndarray) -> np.ndarray:
    """How much of its row lies before each sequence."""
    before = np.cumsum(count) - count
    first = np.searchsorted(row, row)
    return before - before[first] if len(row) else before


def _paths(s: Sequences, shared: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each read the node that predicts it, and for each own node the end of its subtree; both in the whole batch.

    Two walks over the sequences, forth and back; what a sequence shares is what the array still holds at that depth.
    """
    longest = int(s.length.max()) if len(s.length) else 0
    at_depth = np.zeros(longest, np.int64)
    src, ends = [], []
    cells = list(zip(*(x.tolist() for x in (s.length, shared, start, s.first_read, s.step)), strict=True))
    for length, known, first, first_read, step in cells:
        at_depth[known:length] = np.arange(first, first + length - known)
        src.append(at_depth[first_read - 1 : length - (step >= 0)].copy())
    known_after = 0
    for length, known, first, _, _ in reversed(cells):
        at_depth[known_after:length] = first + length - known
        ends.append(at_depth[known:length].copy())
        known_after = known
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *src]), np.concatenate([none, *ends[::-1]])

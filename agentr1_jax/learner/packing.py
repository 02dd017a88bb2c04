"""Packing: trajectories become rows of packed tokens (to compute) and loss tokens (to train).

    mode per_step     | p p p r r |              one segment for each step: its whole prompt, its response
                      | p p p r r o o r r r |
    mode trajectory   | p p p r r o o r r r |    one segment for each maximal chain of steps: a prompt that extends the
                              ^ ^     ^ ^ ^      chain adds only its new tokens; every response token is one loss
                                                 token (with `observations` every observation token o, too)
    mode prefix_tree  | p p p r r o o r r r  r r r o r r |    prefixes shared by several trajectories are laid out
                                            (of p p p)        once; two samples of one prompt

    subtree_end       token i sees j iff j <= i < subtree_end[j]; all tokens of a segment have the segment's end

`per_step_padded` is `per_step` with one row for each step, as published systems lay steps out. Packing compares ids
only, so it works with any context rule. What exceeds a row is cut between sequences, and the prefix that the next
piece needs is repeated there, without loss tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from agentr1_jax.learner.batch import LossTokens, PackedTokens, empty_loss_tokens, empty_packed_tokens
from agentr1_jax.learner.config import PackingConfig
from agentr1_jax.learner.prefix_tree import Sequences, observation_counts, ragged_arange, sequences, shared_prefixes
from agentr1_jax.trajectory import Trajectory

WORTH_SHARING = 1 / 32
"""A prefix that is a smaller share of a chain does not tie it to others: first-fit gains more by its freedom."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Layout of one batch on this process.

    Attributes:
      packed_tokens: [B, L].
      loss_tokens: [B, M]; advantage and weight still 0, and so is `old_logprob` of observation tokens.
      token_index: int [K, 2] (row, column) of each loss token, in (trajectory, step, token) order: the response tokens
        of a step, with `observations` after its observation tokens.
      final_index: int [N, 2] (row, column) of the value at each trajectory's `final_prompt_ids`; -1 where none.
      tokens_stored: prompt + response tokens of all steps.
      tokens_computed: packed tokens without padding.
    """

    packed_tokens: PackedTokens
    loss_tokens: LossTokens
    token_index: Int[np.ndarray, "tokens 2"]
    final_index: Int[np.ndarray, "trajectories 2"]
    tokens_stored: int
    tokens_computed: int

    @property
    def rows(self) -> int:
        """B."""
        return self.packed_tokens.tokens.shape[0]

    @property
    def sharing(self) -> float:
        """Tokens stored per token computed."""
        return self.tokens_stored / max(self.tokens_computed, 1)

    @property
    def occupancy(self) -> float:
        """Share of the rows that is not padding."""
        return self.tokens_computed / max(self.packed_tokens.tokens.size, 1)


def pack(
    trajectories: Sequence[Trajectory], config: PackingConfig, *, final_values: bool, observations: bool = False
) -> Packing:
    """Lay trajectories out in rows of one fixed length.

    Args:
      trajectories: each with at least one step, each step with at least one prompt and one response token.
      config: mode and size of the rows.
      final_values: also make a (never trained) loss token at each `final_prompt_ids`, whose value a critic bootstraps.
      observations: observation tokens are loss tokens too, so that an ablation may train them (see
        `observation_tokens`). Their `is_action` is False, and their unit is the step whose prompt brought them.

    Raises:
      ValueError: a trajectory cannot be packed; see `packing_fault`.
    """
    for t in trajectories:
        fault = packing_fault(t, config, final_values=final_values, observations=observations)
        if fault:
            raise ValueError(f"trajectory {t.uid}: {fault}")
    s = sequences(trajectories, final_prompts=final_values, observations=observations)
    order, shared = shared_prefixes(s, config.mode)
    s = s[order]
    count = s.loss_tokens + (s.step < 0)
    piece = _pieces(s.length, shared, count, config)
    shared = np.where(np.diff(piece, prepend=-1) > 0, 0, shared)
    own = s.length - shared
    piece_tokens, piece_loss_tokens = (np.bincount(piece, weights=x).astype(np.int64) for x in (own, count))
    row_of_piece = np.arange(len(piece_tokens))
    if config.mode != "per_step_padded":
        row_of_piece = _first_fit_decreasing(piece_tokens, piece_loss_tokens, config)
    by_row = np.argsort(row_of_piece[piece], kind="stable")
    groups = np.array([t.group for t in trajectories], np.int64)
    packed_tokens, loss_tokens, token_index, final_index = _lay_out(
        s[by_row], shared[by_row], row_of_piece[piece][by_row], groups, config
    )
    if len(token_index):
        logprobs = np.concatenate([step.logprobs for t in trajectories for step in t.steps])
        row, column = token_index[loss_tokens.is_action[token_index[:, 0], token_index[:, 1]]].T
        loss_tokens.old_logprob[row, column] = logprobs
    return Packing(
        packed_tokens=packed_tokens,
        loss_tokens=loss_tokens,
        token_index=token_index,
        final_index=final_index,
        tokens_stored=int(s.length[s.step >= 0].sum()),
        tokens_computed=int(own.sum()),
    )


def packing_fault(
    t: Trajectory, config: PackingConfig, *, final_values: bool, observations: bool = False
) -> str | None:
    """Return why a trajectory cannot be packed, or None.

    A loss token needs a token before it and a behaviour log-prob, and a step is never split over rows.
    """
    if not t.steps or not all(len(s.prompt_ids) and len(s.response_ids) for s in t.steps):
        return "it has no step, or a step without prompt or response tokens; drop it first"
    for number, (s, observed) in enumerate(zip(t.steps, observation_counts(t, observations=observations), strict=True)):
        tokens, count = len(s.prompt_ids) + len(s.response_ids), observed + len(s.response_ids)
        if not np.isfinite(s.logprobs).all():
            return f"step {number} has a log-prob that is not finite; no such token can have been sampled"
        if tokens > config.row_tokens or count > config.row_loss_tokens:
            return (
                f"step {number} has {tokens} tokens with {count} loss tokens, which do not fit a row of "
                f"{config.row_tokens} tokens and {config.row_loss_tokens} loss tokens; raise learner.row_tokens or "
                "learner.row_loss_tokens"
            )
    if final_values and t.final_prompt_ids is not None and not 0 < len(t.final_prompt_ids) <= config.row_tokens:
        return (
            f"final_prompt_ids has {len(t.final_prompt_ids)} tokens; give the next prompt, of at most "
            f"learner.row_tokens ({config.row_tokens}) tokens, or None"
        )
    return None


def scatter(packing: Packing, per_token: np.ndarray) -> np.ndarray:
    """Move values of loss tokens from (trajectory, step, token) order to their cells: [K] -> [B, M]; 0 elsewhere."""
    out = np.zeros(packing.loss_tokens.target.shape, per_token.dtype)
    out[packing.token_index[:, 0], packing.token_index[:, 1]] = per_token
    return out


def scatter_fields(packing: Packing, per_token: Mapping[str, np.ndarray]) -> LossTokens:
    """Return the loss tokens with further fields.

    Args:
      packing: the layout.
      per_token: name of a field of `LossTokens` -> values [K] in (trajectory, step, token) order. `advantage` and
        `weight`; with a critic `CRITIC_FIELDS`; where a run needs them `old_logprob`, `ref_logprob`,
        `correction_weight`. Where observation tokens are trained, `old_logprob` must be among them.
    """
    return dataclasses.replace(packing.loss_tokens, **{name: scatter(packing, x) for name, x in per_token.items()})


def gather(packing: Packing, per_cell: np.ndarray) -> np.ndarray:
    """Inverse of `scatter`: [B, M] -> [K]."""
    return per_cell[packing.token_index[:, 0], packing.token_index[:, 1]]


def gather_final(packing: Packing, per_cell: np.ndarray) -> Float[np.ndarray, "trajectories"]:
    """Values at `final_prompt_ids`: [B, M] -> [N], 0 where a trajectory has none."""
    row, column = packing.final_index[:, 0], packing.final_index[:, 1]
    return np.where(row >= 0, per_cell[row, column], 0).astype(np.float32)


def _pieces(length: np.ndarray, shared: np.ndarray, loss_tokens: np.ndarray, config: PackingConfig) -> np.ndarray:
    """Piece of each sequence: runs of sequences that lie in one row.

    A chain is cut only where its loss tokens exceed a row; in mode `prefix_tree`, chains that share a prefix are one
    piece as long as they fit a row.
    """
    piece = np.zeros(len(length), np.int64)
    # A chain is as long as its last sequence; it begins wherever a sequence does not extend the one before.
    begins = [i for i in range(len(length)) if not i or not shared[i] or shared[i] < length[i - 1]]
    number, tokens_used, loss_tokens_used = -1, 0, 0
    for a, b in itertools.pairwise([*begins, len(length)]):
        new_tokens, new_loss_tokens = int(length[b - 1] - shared[a]), int(loss_tokens[a:b].sum())
        worth = config.mode == "prefix_tree" and a and shared[a] >= WORTH_SHARING * length[b - 1]
        fits = (
            tokens_used + new_tokens <= config.row_tokens
            and loss_tokens_used + new_loss_tokens <= config.row_loss_tokens
        )
        if worth and fits:
            piece[a:b] = number
            tokens_used, loss_tokens_used = tokens_used + new_tokens, loss_tokens_used + new_loss_tokens
            continue
        number, loss_tokens_used = number + 1, 0
        for i in range(a, b):
            if loss_tokens_used + loss_tokens[i] > config.row_loss_tokens:
                number, loss_tokens_used = number + 1, 0
            piece[i] = number
            loss_tokens_used += int(loss_tokens[i])
        tokens_used = int(length[b - 1])
    return piece


def _first_fit_decreasing(
    tokens: np.ndarray, loss_tokens: np.ndarray, config: PackingConfig
) -> Int[np.ndarray, "pieces"]:
    """Row of each piece: the longest first, each into the first row with room for it."""
    row_of, rows = np.zeros(len(tokens), np.int64), 0
    token_room = np.full(len(tokens), config.row_tokens)
    loss_token_room = np.full(len(tokens), config.row_loss_tokens)
    for i in np.argsort(-tokens, kind="stable"):
        fits = (token_room[:rows] >= tokens[i]) & (loss_token_room[:rows] >= loss_tokens[i])
        row = int(np.argmax(fits)) if fits.any() else rows
        rows = max(rows, row + 1)
        row_of[i] = row
        token_room[row] -= tokens[i]
        loss_token_room[row] -= loss_tokens[i]
    return row_of


def _lay_out(
    s: Sequences, shared: np.ndarray, row: np.ndarray, groups: np.ndarray, config: PackingConfig
) -> tuple[PackedTokens, LossTokens, np.ndarray, np.ndarray]:
    """Write sequences, ordered by row, into rows; also return the cells of all loss tokens and final prompts."""
    rows, row_tokens, row_loss_tokens = int(row[-1]) + 1 if len(row) else 0, config.row_tokens, config.row_loss_tokens
    own, count = s.length - shared, s.loss_tokens + (s.step < 0)
    start = row * row_tokens + _offsets(own, row)
    logit_index, end = _paths(s, shared, start)
    packed_tokens, loss_tokens = empty_packed_tokens(rows, row_tokens), empty_loss_tokens(rows, row_loss_tokens)
    cell = ragged_arange(start, own)
    packed_tokens.tokens.flat[cell] = s.ids[ragged_arange(s.start + shared, own)]
    packed_tokens.position.flat[cell] = ragged_arange(shared, own)
    packed_tokens.subtree_end.flat[cell] = end - np.repeat(row * row_tokens, own)

    all_cells = ragged_arange(row * row_loss_tokens + _offsets(count, row), count)
    loss_tokens.logit_index.flat[all_cells] = logit_index - np.repeat(row * row_tokens, count)
    is_token = np.repeat(s.step >= 0, count)
    cell, of = all_cells[is_token], np.repeat(np.arange(len(own)), s.loss_tokens)
    loss_tokens.target.flat[cell] = s.ids[ragged_arange(s.start + s.first_loss_token, s.loss_tokens)]
    loss_tokens.step.flat[cell], loss_tokens.trajectory.flat[cell] = s.step[of], s.trajectory[of]
    loss_tokens.group.flat[cell] = groups[s.trajectory[of]]
    loss_tokens.is_action.flat[cell] = ragged_arange(-s.observed, s.loss_tokens) >= 0

    step_loss_tokens = np.zeros(int((s.step >= 0).sum()), np.int64)
    step_loss_tokens[s.step[s.step >= 0]] = s.loss_tokens[s.step >= 0]
    first_token = np.cumsum(step_loss_tokens) - step_loss_tokens
    token_index, final_index = np.zeros((len(cell), 2), np.int64), np.full((len(groups), 2), -1, np.int64)
    token_index[ragged_arange(first_token[s.step], s.loss_tokens)] = np.stack(np.divmod(cell, row_loss_tokens), axis=1)
    final_index[s.trajectory[s.step < 0]] = np.stack(np.divmod(all_cells[~is_token], row_loss_tokens), axis=1)
    return packed_tokens, loss_tokens, token_index, final_index


def _offsets(count: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Sum of the counts before each sequence in its row."""
    before = np.cumsum(count) - count
    first = np.searchsorted(row, row)
    return before - before[first] if len(row) else before


def _paths(s: Sequences, shared: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Position that predicts each loss token, and end of the subtree of each own token; both in the whole batch.

    Two walks over the sequences, forth and back; what a sequence shares is what the array still holds at that depth.
    """
    longest = int(s.length.max()) if len(s.length) else 0
    at_depth = np.zeros(longest, np.int64)
    logit_index, ends = [], []
    cells = list(zip(*(x.tolist() for x in (s.length, shared, start, s.first_loss_token, s.step)), strict=True))
    for length, known, first, first_loss_token, step in cells:
        at_depth[known:length] = np.arange(first, first + length - known)
        logit_index.append(at_depth[first_loss_token - 1 : length - (step >= 0)].copy())
    known_after = 0
    for length, known, first, _, _ in reversed(cells):
        at_depth[known_after:length] = first + length - known
        ends.append(at_depth[known:length].copy())
        known_after = known
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *logit_index]), np.concatenate([none, *ends[::-1]])

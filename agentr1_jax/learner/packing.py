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

Every step is a sequence of ids, its prompt and its response. Sorted by their ids, sequences that begin alike stand
together, and the length of the prefix that each shares with the one before it describes the whole tree: the tokens
behind that prefix, one sequence after the other, are its tokens in depth-first order.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from agentr1_jax.learner.batch import LossTokens, PackedTokens, empty_loss_tokens, empty_packed_tokens
from agentr1_jax.learner.config import PackingConfig, PackingMode
from agentr1_jax.trajectory import Trajectory, observation_tokens

WORTH_SHARING = 1 / 32
"""A prefix that is a smaller share of a chain does not tie it to others: first-fit gains more by its freedom."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Layout of one batch on this process.

    Attributes:
      packed_tokens: [B, L].
      loss_tokens: [B, M]; advantage and weight still 0, and so is `old_logprob` of observation tokens.
      token_index: (row, column) of each loss token, in (trajectory, step, token) order: the response tokens of a step,
        with `observations` after its observation tokens.
      final_index: (row, column) of the value at each trajectory's `final_prompt_ids`; -1 where none.
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

    def rows_between(self, start: int, end: int) -> Packing:
        """Return some of the rows; the indices are still those of all rows."""
        packed_tokens, loss_tokens = jax.tree.map(lambda x: x[start:end], (self.packed_tokens, self.loss_tokens))
        return dataclasses.replace(self, packed_tokens=packed_tokens, loss_tokens=loss_tokens)


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
    sequences, shared = _order(
        list(_sequences(trajectories, final_prompts=final_values, observations=observations)), config.mode
    )
    piece = _pieces(sequences, shared, config)
    shared = [0 if new else known for new, known in zip(np.diff(piece, prepend=-1) > 0, shared, strict=True)]
    if config.mode == "per_step_padded":
        row = piece
    else:
        tokens = np.bincount(piece, [len(s.ids) - known for s, known in zip(sequences, shared, strict=True)])
        loss_tokens = np.bincount(piece, [s.loss_tokens for s in sequences])
        row = _first_fit_decreasing(tokens, loss_tokens, config)[piece]
    return _lay_out(sequences, shared, row.tolist(), trajectories, config)


def packing_fault(
    t: Trajectory, config: PackingConfig, *, final_values: bool, observations: bool = False
) -> str | None:
    """Return why a trajectory cannot be packed, or None.

    A loss token needs a token before it and a behaviour log-prob, and a step is never split over rows.
    """
    if not t.steps or not all(len(s.prompt_ids) and len(s.response_ids) for s in t.steps):
        return "it has no step, or a step without prompt or response tokens; drop it first"
    for number, (s, observed) in enumerate(zip(t.steps, _observation_counts(t, observations), strict=True)):
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


class _Sequence(NamedTuple):
    """Ids of a step, its prompt and its response; or those of a final prompt.

    Attributes:
      ids: of prompt and response.
      loss_tokens: loss tokens of the step, which end it: its response, after the observation before it where
        observation tokens are loss tokens too. 1 for a final prompt: that of its value, which predicts no id.
      logprobs: behaviour log-probs of the response.
      trajectory: index of its trajectory.
      step: index of its step in the batch; -1 for a final prompt.
    """

    ids: Int[np.ndarray, "ids"]
    loss_tokens: int
    logprobs: Float[np.ndarray, "response"]
    trajectory: int
    step: int

    @property
    def first_loss_token(self) -> int:
        """Position of the first loss token in the sequence."""
        return len(self.ids) if self.step < 0 else len(self.ids) - self.loss_tokens


def _observation_counts(trajectory: Trajectory, observations: bool) -> list[int]:
    """Number of observation tokens of each step that are loss tokens: all of them, or none."""
    return observation_tokens(trajectory) if observations else [0] * len(trajectory.steps)


def _sequences(trajectories: Sequence[Trajectory], *, final_prompts: bool, observations: bool) -> Iterator[_Sequence]:
    """Yield the sequences of all steps in (trajectory, step) order, then those of the final prompts."""
    number = itertools.count()
    for i, t in enumerate(trajectories):
        for s, observed in zip(t.steps, _observation_counts(t, observations), strict=True):
            ids = np.concatenate([s.prompt_ids, s.response_ids])
            yield _Sequence(ids, observed + len(s.response_ids), s.logprobs, i, next(number))
    for i, t in enumerate(trajectories):
        if final_prompts and t.final_prompt_ids is not None:
            yield _Sequence(t.final_prompt_ids, 1, np.zeros(0, np.float32), i, -1)


def _order(sequences: list[_Sequence], mode: PackingMode) -> tuple[list[_Sequence], list[int]]:
    """Order the sequences, and count the ids that each shares with the one before it.

    `prefix_tree` shares whatever is equal; `trajectory` only what extends the whole sequence before it, of the same
    trajectory (its chains are as few as the leaves of the trajectory's tree); other modes share nothing.
    """
    if mode not in ("trajectory", "prefix_tree"):
        return sequences, [0] * len(sequences)
    chains = mode == "trajectory"
    # Equal-sized big-endian words: bytes compare as the ids do, and a prefix comes before what it begins.
    ordered = sorted(sequences, key=lambda s: (s.trajectory if chains else 0, s.ids.astype(">u4").tobytes()))
    shared = [0] * len(ordered)
    for i, (before, s) in enumerate(itertools.pairwise(ordered), start=1):
        common = _common_prefix(before.ids, s.ids)
        if not chains or (common == len(before.ids) and before.trajectory == s.trajectory):
            shared[i] = common
    return ordered, shared


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _pieces(sequences: list[_Sequence], shared: list[int], config: PackingConfig) -> Int[np.ndarray, "sequences"]:
    """Piece of each sequence: runs of sequences that lie in one row.

    A chain is cut only where its loss tokens exceed a row; in mode `prefix_tree`, chains that share a prefix are one
    piece as long as they fit a row.
    """
    piece = np.zeros(len(sequences), np.int64)
    length, loss_tokens = [len(s.ids) for s in sequences], [s.loss_tokens for s in sequences]
    # A chain is as long as its last sequence; it begins wherever a sequence does not extend the one before.
    begins = [i for i in range(len(length)) if not i or not shared[i] or shared[i] < length[i - 1]]
    number, tokens_used, loss_tokens_used = -1, 0, 0
    for a, b in itertools.pairwise([*begins, len(length)]):
        new_tokens, new_loss_tokens = length[b - 1] - shared[a], sum(loss_tokens[a:b])
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
            loss_tokens_used += loss_tokens[i]
        tokens_used = length[b - 1]
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
    sequences: list[_Sequence],
    shared: list[int],
    row: list[int],
    trajectories: Sequence[Trajectory],
    config: PackingConfig,
) -> Packing:
    """Write the sequences into their rows, each behind those of its row before it.

    Two walks, forth and back; what a sequence shares is what `at_depth` still holds of the sequence walked before.
    """
    rows = max(row, default=-1) + 1
    packed_tokens = empty_packed_tokens(rows, config.row_tokens)
    loss_tokens = empty_loss_tokens(rows, config.row_loss_tokens)
    token_index = [np.zeros((0, 2), np.int64)] * sum(s.step >= 0 for s in sequences)
    final_index = np.full((len(trajectories), 2), -1, np.int64)
    tokens_used, loss_tokens_used = [0] * rows, [0] * rows
    walk = list(zip(sequences, shared, row, strict=True))
    at_depth = np.zeros(config.row_tokens, np.int64)  # Column of the id at each depth.
    for s, known, r in walk:
        own = np.arange(tokens_used[r], tokens_used[r] + len(s.ids) - known)
        at_depth[known : len(s.ids)] = own
        packed_tokens.tokens[r, own] = s.ids[known:]
        packed_tokens.position[r, own] = np.arange(known, len(s.ids))
        tokens_used[r] += len(own)

        cells = np.arange(loss_tokens_used[r], loss_tokens_used[r] + s.loss_tokens)
        loss_tokens.logit_index[r, cells] = at_depth[s.first_loss_token - 1 :][: len(cells)]
        loss_tokens_used[r] += len(cells)
        if s.step < 0:
            final_index[s.trajectory] = r, cells[0]
            continue
        loss_tokens.target[r, cells] = s.ids[s.first_loss_token :]
        loss_tokens.step[r, cells] = s.step
        loss_tokens.trajectory[r, cells] = s.trajectory
        loss_tokens.group[r, cells] = trajectories[s.trajectory].group
        response = cells[len(cells) - len(s.logprobs) :]
        loss_tokens.is_action[r, response] = True
        loss_tokens.old_logprob[r, response] = s.logprobs
        token_index[s.step] = np.stack([np.full(len(cells), r), cells], axis=1)

    computed, known_after = sum(tokens_used), 0
    for s, known, r in reversed(walk):
        end = tokens_used[r]
        tokens_used[r] -= len(s.ids) - known
        at_depth[known_after : len(s.ids)] = end  # End of the subtree of the id at each depth.
        packed_tokens.subtree_end[r, tokens_used[r] : end] = at_depth[known : len(s.ids)]
        known_after = known
    return Packing(
        packed_tokens=packed_tokens,
        loss_tokens=loss_tokens,
        token_index=np.concatenate([np.zeros((0, 2), np.int64), *token_index]),
        final_index=final_index,
        tokens_stored=sum(len(s.ids) for s in sequences if s.step >= 0),
        tokens_computed=computed,
    )

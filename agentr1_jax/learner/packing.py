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
from collections.abc import Mapping, Sequence

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


@dataclasses.dataclass(frozen=True)
class Sequences:
    """S sequences of ids: those of the steps in (trajectory, step) order, then the final prompts.

    Attributes:
      ids: of all sequences, one after the other.
      start: index in `ids` at which each sequence begins.
      length: ids of each sequence.
      first_loss_token: position in the sequence of its first loss token; of a final prompt its length.
      loss_tokens: loss tokens of each sequence, which end it: its response, after the observation before it where
        observation tokens are loss tokens too; 0 for a final prompt.
      observed: number of these that belong to the observation.
      trajectory: index of its trajectory.
      step: index of its step in the batch; -1 for a final prompt.
    """

    ids: Int[np.ndarray, "ids"]
    start: Int[np.ndarray, "sequences"]
    length: Int[np.ndarray, "sequences"]
    first_loss_token: Int[np.ndarray, "sequences"]
    loss_tokens: Int[np.ndarray, "sequences"]
    observed: Int[np.ndarray, "sequences"]
    trajectory: Int[np.ndarray, "sequences"]
    step: Int[np.ndarray, "sequences"]

    def __getitem__(self, order: Int[np.ndarray, "some"]) -> Sequences:
        """Return the sequences of these indices, in their order."""
        changes = {f.name: getattr(self, f.name)[order] for f in dataclasses.fields(self) if f.name != "ids"}
        return dataclasses.replace(self, **changes)


def observation_counts(trajectory: Trajectory, *, observations: bool) -> list[int]:
    """Return how many observation tokens of each step are loss tokens: all of them, or none."""
    return observation_tokens(trajectory) if observations else [0] * len(trajectory.steps)


def sequences(trajectories: Sequence[Trajectory], *, final_prompts: bool, observations: bool = False) -> Sequences:
    """Return the sequences of a batch.

    Args:
      trajectories: the batch.
      final_prompts: also include each `final_prompt_ids`, at which values are bootstrapped.
      observations: observation tokens are loss tokens too, except those of a final prompt, which belong to no step.
    """
    steps = [s for t in trajectories for s in t.steps]
    ends = [(i, t.final_prompt_ids) for i, t in enumerate(trajectories) if final_prompts]
    finals = {i: ids for i, ids in ends if ids is not None}
    prompts = [s.prompt_ids for s in steps] + list(finals.values())
    responses = [s.response_ids for s in steps] + [np.zeros(0, np.int32)] * len(finals)
    counts = [n for t in trajectories for n in observation_counts(t, observations=observations)]
    observed = np.array(counts + [0] * len(finals), np.int64)
    prompt, response = (np.array([len(x) for x in ids], np.int64) for ids in (prompts, responses))
    parts = [ids for pair in zip(prompts, responses, strict=True) for ids in pair]
    return Sequences(
        ids=np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32),
        start=np.cumsum(prompt + response) - prompt - response,
        length=prompt + response,
        first_loss_token=prompt - observed,
        loss_tokens=response + observed,
        observed=observed,
        trajectory=np.array([i for i, t in enumerate(trajectories) for _ in t.steps] + [*finals], np.int64),
        step=np.array([*range(len(steps)), *[-1] * len(finals)], np.int64),
    )


def shared_prefixes(
    s: Sequences, mode: PackingMode
) -> tuple[Int[np.ndarray, "sequences"], Int[np.ndarray, "sequences"]]:
    """Return an order of the sequences, and how many ids each shares with the one before it.

    `prefix_tree` shares whatever is equal; `trajectory` only what extends the whole sequence before it, of the same
    trajectory (its chains are as few as the leaves of the trajectory's tree); other modes share nothing.

    Returns:
      order: indices of the sequences.
      shared: ids shared with the sequence before, in that order.
    """
    order = np.arange(len(s.length))
    if mode not in ("trajectory", "prefix_tree"):
        return order, np.zeros(len(order), np.int64)
    # Equal-sized big-endian words: bytes compare as the ids do, and a prefix comes before what it begins.
    words = s.ids.astype(">u4").tobytes()
    keys = [words[4 * a : 4 * (a + n)] for a, n in zip(s.start.tolist(), s.length.tolist(), strict=True)]
    family = s.trajectory.tolist() if mode == "trajectory" else [0] * len(keys)
    order = np.array(sorted(range(len(keys)), key=lambda i: (family[i], keys[i])), np.int64)
    s = s[order]
    shared = common_prefixes(s)
    if mode == "trajectory":
        extends = (shared == np.roll(s.length, 1)) & (s.trajectory == np.roll(s.trajectory, 1))
        extends[:1] = False
        shared = np.where(extends, shared, 0)
    return order, shared


def common_prefixes(s: Sequences) -> Int[np.ndarray, "sequences"]:
    """Return how many ids each sequence shares with the one before it; 0 for the first."""
    least = np.minimum(s.length, np.roll(s.length, 1))
    least[:1] = 0
    differ = s.ids[ragged_arange(s.start, least)] != s.ids[ragged_arange(np.roll(s.start, 1), least)]
    # The first difference of each, or its end: differences and ends lie in one sorted list.
    end = np.cumsum(least)
    marks = np.append(np.flatnonzero(differ), len(differ))
    first = marks[np.searchsorted(marks, end - least)]
    return np.minimum(first, end) - (end - least)


def ragged_arange(start: Int[np.ndarray, "parts"], count: Int[np.ndarray, "parts"]) -> Int[np.ndarray, "total"]:
    """Return start[i], start[i] + 1, ... of count[i] numbers, for one part after the other."""
    return np.arange(count.sum()) + np.repeat(start - (np.cumsum(count) - count), count)

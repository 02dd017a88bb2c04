"""Sequences of a batch, in an order in which shared prefixes are neighbours.

Every step is a sequence of ids, its prompt and its response. Sorted by their ids, sequences that begin alike stand
together, and the length of the prefix that each shares with the one before it describes the whole tree: the tokens
behind that prefix, one sequence after the other, are its nodes in depth-first order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from agentr1_jax.learner.config import PackingMode
from agentr1_jax.trajectory import Trajectory, observation_tokens


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

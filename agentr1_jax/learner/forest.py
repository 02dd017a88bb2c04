"""The forest of a batch: the sequences to compute, in an order in which shared prefixes are neighbours.

Every step is a sequence of ids, its prompt and its response. Sorted by their ids, sequences that begin alike stand
together, and the length of the prefix that each shares with the one before it is all there is to know of the forest:
the tokens behind that prefix, one sequence after the other, are its nodes in depth-first order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from agentr1_jax.trajectory import Trajectory, observation_tokens


@dataclasses.dataclass(frozen=True)
class Sequences:
    """S sequences of ids: those of the steps, in stream order, and behind them the final prompts.

    Attributes:
      ids: of all sequences, in stream order.
      start: where each begins in `ids`.
      length: of each.
      first_read: position of the first token that is read; of a final prompt its length.
      reads: tokens that are read, from there to the end: its response, and the observation before it where observations
        are read; 0 for a final prompt.
      observed: how many of these are of the observation.
      trajectory: index of its trajectory.
      step: index of its step in the batch; -1 for a final prompt.
    """

    ids: Int[np.ndarray, "ids"]
    start: Int[np.ndarray, "sequences"]
    length: Int[np.ndarray, "sequences"]
    first_read: Int[np.ndarray, "sequences"]
    reads: Int[np.ndarray, "sequences"]
    observed: Int[np.ndarray, "sequences"]
    trajectory: Int[np.ndarray, "sequences"]
    step: Int[np.ndarray, "sequences"]

    def __getitem__(self, order: Int[np.ndarray, "some"]) -> Sequences:
        """The sequences in another order."""
        fields = (self.start, self.length, self.first_read, self.reads, self.observed, self.trajectory, self.step)
        return Sequences(self.ids, *(x[order] for x in fields))


def observation_reads(trajectory: Trajectory, reads: str) -> list[int]:
    """How many observation tokens of each step are read: none, or with reads `all` every one."""
    return observation_tokens(trajectory) if reads == "all" else [0] * len(trajectory.steps)


def sequences(trajectories: Sequence[Trajectory], *, final_prompts: bool, reads: str = "sampled") -> Sequences:
    """The sequences of a batch; with the `final_prompts` at which values are bootstrapped, or without.

    With `reads` = "all", observation tokens are read too; those of a final prompt belong to no step, and are not.
    """
    steps = [s for t in trajectories for s in t.steps]
    ends = [(i, t.final_prompt_ids) for i, t in enumerate(trajectories) if final_prompts]
    finals = {i: ids for i, ids in ends if ids is not None}
    prompts = [s.prompt_ids for s in steps] + list(finals.values())
    responses = [s.response_ids for s in steps] + [np.zeros(0, np.int32)] * len(finals)
    observed = np.array([n for t in trajectories for n in observation_reads(t, reads)] + [0] * len(finals), np.int64)
    prompt, response = (np.array([len(x) for x in ids], np.int64) for ids in (prompts, responses))
    parts = [ids for pair in zip(prompts, responses, strict=True) for ids in pair]
    return Sequences(
        ids=np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32),
        start=np.cumsum(prompt + response) - prompt - response,
        length=prompt + response,
        first_read=prompt - observed,
        reads=response + observed,
        observed=observed,
        trajectory=np.array([i for i, t in enumerate(trajectories) for _ in t.steps] + [*finals], np.int64),
        step=np.array([*range(len(steps)), *[-1] * len(finals)], np.int64),
    )


def shared_prefixes(s: Sequences, mode: str) -> tuple[Int[np.ndarray, "sequences"], Int[np.ndarray, "sequences"]]:
    """An order of the sequences, and how many ids each shares with the one before it.

    `tree` shares whatever is equal; `chains` only what extends the whole sequence before it, of the same trajectory
    (its chains are as few as the leaves of the trajectory's tree); other modes share nothing.

    Returns:
      order: sequences in that order.
      shared: ids shared with the sequence before, in that order.
    """
    order = np.arange(len(s.length))
    if mode not in ("chains", "tree"):
        return order, np.zeros(len(order), np.int64)
    # Equal-sized big-endian words: bytes compare as the ids do, and a prefix comes before what it begins.
    words = s.ids.astype(">u4").tobytes()
    keys = [words[4 * a : 4 * (a + n)] for a, n in zip(s.start.tolist(), s.length.tolist(), strict=True)]
    family = s.trajectory.tolist() if mode == "chains" else [0] * len(keys)
    order = np.array(sorted(range(len(keys)), key=lambda i: (family[i], keys[i])), np.int64)
    s = s[order]
    shared = common_prefixes(s)
    if mode == "chains":
        extends = (shared == np.roll(s.length, 1)) & (s.trajectory == np.roll(s.trajectory, 1))
        extends[:1] = False
        shared = np.where(extends, shared, 0)
    return order, shared


def common_prefixes(s: Sequences) -> Int[np.ndarray, "sequences"]:
    """How many ids each sequence shares with the one before it; 0 for the first."""
    least = np.minimum(s.length, np.roll(s.length, 1))
    least[:1] = 0
    differ = s.ids[ragged_arange(s.start, least)] != s.ids[ragged_arange(np.roll(s.start, 1), least)]
    # The first difference of each, or its end: differences and ends lie in one sorted list.
    end = np.cumsum(least)
    marks = np.append(np.flatnonzero(differ), len(differ))
    first = marks[np.searchsorted(marks, end - least)]
    return np.minimum(first, end) - (end - least)


def ragged_arange(start: Int[np.ndarray, "parts"], count: Int[np.ndarray, "parts"]) -> Int[np.ndarray, "total"]:
    """start[i], start[i] + 1, ... of count[i] numbers, for one part after the other."""
    return np.arange(count.sum()) + np.repeat(start - (np.cumsum(count) - count), count)

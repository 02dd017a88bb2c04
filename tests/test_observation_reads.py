"""Observation tokens as reads: they are counted and laid out right, under any context rule and in any packing."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from builders import LONGEST, batches, fixed_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.learner.fill import gather_final, gather_tokens, place
from agentr1_jax.learner.packing import MODES, misfit, pack
from agentr1_jax.trajectory import Step, observation_tokens

quick = settings(max_examples=60, deadline=None)


def packed(trajectories, mode="chains", reads="all", row_tokens=LONGEST):
    return pack(trajectories, mode=mode, row_tokens=row_tokens, row_reads=row_tokens, final_reads=True, reads=reads)


@dataclasses.dataclass(frozen=True)
class Token:
    """A token that is read, by a loop over the trajectories."""

    trajectory: int
    step: int
    group: int
    before: tuple
    id: int
    logprob: float | None

    @property
    def is_action(self):
        return self.logprob is not None


def common(one, other):
    """Length of the longest common prefix."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def stream(trajectories):
    """All tokens to read: of each step what its prompt has beyond the step before, then its response."""
    out, number = [], 0
    for i, t in enumerate(trajectories):
        previous = None
        for s in t.steps:
            prompt, response = s.prompt_ids.tolist(), s.response_ids.tolist()
            ids = prompt + response
            begin = len(prompt) if previous is None else max(common(prompt, previous), 1)
            logprobs = [None] * len(prompt) + s.logprobs.tolist()
            out += [Token(i, number, t.group, tuple(ids[:k]), ids[k], logprobs[k]) for k in range(begin, len(ids))]
            previous, number = ids, number + 1
    return out


@quick
@given(batches())
def test_observation_tokens_are_what_a_prompt_adds_to_the_step_before(trajectories):
    for t in trajectories:
        expected = [0] * len(t.steps)
        for token in stream([t]):
            expected[token.step] += not token.is_action
        assert observation_tokens(t) == expected


@quick
@given(batches(contexts=("append",)))
def test_the_observation_tokens_of_an_appended_prompt_are_what_was_appended(trajectories):
    for t in trajectories:
        pairs = itertools.pairwise(t.steps)
        added = [len(b.prompt_ids) - len(a.prompt_ids) - len(a.response_ids) for a, b in pairs]
        assert observation_tokens(t) == [0, *added] and min(added, default=1) > 0


@pytest.mark.parametrize(
    ("prompt", "count"),
    [([1, 2, 3, 7, 8], 2), ([1, 2, 3], 0), ([1, 2], 0), ([1, 9, 9], 2), ([9, 9, 9], 2), ([9], 0), ([], 0)],
)
def test_the_first_token_of_a_context_is_no_observation(prompt, count):
    """After the prompt [1, 2] and the response [3]; a first token has nothing before it that predicts it."""
    made = fixed_batch("append")[3]
    ids = np.int32([1, 2]), np.int32([3])
    first, second = (Step(p, ids[1], np.float32([-1])) for p in (ids[0], np.array(prompt, np.int32)))
    assert observation_tokens(dataclasses.replace(made, steps=(first, second))) == [0, count]
    assert observation_tokens(dataclasses.replace(made, steps=())) == []


@quick
@given(batches(), st.sampled_from(MODES))
def test_every_read_predicts_the_token_at_its_place(trajectories, mode):
    packing = packed(trajectories, mode)
    nodes, reads, tokens = packing.nodes, packing.reads, stream(trajectories)
    assert len(packing.token_read) == len(tokens)
    for token, (row, column) in zip(tokens, packing.token_read, strict=True):
        src = reads.src[row, column]
        seen = [j for j in range(src + 1) if src < nodes.subtree_end[row, j]]
        assert tuple(nodes.tokens[row, seen]) == token.before
        np.testing.assert_array_equal(nodes.position[row, seen], np.arange(len(seen)))
        assert reads.target[row, column] == token.id
        assert reads.is_action[row, column] == token.is_action
        assert reads.old_logprob[row, column] == (token.logprob or 0)
        unit = reads.step[row, column], reads.trajectory[row, column], reads.group[row, column]
        assert unit == (token.step, token.trajectory, token.group)
    cells = [tuple(c) for c in [*packing.token_read.tolist(), *packing.final_read.tolist()] if c[0] >= 0]
    assert len(set(cells)) == len(cells) and (reads.step >= 0).sum() == len(tokens)


@quick
@given(batches(), st.sampled_from(MODES))
def test_gathering_undoes_placing_and_finds_the_final_prompts(trajectories, mode):
    packing = packed(trajectories, mode)
    per_token = np.random.default_rng(0).normal(size=len(packing.token_read)).astype(np.float32)
    placed = place(packing, per_token)
    np.testing.assert_array_equal(gather_tokens(packing, placed), per_token)
    assert np.count_nonzero(placed) == len(per_token)
    last = [t.final_prompt_ids[-1] if t.final_prompt_ids is not None else 0 for t in trajectories]
    at_src = np.take_along_axis(packing.nodes.tokens, packing.reads.src, axis=1)
    np.testing.assert_array_equal(gather_final(packing, at_src), last)


def test_observation_tokens_count_as_reads_of_their_step():
    made = fixed_batch("append")[0]
    need = max(n + len(s.response_ids) for n, s in zip(observation_tokens(made), made.steps, strict=True))
    most = max(len(s.response_ids) for s in made.steps)
    room = {"mode": "chains", "row_tokens": LONGEST, "final_reads": False}
    assert need > most
    assert pack([made], row_reads=need, reads="all", **room).reads.src.shape[1] == need
    assert pack([made], row_reads=most, **room).reads.src.shape[1] == most
    with pytest.raises(ValueError, match=rf"step \d has \d+ tokens with {need} reads, which do not fit a row of"):
        pack([made], row_reads=need - 1, reads="all", **room)
    assert misfit(made, row_tokens=LONGEST, row_reads=need - 1, final_reads=False) is None
    with pytest.raises(ValueError, match="unknown reads 'sample'; choose one of sampled, all"):
        pack([made], row_reads=need, reads="sample", **room)

"""Observation tokens as loss tokens: they are counted and laid out right, under any context rule and in any packing."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from builders import LONGEST, batches, fixed_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.learner.config import PACKING_MODES, PackingConfig
from agentr1_jax.learner.packing import gather, gather_final, pack, packing_fault, scatter
from agentr1_jax.trajectory import Step, observation_tokens

quick = settings(max_examples=60, deadline=None)


def packed(trajectories, mode="trajectory", observations=True, row_tokens=LONGEST):
    config = PackingConfig(mode, row_tokens, row_tokens, rows=1)
    return pack(trajectories, config, final_values=True, observations=observations)


@dataclasses.dataclass(frozen=True)
class Token:
    """A loss token, by a loop over the trajectories."""

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
    """All loss tokens: of each step what its prompt has beyond the step before, then its response."""
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
@given(batches(), st.sampled_from(PACKING_MODES))
def test_every_loss_token_is_predicted_at_its_logit_index(trajectories, mode):
    packing = packed(trajectories, mode)
    packed_tokens, loss_tokens, tokens = packing.packed_tokens, packing.loss_tokens, stream(trajectories)
    assert len(packing.token_index) == len(tokens)
    for token, (row, column) in zip(tokens, packing.token_index, strict=True):
        logit_index = loss_tokens.logit_index[row, column]
        seen = [j for j in range(logit_index + 1) if logit_index < packed_tokens.subtree_end[row, j]]
        assert tuple(packed_tokens.tokens[row, seen]) == token.before
        np.testing.assert_array_equal(packed_tokens.position[row, seen], np.arange(len(seen)))
        assert loss_tokens.target[row, column] == token.id
        assert loss_tokens.is_action[row, column] == token.is_action
        assert loss_tokens.old_logprob[row, column] == (token.logprob or 0)
        unit = loss_tokens.step[row, column], loss_tokens.trajectory[row, column], loss_tokens.group[row, column]
        assert unit == (token.step, token.trajectory, token.group)
    cells = [tuple(c) for c in [*packing.token_index.tolist(), *packing.final_index.tolist()] if c[0] >= 0]
    assert len(set(cells)) == len(cells) and (loss_tokens.step >= 0).sum() == len(tokens)


@quick
@given(batches(), st.sampled_from(PACKING_MODES))
def test_gather_undoes_scatter_and_finds_the_final_prompts(trajectories, mode):
    packing = packed(trajectories, mode)
    per_token = np.random.default_rng(0).normal(size=len(packing.token_index)).astype(np.float32)
    scattered = scatter(packing, per_token)
    np.testing.assert_array_equal(gather(packing, scattered), per_token)
    assert np.count_nonzero(scattered) == len(per_token)
    last = [t.final_prompt_ids[-1] if t.final_prompt_ids is not None else 0 for t in trajectories]
    at_logit_index = np.take_along_axis(packing.packed_tokens.tokens, packing.loss_tokens.logit_index, axis=1)
    np.testing.assert_array_equal(gather_final(packing, at_logit_index), last)


def test_observation_tokens_count_as_loss_tokens_of_their_step():
    made = fixed_batch("append")[0]
    need = max(n + len(s.response_ids) for n, s in zip(observation_tokens(made), made.steps, strict=True))
    most = max(len(s.response_ids) for s in made.steps)

    def packing(row_loss_tokens, observations):
        return pack([made], rows(row_loss_tokens), final_values=False, observations=observations)

    def rows(row_loss_tokens):
        return PackingConfig("trajectory", LONGEST, row_loss_tokens, rows=1)

    assert need > most
    assert packing(need, True).loss_tokens.logit_index.shape[1] == need
    assert packing(most, False).loss_tokens.logit_index.shape[1] == most
    with pytest.raises(ValueError, match=rf"step \d has \d+ tokens with {need} loss tokens, which do not fit a row of"):
        packing(need - 1, True)
    assert packing_fault(made, rows(need - 1), final_values=False) is None

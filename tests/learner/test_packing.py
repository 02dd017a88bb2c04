"""Packing: every sampled token is one loss token with its own numbers, whatever the context rule; rows keep limits."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from builders import LONGEST, batches, fixed_batch, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.learner.batch import CRITIC_FIELDS, to_microbatches
from agentr1_jax.learner.config import PACKING_MODES, PackingConfig
from agentr1_jax.learner.packing import gather, gather_final, pack, packing_fault, scatter, scatter_fields
from agentr1_jax.trajectory import Step, observation_tokens

quick = settings(max_examples=60, deadline=None)
modes = st.sampled_from(PACKING_MODES)
rows = st.tuples(st.sampled_from((LONGEST, LONGEST + 7, 100)), st.sampled_from((20, LONGEST)))


def pack_rows(trajectories, mode="trajectory", row=(100, 40), final_values=True, observations=False):
    return pack(trajectories, PackingConfig(mode, *row, rows=1), final_values=final_values, observations=observations)


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


def stream(trajectories):
    """All loss tokens: of each step the answer that ends its prompt, then its response.

    Of a prompt that is all answer, as after a rewrite, what it has in common with the step before is no news.
    """
    out, number = [], 0
    for i, t in enumerate(trajectories):
        previous = None
        for s in t.steps:
            prompt, response = s.prompt_ids.tolist(), s.response_ids.tolist()
            ids = prompt + response
            begin = len(prompt) - (s.observation_tokens or 0)
            if previous is not None and begin == 0:
                same = [one == other for one, other in zip(prompt, previous, strict=False)]
                begin = max([*same, False].index(False), 1)
            logprobs = [None] * len(prompt) + s.logprobs.tolist()
            out += [Token(i, number, t.group, tuple(ids[:k]), ids[k], logprobs[k]) for k in range(begin, len(ids))]
            previous, number = ids, number + 1
    return out


def context_of(packed_tokens, row, node):
    """The ids that node sees, by the rule of `subtree_end`, itself included; and their positions."""
    seen = [j for j in range(node + 1) if node < packed_tokens.subtree_end[row, j]]
    return tuple(packed_tokens.tokens[row, seen]), packed_tokens.position[row, seen]


@quick
@given(batches(), modes, rows, st.booleans())
def test_fault_1_every_loss_token_is_one_of_its_step_and_sees_its_own_context(trajectories, mode, row, observations):
    if observations:
        row = (row[0], LONGEST)
    packing = pack_rows(trajectories, mode, row, observations=observations)
    loss_tokens, tokens = packing.loss_tokens, [t for t in stream(trajectories) if observations or t.is_action]
    assert len(packing.token_index) == len(tokens) == (loss_tokens.step >= 0).sum()
    for token, (r, column) in zip(tokens, packing.token_index, strict=True):
        seen, position = context_of(packing.packed_tokens, r, loss_tokens.logit_index[r, column])
        assert seen == token.before
        np.testing.assert_array_equal(position, np.arange(len(seen)))
        assert loss_tokens.target[r, column] == token.id
        assert loss_tokens.is_action[r, column] == token.is_action
        assert loss_tokens.old_logprob[r, column] == (token.logprob or 0)
        unit = loss_tokens.step[r, column], loss_tokens.trajectory[r, column], loss_tokens.group[r, column]
        assert unit == (token.step, token.trajectory, token.group)
    for t, (r, column) in zip(trajectories, packing.final_index, strict=True):
        assert (r >= 0) == (t.final_prompt_ids is not None)
        if r >= 0:
            seen, _ = context_of(packing.packed_tokens, r, loss_tokens.logit_index[r, column])
            assert seen == tuple(t.final_prompt_ids) and not loss_tokens.is_action[r, column]
    cells = [tuple(c) for c in [*packing.token_index.tolist(), *packing.final_index.tolist()] if c[0] >= 0]
    assert len(set(cells)) == len(cells), "two loss tokens share a cell"
    assert (pack_rows(trajectories, mode, row, final_values=False).final_index == -1).all()


@quick
@given(batches(), modes, st.booleans())
def test_gather_undoes_scatter_and_finds_the_final_prompts(trajectories, mode, observations):
    packing = pack_rows(trajectories, mode, (LONGEST, LONGEST), observations=observations)
    per_token = np.random.default_rng(0).normal(size=len(packing.token_index)).astype(np.float32)
    cells = scatter(packing, per_token)
    np.testing.assert_array_equal(gather(packing, cells), per_token)
    assert np.count_nonzero(cells) == len(per_token)
    last = [t.final_prompt_ids[-1] if t.final_prompt_ids is not None else 0 for t in trajectories]
    at_logit_index = np.take_along_axis(packing.packed_tokens.tokens, packing.loss_tokens.logit_index, axis=1)
    np.testing.assert_array_equal(gather_final(packing, at_logit_index), last)


@quick
@given(batches(), modes, rows)
def test_rows_keep_their_limits_and_padding_has_no_part(trajectories, mode, row):
    packing = pack_rows(trajectories, mode, row)
    packed_tokens, loss_tokens = packing.packed_tokens, packing.loss_tokens
    assert packed_tokens.tokens.shape == (packing.rows, row[0])
    assert loss_tokens.logit_index.shape == (packing.rows, row[1])
    assert (loss_tokens.logit_index >= 0).all() and (loss_tokens.logit_index < row[0]).all()
    index = np.arange(row[0])
    assert (packed_tokens.subtree_end > index).all() and (packed_tokens.subtree_end <= row[0]).all()
    # Segments have two ids or more here.
    used = (packed_tokens.subtree_end > index + 1) | (packed_tokens.position > 0)
    assert used.sum() == packing.tokens_computed
    assert (np.diff(used.astype(int), axis=1) <= 0).all(), "padding comes last"
    padding = ~loss_tokens.is_action
    assert (loss_tokens.step[padding] == -1).all() and (loss_tokens.trajectory[padding] == -1).all()
    assert not loss_tokens.weight.any() and not loss_tokens.advantage.any()
    stored = sum(len(s.prompt_ids) + len(s.response_ids) for t in trajectories for s in t.steps)
    assert packing.tokens_stored == stored
    if mode in ("per_step_padded", "per_step"):
        assert pack_rows(trajectories, mode, row, final_values=False).tokens_computed == stored


@quick
@given(batches())
def test_a_tree_computes_every_prefix_once(trajectories):
    """Its nodes are the distinct prefixes of the batch, a chain's those of each trajectory, where all fit a row."""
    prefixes = [
        {(i, *ids[: n + 1]) for s in t.steps for ids in [[*s.prompt_ids, *s.response_ids]] for n in range(len(ids))}
        for i, t in enumerate(trajectories)
    ]
    roots = {p[1] for own in prefixes for p in own if len(p) == 2}
    tree = pack_rows(trajectories, "prefix_tree", (64, 64), final_values=False)
    distinct = len({p[1:] for own in prefixes for p in own})
    assert tree.tokens_computed >= distinct
    if distinct <= 64:
        assert tree.tokens_computed == distinct and tree.rows == 1
        assert (tree.packed_tokens.position[0, :distinct] == 0).sum() == len(roots)
    chains = pack_rows(trajectories, "trajectory", (64 * LONGEST, 200), final_values=False)
    leaves = sum(sum(not any(len(q) > len(p) and q[: len(p)] == p for q in own) for p in own) for own in prefixes)
    assert (chains.packed_tokens.position[0, : chains.tokens_computed] == 0).sum() == leaves
    assert distinct <= chains.tokens_computed


@quick
@given(batches(), st.sampled_from(("trajectory", "prefix_tree")))
def test_the_order_of_trajectories_does_not_matter(trajectories, mode):
    one, other = pack_rows(trajectories, mode), pack_rows(trajectories[::-1], mode)
    assert (one.rows, one.tokens_computed) == (other.rows, other.tokens_computed)


def of_steps(*steps, uid="test/0/0"):
    """A trajectory of the given (prompt, response) ids."""

    def step(prompt, response):
        ids = (np.array(x, np.int32) for x in (prompt, response))
        return Step(*ids, np.zeros(len(response), np.float32), reward=0.0)

    one = trajectory(np.random.default_rng(0), [1])
    return dataclasses.replace(one, uid=uid, steps=tuple(step(*s) for s in steps), final_prompt_ids=None)


RETRY = of_steps(([1, 2], [3]), ([1, 2], [4, 4]), ([9], [8]), ([1, 2, 3, 4, 5], [6]))
"""A retry from the same prompt; what follows extends the first answer."""


def test_chains_are_as_few_as_the_leaves_of_a_trajectory():
    packing = pack_rows([RETRY])
    assert packing.tokens_computed == 6 + 4 + 2
    np.testing.assert_array_equal(packing.packed_tokens.tokens[0, :12], [1, 2, 3, 4, 5, 6, 1, 2, 4, 4, 9, 8])
    again = pack_rows([of_steps(([1, 2], [3]), ([1, 2], [3, 4]), ([1, 2, 3, 4], [5]))])
    assert again.tokens_computed == 5, "a retry that says the same and more is one chain with it"
    np.testing.assert_array_equal(again.loss_tokens.logit_index[0, :4], [1, 1, 2, 3])


def test_a_tree_is_laid_out_depth_first():
    packing = pack_rows([RETRY, of_steps(([1, 2], [4, 4]), uid="test/0/1")], "prefix_tree", (64, 40))
    np.testing.assert_array_equal(packing.packed_tokens.tokens[0, :10], [1, 2, 3, 4, 5, 6, 4, 4, 9, 8])
    np.testing.assert_array_equal(packing.packed_tokens.position[0, :10], [0, 1, 2, 3, 4, 5, 2, 3, 0, 1])
    np.testing.assert_array_equal(packing.packed_tokens.subtree_end[0, :10], [8, 8, 6, 6, 6, 6, 8, 8, 10, 10])
    logit_index = [packing.loss_tokens.logit_index[0, c] for _, c in packing.token_index]
    assert logit_index == [1, 1, 6, 8, 4, 1, 6], "equal answers of two samples are two loss tokens of one position each"


def test_what_exceeds_a_row_is_cut_and_its_prefix_repeated_without_loss_tokens():
    samples = [of_steps((range(8), [10 + i] * 4), uid=f"test/0/{i}") for i in range(4)]
    packing = pack_rows(samples, "prefix_tree", (16, 40))
    np.testing.assert_array_equal(packing.packed_tokens.tokens[:, :8], [range(8)] * 2)
    assert packing.rows == 2 and packing.tokens_computed == 2 * 16 and packing.tokens_stored == 48
    assert packing.loss_tokens.is_action.sum() == 16
    long = of_steps(([1, 2], [3, 4]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6], [7, 8]))
    cut = pack_rows([long], "trajectory", (10, 4))
    np.testing.assert_array_equal(cut.packed_tokens.tokens[:, :8], [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 0, 0]])
    np.testing.assert_array_equal(cut.loss_tokens.is_action.sum(1), [2, 4])


def test_padded_rows_hold_one_step_each():
    packing = pack_rows(fixed_batch("append"), "per_step_padded")
    assert packing.rows == sum(len(t.steps) + (t.final_prompt_ids is not None) for t in fixed_batch("append"))


def test_a_prefix_too_short_to_matter_does_not_tie_trees_together():
    """Rows fill better where first-fit may place each by itself; here 1 token of 128 is shared."""
    sizes = (80, 90, 48, 38)
    packing = pack_rows(
        [of_steps(([1], [2 + i] * (n - 1)), uid=f"test/0/{i}") for i, n in enumerate(sizes)], "prefix_tree", (128, 128)
    )
    assert packing.rows == 2 and packing.tokens_computed == sum(sizes)


def test_fault_8_a_batch_is_padded_with_rows_of_no_weight():
    packing = pack_rows(fixed_batch("window"), row=(LONGEST, 20))
    count = len(packing.token_index)
    ones = np.ones(count, np.float32)
    loss_tokens = scatter_fields(packing, dict.fromkeys(("advantage", "weight", *CRITIC_FIELDS), ones))
    batch = to_microbatches(packing.packed_tokens, loss_tokens, microbatches=4, rows=4)
    assert all(x.shape[:2] == (4, 4) for x in jax.tree.leaves(batch))
    for name in ("tokens", "position", "subtree_end"):
        flat = getattr(batch.packed_tokens, name).reshape(16, -1)
        np.testing.assert_array_equal(flat[: packing.rows], getattr(packing.packed_tokens, name))
    assert batch.loss_tokens.weight.sum() == batch.loss_tokens.value_weight.sum() == count
    padding = batch.loss_tokens.weight.reshape(16, -1)[packing.rows :]
    assert len(padding) and not padding.any() and not batch.loss_tokens.is_action.reshape(16, -1)[packing.rows :].any()
    with pytest.raises(ValueError, match=r"rows exceed the 1 microbatches of 1 rows"):
        to_microbatches(packing.packed_tokens, packing.loss_tokens, microbatches=1, rows=1)


@pytest.mark.parametrize("mode", PACKING_MODES)
def test_no_trajectories_make_no_rows(mode):
    packing = pack_rows([], mode)
    assert packing.rows == 0 and packing.token_index.shape == packing.final_index.shape == (0, 2)
    batch = to_microbatches(packing.packed_tokens, packing.loss_tokens, microbatches=1, rows=2)
    assert not batch.loss_tokens.is_action.any()


def change(**changes):
    one = trajectory(np.random.default_rng(0), [2, 2], cut="steps")
    return dataclasses.replace(one, steps=(one.steps[0], dataclasses.replace(one.steps[1], **changes)))


NONE = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("one", "row", "message"),
    [
        (change(response_ids=NONE, logprobs=NONE), (64, 32), "trajectory test/0/0: .*drop it first"),
        (change(logprobs=np.float32([-1, -np.inf])), (64, 32), "test/0/0: step 1 has a log-prob that is not finite"),
        (dataclasses.replace(change(), steps=()), (64, 32), "trajectory test/0/0: .*drop it first"),
        (change(), (4, 32), r"step \d has \d+ tokens with 2 loss tokens, which do not fit a row of 4"),
        (change(), (64, 1), r"raise learner.row_tokens or learner.row_loss_tokens"),
        (
            dataclasses.replace(change(), final_prompt_ids=np.zeros(65, np.int32)),
            (64, 32),
            r"final_prompt_ids has 65 tokens; .* learner.row_tokens \(64\)",
        ),
    ],
)
def test_what_cannot_be_packed_is_an_error(one, row, message):
    with pytest.raises(ValueError, match=message):
        pack_rows([one], row=row)


@quick
@given(batches())
def test_observation_tokens_are_those_that_the_environment_made(trajectories):
    for t in trajectories:
        expected = [0] * len(t.steps)
        for token in stream([t]):
            expected[token.step] += not token.is_action
        assert observation_tokens(t) == expected


@pytest.mark.parametrize(
    ("prompt", "recorded", "count"),
    [
        ([1, 2, 3, 7, 8], None, 2),  # It extends the step before.
        ([1, 2, 3, 7, 8], 1, 1),
        ([1, 3, 7, 8], None, 0),  # Nobody knows which of these ids the policy sampled.
        ([1, 3, 7, 8], 2, 2),
        ([1, 2, 7], 1, 1),
        ([1, 2], 0, 0),
        ([1, 9, 9], 3, 2),  # Nothing was sampled; a first token has nothing before it that predicts it.
        ([9, 9, 9], 3, 2),
        ([9], 1, 0),
        ([], None, 0),
        ([], 0, 0),
    ],
)
def test_observation_tokens_by_hand(prompt, recorded, count):
    """After the prompt [1, 2] and the response [3]."""
    made = of_steps(([1, 2], [3]), (prompt, [3]))
    step = dataclasses.replace(made.steps[1], observation_tokens=recorded)
    assert observation_tokens(dataclasses.replace(made, steps=(made.steps[0], step))) == [0, count]
    assert observation_tokens(of_steps()) == []


def test_a_prompt_has_no_more_observation_tokens_than_ids():
    with pytest.raises(ValueError, match="a prompt of 2 ids has 3 observation tokens"):
        Step(np.int32([1, 2]), np.int32([3]), np.float32([0]), observation_tokens=3)


def test_observation_tokens_count_as_loss_tokens_of_their_step():
    one = fixed_batch("append")[0]
    need = max(n + len(s.response_ids) for n, s in zip(observation_tokens(one), one.steps, strict=True))
    assert pack_rows([one], row=(LONGEST, need), observations=True).rows
    with pytest.raises(ValueError, match=rf"step \d has \d+ tokens with {need} loss tokens, which do not fit a row of"):
        pack_rows([one], row=(LONGEST, need - 1), observations=True)
    assert packing_fault(one, PackingConfig("trajectory", LONGEST, need - 1, rows=1), final_values=False) is None

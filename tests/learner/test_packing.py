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
from agentr1_jax.learner.packing import gather, gather_final, pack, scatter, scatter_fields
from agentr1_jax.trajectory import Step

quick = settings(max_examples=60, deadline=None)
modes = st.sampled_from(PACKING_MODES)
rows = st.tuples(st.sampled_from((LONGEST, LONGEST + 7, 100)), st.sampled_from((20, 33)))


def packed(trajectories, mode="trajectory", row=(100, 40), final_values=True):
    return pack(trajectories, PackingConfig(mode, *row, rows=1), final_values=final_values)


def context_of(packed_tokens, row, node):
    """The ids that node sees, by the rule of `subtree_end`, itself included; and their positions."""
    seen = [j for j in range(node + 1) if node < packed_tokens.subtree_end[row, j]]
    return packed_tokens.tokens[row, seen], packed_tokens.position[row, seen]


def samples(trajectories):
    """(trajectory index, step index, step, k) of each sampled token in stream order."""
    steps = [(i, s) for i, t in enumerate(trajectories) for s in t.steps]
    return [(i, n, s, k) for n, (i, s) in enumerate(steps) for k in range(len(s.response_ids))]


@quick
@given(batches(), modes, rows, st.booleans())
def test_every_sampled_token_is_one_loss_token_that_sees_its_own_context(trajectories, mode, row, final_values):
    packing = packed(trajectories, mode, row, final_values)
    loss_tokens, stream = packing.loss_tokens, samples(trajectories)
    assert len(packing.token_index) == len(stream) == loss_tokens.is_action.sum()
    assert len({tuple(cell) for cell in packing.token_index.tolist()}) == len(stream)
    for (i, n, step, k), (r, column) in zip(stream, packing.token_index, strict=True):
        seen, position = context_of(packing.packed_tokens, r, loss_tokens.logit_index[r, column])
        np.testing.assert_array_equal(seen, np.concatenate([step.prompt_ids, step.response_ids[:k]]))
        np.testing.assert_array_equal(position, np.arange(len(seen)))
        assert loss_tokens.target[r, column] == step.response_ids[k]
        assert loss_tokens.old_logprob[r, column] == step.logprobs[k]
        assert loss_tokens.is_action[r, column]
        unit = loss_tokens.step[r, column], loss_tokens.trajectory[r, column], loss_tokens.group[r, column]
        assert unit == (n, i, trajectories[i].group)


@quick
@given(batches(), modes, rows)
def test_the_value_of_a_cut_trajectory_is_read_at_the_end_of_its_final_prompt(trajectories, mode, row):
    packing = packed(trajectories, mode, row)
    for t, (r, column) in zip(trajectories, packing.final_index, strict=True):
        assert (r >= 0) == (t.final_prompt_ids is not None)
        if r >= 0:
            seen, _ = context_of(packing.packed_tokens, r, packing.loss_tokens.logit_index[r, column])
            np.testing.assert_array_equal(seen, t.final_prompt_ids)
            assert not packing.loss_tokens.is_action[r, column]
    cells = [tuple(c) for c in [*packing.token_index.tolist(), *packing.final_index.tolist()] if c[0] >= 0]
    assert len(set(cells)) == len(cells), "two loss tokens share a cell"
    assert (packed(trajectories, mode, row, final_values=False).final_index == -1).all()


@quick
@given(batches(), modes, rows)
def test_rows_keep_their_limits_and_padding_has_no_part(trajectories, mode, row):
    packing = packed(trajectories, mode, row)
    packed_tokens, loss_tokens = packing.packed_tokens, packing.loss_tokens
    assert packed_tokens.tokens.shape == (packing.rows, row[0]) and loss_tokens.logit_index.shape == (
        packing.rows,
        row[1],
    )
    assert (loss_tokens.logit_index >= 0).all() and (loss_tokens.logit_index < row[0]).all()
    index = np.arange(row[0])
    assert (packed_tokens.subtree_end > index).all() and (packed_tokens.subtree_end <= row[0]).all()
    used = (packed_tokens.subtree_end > index + 1) | (
        packed_tokens.position > 0
    )  # Segments have two nodes or more here.
    assert used.sum() == packing.tokens_computed == round(packing.occupancy * packed_tokens.tokens.size)
    assert (np.diff(used.astype(int), axis=1) <= 0).all(), "padding comes last"
    padding = ~loss_tokens.is_action
    assert (loss_tokens.step[padding] == -1).all() and (loss_tokens.trajectory[padding] == -1).all()
    assert not loss_tokens.weight.any() and not loss_tokens.advantage.any()
    filled = scatter_fields(packing, {"weight": np.ones(len(packing.token_index))})
    assert not filled.weight[padding].any() and filled.weight[~padding].all()


@quick
@given(batches(), modes)
def test_stored_and_computed_tokens_are_counted(trajectories, mode):
    packing = packed(trajectories, mode, final_values=False)
    stored = sum(len(s.prompt_ids) + len(s.response_ids) for t in trajectories for s in t.steps)
    assert packing.tokens_stored == stored
    if mode in ("per_step_padded", "per_step"):
        assert packing.tokens_computed == stored
    assert packing.tokens_computed <= stored
    assert packing.sharing == stored / packing.tokens_computed


@quick
@given(batches())
def test_a_tree_computes_every_prefix_once(trajectories):
    """Its nodes are the distinct prefixes of the batch, a chain's those of each trajectory, where all fit a row."""
    prefixes = [
        {(i, *ids[: n + 1]) for s in t.steps for ids in [[*s.prompt_ids, *s.response_ids]] for n in range(len(ids))}
        for i, t in enumerate(trajectories)
    ]
    row = (64 * LONGEST, 200)
    roots = {p[1] for own in prefixes for p in own if len(p) == 2}
    tree = packed(trajectories, "prefix_tree", (64, 64), final_values=False)
    distinct = len({p[1:] for own in prefixes for p in own})
    assert tree.tokens_computed >= distinct
    if distinct <= 64:
        assert tree.tokens_computed == distinct and tree.rows == 1
        assert (tree.packed_tokens.position[0, :distinct] == 0).sum() == len(roots)
    chains = packed(trajectories, "trajectory", row, final_values=False)
    leaves = sum(sum(not any(len(q) > len(p) and q[: len(p)] == p for q in own) for p in own) for own in prefixes)
    assert (chains.packed_tokens.position[0, : chains.tokens_computed] == 0).sum() == leaves
    assert distinct <= chains.tokens_computed


@quick
@given(batches(contexts=("append",)))
def test_an_append_only_trajectory_is_one_chain(trajectories):
    packing = packed(trajectories)
    starts = ((packing.packed_tokens.position == 0) & (packing.packed_tokens.subtree_end > np.arange(1, 101))).sum()
    assert starts == len(trajectories)
    last = [t.steps[-1] for t in trajectories]
    whole = [len(s.prompt_ids) + len(s.response_ids) if t.final_prompt_ids is None else len(t.final_prompt_ids)
             for s, t in zip(last, trajectories, strict=True)]  # fmt: skip
    assert packing.tokens_computed == sum(whole)


def test_a_window_opens_a_new_chain_where_the_prompt_does_not_extend_it():
    """Step 1 extends step 0; from step 2 on the oldest turn is gone."""
    made = trajectory(np.random.default_rng(0), [2, 2, 2, 2], context="window")
    packing = packed([made])
    chains = {int(end) for end in np.unique(packing.packed_tokens.subtree_end[packing.packed_tokens.position > 0])}
    assert len(chains) == 3
    first = packing.token_index[:4]
    assert (
        len({int(packing.packed_tokens.subtree_end[r, packing.loss_tokens.logit_index[r, c]]) for r, c in first}) == 1
    )


def of_steps(*steps, uid="test/0/0", final=None):
    """A trajectory of the given (prompt, response) ids."""

    def step(prompt, response):
        ids = (np.array(x, np.int32) for x in (prompt, response))
        return Step(*ids, np.zeros(len(response), np.float32), reward=0.0)

    final = None if final is None else np.array(final, np.int32)
    made = trajectory(np.random.default_rng(0), [1])
    return dataclasses.replace(made, uid=uid, steps=tuple(step(*s) for s in steps), final_prompt_ids=final)


RETRY = of_steps(([1, 2], [3]), ([1, 2], [4, 4]), ([9], [8]), ([1, 2, 3, 4, 5], [6]))
"""A retry from the same prompt; what follows extends the first answer."""


def test_chains_are_as_few_as_the_leaves_of_a_trajectory():
    packing = packed([RETRY])
    assert packing.tokens_computed == 6 + 4 + 2
    np.testing.assert_array_equal(packing.packed_tokens.tokens[0, :12], [1, 2, 3, 4, 5, 6, 1, 2, 4, 4, 9, 8])
    again = packed([of_steps(([1, 2], [3]), ([1, 2], [3, 4]), ([1, 2, 3, 4], [5]))])
    assert again.tokens_computed == 5, "a retry that says the same and more is one chain with it"
    np.testing.assert_array_equal(again.loss_tokens.logit_index[0, :4], [1, 1, 2, 3])


def test_a_tree_is_laid_out_depth_first():
    packing = packed([RETRY, of_steps(([1, 2], [4, 4]), uid="test/0/1")], "prefix_tree", (64, 40))
    np.testing.assert_array_equal(packing.packed_tokens.tokens[0, :10], [1, 2, 3, 4, 5, 6, 4, 4, 9, 8])
    np.testing.assert_array_equal(packing.packed_tokens.position[0, :10], [0, 1, 2, 3, 4, 5, 2, 3, 0, 1])
    np.testing.assert_array_equal(packing.packed_tokens.subtree_end[0, :10], [8, 8, 6, 6, 6, 6, 8, 8, 10, 10])
    logit_index = [packing.loss_tokens.logit_index[0, c] for _, c in packing.token_index]
    assert logit_index == [1, 1, 6, 8, 4, 1, 6], "equal answers of two samples are two loss tokens of one position each"


def test_what_exceeds_a_row_is_cut_and_its_prefix_repeated_without_loss_tokens():
    samples = [of_steps((range(8), [10 + i] * 4), uid=f"test/0/{i}") for i in range(4)]
    packing = packed(samples, "prefix_tree", (16, 40))
    np.testing.assert_array_equal(packing.packed_tokens.tokens[:, :8], [range(8)] * 2)
    assert packing.rows == 2 and packing.tokens_computed == 2 * 16 and packing.sharing == 48 / 32
    assert packing.loss_tokens.is_action.sum() == 16
    long = of_steps(([1, 2], [3, 4]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6], [7, 8]))
    cut = packed([long], "trajectory", (10, 4))
    np.testing.assert_array_equal(cut.packed_tokens.tokens[:, :8], [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 0, 0]])
    np.testing.assert_array_equal(cut.loss_tokens.is_action.sum(1), [2, 4])


def test_padded_rows_hold_one_step_each():
    packing = packed(fixed_batch("append"), "per_step_padded")
    assert packing.rows == sum(len(t.steps) + (t.final_prompt_ids is not None) for t in fixed_batch("append"))
    assert (packing.packed_tokens.position[:, 0] == 0).all() and (
        (packing.packed_tokens.position == 0).sum(1) > 1
    ).all()


def test_a_prefix_too_short_to_matter_does_not_tie_trees_together():
    """Rows fill better where first-fit may place each by itself; here 1 token of 128 is shared."""
    sizes = (80, 90, 48, 38)
    made = [of_steps(([1], [2 + i] * (n - 1)), uid=f"test/0/{i}") for i, n in enumerate(sizes)]
    assert packed(made, "prefix_tree", (128, 128)).rows == 2
    assert packed(made, "prefix_tree", (128, 128)).tokens_computed == sum(sizes)


@quick
@given(batches(), st.sampled_from(("trajectory", "prefix_tree")))
def test_the_order_of_trajectories_does_not_matter(trajectories, mode):
    one, other = packed(trajectories, mode), packed(trajectories[::-1], mode)
    assert (one.rows, one.tokens_computed) == (other.rows, other.tokens_computed)


@quick
@given(batches(), modes)
def test_gather_undoes_scatter(trajectories, mode):
    packing = packed(trajectories, mode)
    per_token = np.random.default_rng(0).normal(size=len(packing.token_index)).astype(np.float32)
    scattered = scatter(packing, per_token)
    np.testing.assert_array_equal(gather(packing, scattered), per_token)
    assert np.count_nonzero(scattered) == len(per_token)
    per_cell = (
        np.arange(packing.loss_tokens.logit_index.size, dtype=np.float32).reshape(packing.loss_tokens.logit_index.shape)
        + 1
    )
    final = gather_final(packing, per_cell)
    expected = [per_cell[r, c] if r >= 0 else 0 for r, c in packing.final_index]
    np.testing.assert_array_equal(final, expected)


def test_fault_1_trained_ids_are_the_sampled_ids():
    trajectories = fixed_batch("mixed")
    for mode in PACKING_MODES:
        packing = packed(trajectories, mode)
        sampled = np.concatenate([s.response_ids for t in trajectories for s in t.steps])
        np.testing.assert_array_equal(gather(packing, packing.loss_tokens.target), sampled)


def test_fault_8_a_batch_is_padded_with_rows_of_no_weight():
    packing = packed(fixed_batch("window"), row=(LONGEST, 20))
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


def test_no_trajectories_make_no_rows():
    packing = packed([])
    assert packing.rows == 0 and packing.token_index.shape == packing.final_index.shape == (0, 2)
    assert not to_microbatches(
        packing.packed_tokens, packing.loss_tokens, microbatches=1, rows=2
    ).loss_tokens.is_action.any()


def change(**changes):
    made = trajectory(np.random.default_rng(0), [2, 2], cut="steps")
    return dataclasses.replace(made, steps=(made.steps[0], dataclasses.replace(made.steps[1], **changes)))


NONE = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (change(response_ids=NONE, logprobs=NONE), {}, "trajectory test/0/0: .*drop it first"),
        (change(prompt_ids=NONE), {}, "trajectory test/0/0: .*drop it first"),
        (change(logprobs=np.float32([-1, -np.inf])), {}, "test/0/0: step 1 has a log-prob that is not finite"),
        (dataclasses.replace(change(), steps=()), {}, "trajectory test/0/0: .*drop it first"),
        (dataclasses.replace(change(), final_prompt_ids=NONE), {}, "test/0/0: final_prompt_ids has 0 tokens"),
        (
            change(),
            {"row_tokens": 4},
            r"test/0/0: step \d has \d+ tokens with 2 loss tokens, which do not fit a row of 4",
        ),
        (change(), {"row_loss_tokens": 1}, r"raise learner.row_tokens or learner.row_loss_tokens"),
        (
            dataclasses.replace(change(), final_prompt_ids=np.zeros(65, np.int32)),
            {},
            r"final_prompt_ids has 65 tokens; .* learner.row_tokens \(64\)",
        ),
    ],
)
def test_what_cannot_be_packed_is_an_error(made, options, message):
    config = PackingConfig(**{"mode": "trajectory", "row_tokens": 64, "row_loss_tokens": 32, "rows": 1} | options)
    with pytest.raises(ValueError, match=message):
        pack([made], config, final_values=True)


def test_more_rows_than_microbatches_hold_is_an_error():
    packing = packed(fixed_batch("rewrite"), "per_step", row=(LONGEST, 20))
    with pytest.raises(ValueError, match=r"rows exceed the 1 microbatches of 1 rows"):
        to_microbatches(packing.packed_tokens, packing.loss_tokens, microbatches=1, rows=1)

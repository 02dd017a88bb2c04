"""Packing: every sampled token is one read with its own numbers, whatever the context rule; rows keep their limits."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from builders import LONGEST, batches, fixed_batch, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.learner.batch import CRITIC, to_microbatches
from agentr1_jax.learner.fill import fill, gather_final, gather_tokens, place
from agentr1_jax.learner.packing import MODES, pack
from agentr1_jax.trajectory import Step

quick = settings(max_examples=60, deadline=None)
modes = st.sampled_from(MODES)
rows = st.tuples(st.sampled_from((LONGEST, LONGEST + 7, 100)), st.sampled_from((20, 33)))


def packed(trajectories, mode="chains", row=(100, 40), final_reads=True):
    return pack(trajectories, mode=mode, row_tokens=row[0], row_reads=row[1], final_reads=final_reads)


def context_of(nodes, row, node):
    """The ids that node sees, by the rule of `subtree_end`, itself included; and their positions."""
    seen = [j for j in range(node + 1) if node < nodes.subtree_end[row, j]]
    return nodes.tokens[row, seen], nodes.position[row, seen]


def samples(trajectories):
    """(trajectory index, step index, step, k) of each sampled token in stream order."""
    steps = [(i, s) for i, t in enumerate(trajectories) for s in t.steps]
    return [(i, n, s, k) for n, (i, s) in enumerate(steps) for k in range(len(s.response_ids))]


@quick
@given(batches(), modes, rows, st.booleans())
def test_every_sampled_token_is_one_read_that_sees_its_own_context(trajectories, mode, row, final_reads):
    packing = packed(trajectories, mode, row, final_reads)
    reads, stream = packing.reads, samples(trajectories)
    assert len(packing.token_read) == len(stream) == reads.is_action.sum()
    assert len({tuple(cell) for cell in packing.token_read.tolist()}) == len(stream)
    for (i, n, step, k), (r, column) in zip(stream, packing.token_read, strict=True):
        seen, position = context_of(packing.nodes, r, reads.src[r, column])
        np.testing.assert_array_equal(seen, np.concatenate([step.prompt_ids, step.response_ids[:k]]))
        np.testing.assert_array_equal(position, np.arange(len(seen)))
        assert reads.target[r, column] == step.response_ids[k]
        assert reads.old_logprob[r, column] == step.logprobs[k]
        assert reads.is_action[r, column]
        unit = reads.step[r, column], reads.trajectory[r, column], reads.group[r, column]
        assert unit == (n, i, trajectories[i].group)


@quick
@given(batches(), modes, rows)
def test_the_value_of_a_cut_trajectory_is_read_at_the_end_of_its_final_prompt(trajectories, mode, row):
    packing = packed(trajectories, mode, row)
    for t, (r, column) in zip(trajectories, packing.final_read, strict=True):
        assert (r >= 0) == (t.final_prompt_ids is not None)
        if r >= 0:
            seen, _ = context_of(packing.nodes, r, packing.reads.src[r, column])
            np.testing.assert_array_equal(seen, t.final_prompt_ids)
            assert not packing.reads.is_action[r, column]
    cells = [tuple(c) for c in [*packing.token_read.tolist(), *packing.final_read.tolist()] if c[0] >= 0]
    assert len(set(cells)) == len(cells), "two reads share a cell"
    assert (packed(trajectories, mode, row, final_reads=False).final_read == -1).all()


@quick
@given(batches(), modes, rows)
def test_rows_keep_their_limits_and_padding_has_no_part(trajectories, mode, row):
    packing = packed(trajectories, mode, row)
    nodes, reads = packing.nodes, packing.reads
    assert nodes.tokens.shape == (packing.rows, row[0]) and reads.src.shape == (packing.rows, row[1])
    assert (reads.src >= 0).all() and (reads.src < row[0]).all()
    index = np.arange(row[0])
    assert (nodes.subtree_end > index).all() and (nodes.subtree_end <= row[0]).all()
    used = (nodes.subtree_end > index + 1) | (nodes.position > 0)  # Segments have two nodes or more here.
    assert used.sum() == packing.tokens_computed == round(packing.fill * nodes.tokens.size)
    assert (np.diff(used.astype(int), axis=1) <= 0).all(), "padding comes last"
    padding = ~reads.is_action
    assert (reads.step[padding] == -1).all() and (reads.trajectory[padding] == -1).all()
    assert not reads.weight.any() and not reads.advantage.any()
    filled = fill(packing, {"weight": np.ones(len(packing.token_read))})
    assert not filled.weight[padding].any() and filled.weight[~padding].all()


@quick
@given(batches(), modes)
def test_stored_and_computed_tokens_are_counted(trajectories, mode):
    packing = packed(trajectories, mode, final_reads=False)
    stored = sum(len(s.prompt_ids) + len(s.response_ids) for t in trajectories for s in t.steps)
    assert packing.tokens_stored == stored
    if mode in ("padded", "steps"):
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
    tree = packed(trajectories, "tree", (64, 64), final_reads=False)
    distinct = len({p[1:] for own in prefixes for p in own})
    assert tree.tokens_computed >= distinct
    if distinct <= 64:
        assert tree.tokens_computed == distinct and tree.rows == 1
        assert (tree.nodes.position[0, :distinct] == 0).sum() == len(roots)
    chains = packed(trajectories, "chains", row, final_reads=False)
    leaves = sum(sum(not any(len(q) > len(p) and q[: len(p)] == p for q in own) for p in own) for own in prefixes)
    assert (chains.nodes.position[0, : chains.tokens_computed] == 0).sum() == leaves
    assert distinct <= chains.tokens_computed


@quick
@given(batches(contexts=("append",)))
def test_an_append_only_trajectory_is_one_chain(trajectories):
    packing = packed(trajectories)
    starts = ((packing.nodes.position == 0) & (packing.nodes.subtree_end > np.arange(1, 101))).sum()
    assert starts == len(trajectories)
    last = [t.steps[-1] for t in trajectories]
    whole = [len(s.prompt_ids) + len(s.response_ids) if t.final_prompt_ids is None else len(t.final_prompt_ids)
             for s, t in zip(last, trajectories, strict=True)]  # fmt: skip
    assert packing.tokens_computed == sum(whole)


def test_a_window_opens_a_new_chain_where_the_prompt_does_not_extend_it():
    """Step 1 extends step 0; from step 2 on the oldest turn is gone."""
    made = trajectory(np.random.default_rng(0), [2, 2, 2, 2], context="window")
    packing = packed([made])
    chains = {int(end) for end in np.unique(packing.nodes.subtree_end[packing.nodes.position > 0])}
    assert len(chains) == 3
    first = packing.token_read[:4]
    assert len({int(packing.nodes.subtree_end[r, packing.reads.src[r, c]]) for r, c in first}) == 1


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
    np.testing.assert_array_equal(packing.nodes.tokens[0, :12], [1, 2, 3, 4, 5, 6, 1, 2, 4, 4, 9, 8])
    again = packed([of_steps(([1, 2], [3]), ([1, 2], [3, 4]), ([1, 2, 3, 4], [5]))])
    assert again.tokens_computed == 5, "a retry that says the same and more is one chain with it"
    np.testing.assert_array_equal(again.reads.src[0, :4], [1, 1, 2, 3])


def test_a_tree_is_laid_out_depth_first():
    packing = packed([RETRY, of_steps(([1, 2], [4, 4]), uid="test/0/1")], "tree", (64, 40))
    np.testing.assert_array_equal(packing.nodes.tokens[0, :10], [1, 2, 3, 4, 5, 6, 4, 4, 9, 8])
    np.testing.assert_array_equal(packing.nodes.position[0, :10], [0, 1, 2, 3, 4, 5, 2, 3, 0, 1])
    np.testing.assert_array_equal(packing.nodes.subtree_end[0, :10], [8, 8, 6, 6, 6, 6, 8, 8, 10, 10])
    src = [packing.reads.src[0, c] for _, c in packing.token_read]
    assert src == [1, 1, 6, 8, 4, 1, 6], "equal answers of two samples are two reads of one node each"


def test_what_exceeds_a_row_is_cut_and_its_prefix_repeated_without_reads():
    samples = [of_steps((range(8), [10 + i] * 4), uid=f"test/0/{i}") for i in range(4)]
    packing = packed(samples, "tree", (16, 40))
    np.testing.assert_array_equal(packing.nodes.tokens[:, :8], [range(8)] * 2)
    assert packing.rows == 2 and packing.tokens_computed == 2 * 16 and packing.sharing == 48 / 32
    assert packing.reads.is_action.sum() == 16
    long = of_steps(([1, 2], [3, 4]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6], [7, 8]))
    cut = packed([long], "chains", (10, 4))
    np.testing.assert_array_equal(cut.nodes.tokens[:, :8], [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 0, 0]])
    np.testing.assert_array_equal(cut.reads.is_action.sum(1), [2, 4])


def test_padded_rows_hold_one_step_each():
    packing = packed(fixed_batch("append"), "padded")
    assert packing.rows == sum(len(t.steps) + (t.final_prompt_ids is not None) for t in fixed_batch("append"))
    assert (packing.nodes.position[:, 0] == 0).all() and ((packing.nodes.position == 0).sum(1) > 1).all()


def test_a_prefix_too_short_to_matter_does_not_tie_trees_together():
    """Rows fill better where first-fit may place each by itself; here 1 token of 128 is shared."""
    sizes = (80, 90, 48, 38)
    made = [of_steps(([1], [2 + i] * (n - 1)), uid=f"test/0/{i}") for i, n in enumerate(sizes)]
    assert packed(made, "tree", (128, 128)).rows == 2
    assert packed(made, "tree", (128, 128)).tokens_computed == sum(sizes)


@quick
@given(batches(), st.sampled_from(("chains", "tree")))
def test_the_order_of_trajectories_does_not_matter(trajectories, mode):
    one, other = packed(trajectories, mode), packed(trajectories[::-1], mode)
    assert (one.rows, one.tokens_computed) == (other.rows, other.tokens_computed)


@quick
@given(batches(), modes)
def test_gathering_undoes_placing(trajectories, mode):
    packing = packed(trajectories, mode)
    per_token = np.random.default_rng(0).normal(size=len(packing.token_read)).astype(np.float32)
    placed = place(packing, per_token)
    np.testing.assert_array_equal(gather_tokens(packing, placed), per_token)
    assert np.count_nonzero(placed) == len(per_token)
    per_read = np.arange(packing.reads.src.size, dtype=np.float32).reshape(packing.reads.src.shape) + 1
    final = gather_final(packing, per_read)
    expected = [per_read[r, c] if r >= 0 else 0 for r, c in packing.final_read]
    np.testing.assert_array_equal(final, expected)


def test_fault_1_trained_ids_are_the_sampled_ids():
    trajectories = fixed_batch("mixed")
    for mode in MODES:
        packing = packed(trajectories, mode)
        sampled = np.concatenate([s.response_ids for t in trajectories for s in t.steps])
        np.testing.assert_array_equal(gather_tokens(packing, packing.reads.target), sampled)


def test_fault_8_a_batch_is_padded_with_rows_of_no_weight():
    packing = packed(fixed_batch("window"), row=(LONGEST, 20))
    count = len(packing.token_read)
    ones = np.ones(count, np.float32)
    reads = fill(packing, dict.fromkeys(("advantage", "weight", *CRITIC), ones))
    batch = to_microbatches(packing.nodes, reads, microbatches=4, rows=4)
    assert all(x.shape[:2] == (4, 4) for x in jax.tree.leaves(batch))
    for name in ("tokens", "position", "subtree_end"):
        flat = getattr(batch.nodes, name).reshape(16, -1)
        np.testing.assert_array_equal(flat[: packing.rows], getattr(packing.nodes, name))
    assert batch.reads.weight.sum() == batch.reads.value_weight.sum() == count
    padding = batch.reads.weight.reshape(16, -1)[packing.rows :]
    assert len(padding) and not padding.any() and not batch.reads.is_action.reshape(16, -1)[packing.rows :].any()


def test_no_trajectories_make_no_rows():
    packing = packed([])
    assert packing.rows == 0 and packing.token_read.shape == packing.final_read.shape == (0, 2)
    assert not to_microbatches(packing.nodes, packing.reads, microbatches=1, rows=2).reads.is_action.any()


def change(**changes):
    made = trajectory(np.random.default_rng(0), [2, 2], cut="steps")
    return dataclasses.replace(made, steps=(made.steps[0], dataclasses.replace(made.steps[1], **changes)))


NONE = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (change(), {"mode": "trees"}, "unknown packing mode 'trees'; choose one of padded, steps, chains, tree"),
        (change(response_ids=NONE, logprobs=NONE), {}, "trajectory test/0/0: .*drop it first"),
        (change(prompt_ids=NONE), {}, "trajectory test/0/0: .*drop it first"),
        (change(logprobs=np.float32([-1, -np.inf])), {}, "test/0/0: step 1 has a log-prob that is not finite"),
        (dataclasses.replace(change(), steps=()), {}, "trajectory test/0/0: .*drop it first"),
        (dataclasses.replace(change(), final_prompt_ids=NONE), {}, "test/0/0: final_prompt_ids has 0 tokens"),
        (change(), {"row_tokens": 4}, r"test/0/0: step \d has \d+ tokens with 2 reads, which do not fit a row of 4"),
        (change(), {"row_reads": 1}, r"raise learner.row_tokens or learner.row_reads"),
        (
            dataclasses.replace(change(), final_prompt_ids=np.zeros(65, np.int32)),
            {},
            r"final_prompt_ids has 65 tokens; .* learner.row_tokens \(64\)",
        ),
    ],
)
def test_what_cannot_be_packed_is_an_error(made, options, message):
    options = {"mode": "chains", "row_tokens": 64, "row_reads": 32, "final_reads": True} | options
    with pytest.raises(ValueError, match=message):
        pack([made], **options)


def test_more_rows_than_microbatches_hold_is_an_error():
    packing = packed(fixed_batch("rewrite"), "steps", row=(LONGEST, 20))
    with pytest.raises(ValueError, match=r"rows exceed the 1 microbatches of 1 rows"):
        to_microbatches(packing.nodes, packing.reads, microbatches=1, rows=1)

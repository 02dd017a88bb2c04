"""Splash attention equals dense attention over ancestors, on chains and on trees, and compiles for a TPU."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentr1_jax.policy.attention import grouped_attention
from agentr1_jax.policy.sharding import ROWS, over_rows
from agentr1_jax.policy.splash import _block_sizes, splash_attention
from agentr1_jax.runtime.mesh import AXES
from experiments import topology

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu")
LENGTH = 384  # Three blocks of 128.


def subtree_ends(runs, length):
    """Where the subtree of each token ends, of a forest laid out depth first.

    Args:
      runs: (closed, tokens) each: a chain of tokens below the last token of the run before, or, where runs are closed
        first, below that of an earlier one; below none where all are closed.
      length: of the row; what the runs leave is padding, each token of which sees itself alone.
    """
    ends = np.arange(1, length + 1)
    open_runs, filled = [], 0
    for closed, tokens in [*runs, (length, 0)]:
        for _ in range(min(closed, len(open_runs))):
            start, stop = open_runs.pop()
            ends[start:stop] = filled
        open_runs.append((filled, min(filled + tokens, length)))
        filled = open_runs[-1][1]
    return ends.astype(np.int32)


CHAINS = [[(9, 100), (9, 80), (9, 204)], [(9, 60), (9, 140), (9, 10)]]  # The second row ends in a block of padding.
TREES = [
    [(9, 30), (0, 20), (1, 150), (0, 40), (1, 70), (2, 60)],  # A prompt, a branch, a longer one that branches again.
    [(9, 5), (9, 140), (0, 1), (1, 90)],  # The first block has a root that the others do not see; padding.
]


def ends_of(rows, length=LENGTH):
    return np.stack([subtree_ends(runs, length) for runs in rows])


@functools.cache
def inputs(heads, kv_heads):
    """Query, key, value of two rows, and a weight for each entry of the output."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, LENGTH, n, 64)).astype(np.float32) for n in (heads, kv_heads, kv_heads, heads)]


def dense(query, key, value, ends):
    index = jnp.arange(query.shape[1])
    visible = (index[None, None, :] <= index[None, :, None]) & (index[None, :, None] < ends[:, None, :])
    return grouped_attention(query, key, value, visible)


@functools.cache
def compiled(kind, mesh_shape=None):
    """Output and gradients of dense attention, or of splash for chains or trees, in one program."""
    mesh = tiny.mesh(*mesh_shape) if mesh_shape else None

    def loss(query, key, value, weight, ends):
        with jax.default_matmul_precision("highest"):
            if kind == "dense":
                out = dense(query, key, value, ends)
            else:
                rows = functools.partial(splash_attention, mesh=mesh, tree=kind == "trees", interpret=True)
                out = over_rows(rows, mesh, (P(ROWS),) * 4, P(ROWS))(query, key, value, ends)
        return (out * weight).sum(), out

    def run(query, key, value, weight, ends):
        grads, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value, weight, ends)
        return out, grads

    return jax.jit(run)


def assert_equals_dense(kind, ends, heads=(4, 2), mesh_shape=None):
    out, grads = compiled(kind, mesh_shape)(*inputs(*heads), ends)
    expected, expected_grads = compiled("dense")(*inputs(*heads), ends)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, atol=1e-4)
    return [np.abs(grad).max() for grad in expected_grads]


def test_subtree_ends_of_a_small_forest():
    runs = [(9, 2), (0, 1), (1, 1), (0, 1), (2, 1), (9, 1)]
    assert subtree_ends(runs, 9).tolist() == [6, 6, 3, 5, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("kind", "rows", "heads"),
    [("chains", CHAINS, (4, 2)), ("trees", CHAINS, (4, 2)), ("trees", TREES, (4, 2)), ("trees", TREES, (2, 2))],
)
def test_output_and_gradient_equal_dense_attention(kind, rows, heads):
    assert min(assert_equals_dense(kind, ends_of(rows), heads)) > 0.1


RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 160)), max_size=8)


@settings(max_examples=10)
@given(first=RUNS, second=RUNS)
@example(first=[], second=[(0, LENGTH)])
def test_any_forest_equals_dense_attention(first, second):
    assert_equals_dense("trees", ends_of([first, second]))


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 4)])  # Of 2 key heads on 2 devices, and on 4.
def test_trees_over_devices_equal_dense_attention(shape):
    assert_equals_dense("trees", ends_of(TREES), mesh_shape=shape)


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_blocks_that_nobody_sees_are_not_computed(kind):
    """A NaN times a weight of 0 would show."""
    query, key, value, weight = inputs(4, 2)
    value = value.copy()
    value[:, :128] = np.nan
    ends = ends_of([[(9, 128), (9, 200)]] * 2)
    out, _ = compiled(kind)(query, key, value, weight, ends)
    assert np.isnan(out[:, :128]).all()
    assert np.isfinite(out[:, 128:]).all()


CHAIN_RUNS = st.lists(st.tuples(st.just(9), st.integers(1, 300)), max_size=8)


@settings(max_examples=10)
@given(first=CHAIN_RUNS, second=CHAIN_RUNS)
@example(first=[], second=[(0, LENGTH)])
def test_what_is_skipped_changes_no_bit(first, second):
    """Against the kernel as it comes, which compares the segments of every block below the diagonal."""
    ends, (query, key, value, weight) = ends_of([first, second]), inputs(4, 2)

    @jax.jit
    def whole(query, key, value):
        mask = splash.MultiHeadMask([splash.CausalMask((LENGTH, LENGTH))] * 4)
        kernel = splash.make_splash_mha(
            mask, block_sizes=_block_sizes(LENGTH), head_shards=1, q_seq_shards=1, interpret=True
        )
        first = [jnp.swapaxes(x, 1, 2) for x in (query, key, value)]
        out = jax.lax.map(lambda x: kernel(*x[:3], splash.SegmentIds(x[3], x[3])), (*first, ends))
        return jnp.swapaxes(out, 1, 2)

    with jax.default_matmul_precision("highest"):
        expected, pull = jax.vjp(whole, query, key, value)
    out, grads = compiled("chains")(query, key, value, weight, ends)
    np.testing.assert_array_equal(out, expected)
    for grad, expected_grad in zip(grads, pull(weight), strict=True):
        np.testing.assert_array_equal(grad, expected_grad)


@pytest.mark.parametrize("tree", [False, True])
def test_a_row_of_no_whole_blocks_is_refused(tree):
    query, key, value, _ = (jnp.asarray(x[:, :200]) for x in inputs(4, 2))
    with pytest.raises(ValueError, match="rows of a multiple of 128 tokens, not 200"):
        splash_attention(query, key, value, jnp.full((2, 200), 200), None, tree=tree, interpret=True)


def tpu_temporaries(length, tree, dtype=jnp.bfloat16, head_dim=128):
    """Bytes of temporaries on each chip of a v5e slice: 4 rows of 16 query and 2 key heads, forward and backward."""
    devices = np.array(topology.devices("v5e:4x4"))
    mesh = Mesh(devices.reshape(-1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    sharding = NamedSharding(mesh, P(ROWS))

    def shape(*tail, dtype=dtype):
        return jax.ShapeDtypeStruct((4 * devices.size, length, *tail), dtype, sharding=sharding)

    attention = over_rows(lambda *x: splash_attention(*x, mesh, tree=tree), mesh, (P(ROWS),) * 4, P(ROWS))

    def loss(query, key, value, ends):
        return attention(query, key, value, ends).astype(jnp.float32).sum()

    arrays = [shape(heads, head_dim) for heads in (16, 2, 2)]
    with topology.no_compile_cache():
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays, shape(dtype=jnp.int32))
        return lowered.compile().memory_analysis().temp_size_in_bytes


@needs_libtpu
@pytest.mark.slow
def test_trees_cost_the_masks_of_one_row_on_a_tpu():
    """Less than three masks of 4 bytes a pair of tokens above chains, which have none; dense scores would be 64."""
    length = 8192
    assert tpu_temporaries(length, tree=True) - tpu_temporaries(length, tree=False) < 3 * 4 * length**2


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "head_dim", "dtype"), [(False, 64, jnp.bfloat16), (True, 64, jnp.bfloat16), (True, 128, jnp.float32)]
)
def test_it_compiles_for_a_tpu_in_other_sizes(tree, head_dim, dtype):
    """Chains of bfloat16 with heads of 128 are in the programs of Qwen2.5-3B in tests/runtime/test_dry_run.py."""
    assert tpu_temporaries(2048, tree=tree, dtype=dtype, head_dim=head_dim) >= 0

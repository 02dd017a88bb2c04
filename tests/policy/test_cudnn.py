"""Attention of segments by cuDNN: its tables, what is made of its results, and that it compiles for a GPU.

No GPU is here: the kernel itself is stood in for by what JAX documents of it.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentr1_jax.policy import splash
from agentr1_jax.policy.attention import GPU_BLOCK, PackedRows, check_attention, grouped_attention
from agentr1_jax.policy.cudnn import TOKENS_PER_SEGMENT, segment_tables
from agentr1_jax.policy.sharding import ROWS, over_rows
from agentr1_jax.runtime.mesh import AXES
from experiments import topology
from experiments.hlo import parse

LENGTH = 256
LENGTHS = st.lists(st.integers(1, 120), max_size=12)


def ends_of(lengths):
    """Subtree ends of a row of chains of these lengths, as many as fit, and padding."""
    ends, at = np.arange(1, LENGTH + 1), 0
    for length in lengths:
        if at + length <= LENGTH:
            ends[at : at + length] = at + length
            at += length
    return ends.astype(np.int32)


@settings(max_examples=50)
@given(first=LENGTHS, second=LENGTHS)
@example(first=[1, 1, 2, 1], second=[LENGTH - 8, 8])
def test_tables_say_where_segments_begin_and_how_long_they_are(first, second):
    ends = np.stack([ends_of(first), ends_of(second)])
    start, length, alone = map(np.asarray, segment_tables(jnp.asarray(ends), 4))
    for row in range(2):
        begins = [i for i in range(LENGTH) if i == 0 or ends[row, i] != ends[row, i - 1]]
        longer = [i for i in begins if ends[row, i] > i + 1]
        np.testing.assert_array_equal(alone[row], [i in begins and i not in longer for i in range(LENGTH)])
        np.testing.assert_array_equal(start[row], (longer + [-1] * 5)[:5])
        np.testing.assert_array_equal(length[row], ([ends[row, i] - i for i in longer] + [-1] * 4)[:4])


def documented(query, key, value, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
    """Causal attention within the segments that the tables name; whatever is outside of them is not defined."""
    assert mask_type is cudnn.MaskType.PADDING_CAUSAL and query.shape == key.shape == value.shape
    assert q_offsets.shape == (len(query), q_seqlen.shape[1] + 1) and q_seqlen is kv_seqlen and q_offsets is kv_offsets
    index, start = jnp.arange(query.shape[1]), q_offsets[:, :-1, None]
    inside = (start >= 0) & (index >= start) & (index < start + q_seqlen[..., None])
    same = (inside[:, :, :, None] & inside[:, :, None, :]).any(axis=1)
    out = grouped_attention(scale * query, key, value, same & (index[None, :] <= index[:, None]))
    return jnp.where(inside.any(axis=1)[..., None, None], out, jnp.nan)


@pytest.mark.parametrize(
    "rows",
    [
        [[100, 90, 20], [LENGTH]],
        [[50, 1, 60, 100], [3, 4]],
        [[], [10] * 12],  # More than the tables hold.
    ],
)
def test_rows_of_segments_equal_dense_attention(monkeypatch, rows):
    monkeypatch.setattr(cudnn, "dot_product_attention", documented)
    assert max(map(len, rows)) > LENGTH // TOKENS_PER_SEGMENT or rows[1] != [10] * 12
    ends, rng = jnp.asarray(np.stack([ends_of(row) for row in rows])), np.random.default_rng(0)
    inputs = [jnp.asarray(rng.normal(size=(2, LENGTH, n, 16)), jnp.float32) for n in (4, 2, 2)]
    mix = jnp.asarray(rng.normal(size=inputs[0].shape), jnp.float32)

    def run(implementation):
        def loss(*inputs):
            out = PackedRows(ends, implementation).attend(*inputs, jnp.int32(0), None)[0]
            return (out * mix).sum(), out

        grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
        return [out, *grads]

    for found, expected in zip(run("cudnn"), run("dense"), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_kernel_that_is_wrong_on_these_devices_is_refused(monkeypatch, factor):
    right = splash.splash_attention
    monkeypatch.setattr(splash, "splash_attention", lambda *x, tree: factor * right(*x, tree=tree, interpret=True))
    monkeypatch.setattr("agentr1_jax.policy.attention._fault", lambda *_: None)
    policy, mesh = dataclasses.replace(tiny.POLICY, attention="splash", head_dim=64), tiny.mesh(2, 2, 2)
    if factor == 1:
        check_attention(policy, mesh, 256, "trajectory")
    else:
        with pytest.raises(ValueError, match=r"attention=splash on .* is off by 10\.\d% from policy.attention=xla"):
            check_attention(policy, mesh, 256, "trajectory")


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is None, reason="no CUDA compiler")
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
def test_it_compiles_for_a_gpu(implementation):
    """By cuDNN one kernel forward and one backward; by blocks a loop over pairs of blocks."""
    devices = np.array(topology.devices("h200"))
    mesh = Mesh(devices.reshape(-1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)

    def shape(*tail, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, 4096, *tail), dtype, sharding=NamedSharding(mesh, P(ROWS)))

    def attend(query, key, value, ends):
        return PackedRows(ends, implementation, mesh).attend(query, key, value, jnp.int32(0), None)[0]

    def loss(*inputs):
        return over_rows(attend, mesh, (P(ROWS),) * 4, P(ROWS))(*inputs).astype(jnp.float32).sum()

    arrays = [shape(16, 128), shape(2, 128), shape(2, 128), shape(dtype=jnp.int32)]
    with topology.no_compile_cache():
        text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile().as_text()
    assert text.count("__cudnn$fmha") >= (2 if implementation == "cudnn" else 0)
    assert parse(text).untold_loops and GPU_BLOCK == 512

"""Attention in blocks equals attention to all tokens, and computes only the blocks that somebody sees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from agentr1_jax.policy import sharding
from agentr1_jax.policy.attention import blockwise_attention, grouped_attention, visible_blocks
from agentr1_jax.policy.sharding import on_shards, over_rows
from agentr1_jax.runtime.mesh import learner_mesh

ROWS, LENGTH, HEADS, KV_HEADS, DIM = 2, 22, 4, 2, 6


def forest_ends(rng, length):
    """`subtree_end` of a random forest, laid out depth first, with padding behind it."""
    used = rng.integers(0, length + 1)
    end, open_ends = np.arange(1, length + 1), []
    for i in range(used):
        open_ends = [e for e in open_ends if e > i]
        last = min([*open_ends[-1:], used])
        end[i] = rng.integers(i + 1, last + 1)
        open_ends.append(end[i])
    return end


def visibility(ends):
    index = np.arange(ends.shape[1])
    return (index[None, :] <= index[:, None])[None] & (index[None, :, None] < ends[:, None, :])


@functools.cache
def gradients(block):
    """(inputs, ends, mix) -> output and gradients, of the blocks and of all scores; compiled."""

    def dense(query, key, value, ends):
        index = jnp.arange(LENGTH)
        visible = (index[None, None, :] <= index[None, :, None]) & (index[None, :, None] < ends[:, None, :])
        return grouped_attention(query, key, value, visible)

    def both(inputs, ends, mix):
        def of(attention):
            def loss(*inputs):
                out = attention(*inputs, ends)
                return jnp.sum(out * mix), out

            return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)

        return of(functools.partial(blockwise_attention, block=block)), of(dense)

    return jax.jit(both)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), block=st.sampled_from((4, 8, 64)))
def test_blocks_give_the_attention_of_all_scores_and_its_gradient(seed, block):
    rng = np.random.default_rng(seed)
    ends = np.stack([forest_ends(rng, LENGTH) for _ in range(ROWS)])
    with jax.enable_x64(True):
        inputs = [jnp.asarray(rng.normal(size=(ROWS, LENGTH, h, DIM))) for h in (HEADS, KV_HEADS, KV_HEADS)]
        mix = jnp.asarray(rng.normal(size=(ROWS, LENGTH, HEADS, DIM)))
        got, expected = gradients(block)(inputs, jnp.asarray(ends), mix)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), got, expected)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_blocks_computed_are_those_that_somebody_sees(seed):
    rng, block = np.random.default_rng(seed), 4
    length = 24
    ends = np.stack([forest_ends(rng, length) for _ in range(ROWS)])
    order, count = (np.asarray(x) for x in visible_blocks(jnp.asarray(ends).reshape(-1, block), length // block))
    seen = visibility(ends).reshape(ROWS, length // block, block, length // block, block).any(axis=(2, 4))
    for n, blocks in enumerate(seen.reshape(-1, length // block)):
        own = n % (length // block)
        assert order[n, 0] == own and sorted(order[n, : count[n]]) == np.flatnonzero(blocks).tolist()


def test_segments_and_branches_cost_what_is_attended():
    """Four segments of a row cost a quarter of its pairs; branches of a tree do not see each other."""
    length, block = 64, 4
    blocks = length // block

    def pairs(ends):
        return int(visible_blocks(jnp.asarray(ends).reshape(-1, block), blocks)[1].sum())

    assert pairs(np.full(length, length)) == blocks * (blocks + 1) // 2
    assert pairs(np.repeat([16, 32, 48, 64], 16)) == 4 * 4 * 5 // 2
    tree = np.concatenate([np.full(32, length), np.repeat([40, 48, 56, 64], 8)])
    assert pairs(tree) == 8 * 9 // 2 + 8 * 8 + 4 * 3
    assert pairs(np.arange(1, length + 1)) == blocks


def test_sums_of_half_precision_are_float32():
    rng = np.random.default_rng(3)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 96, 1, 64)), jnp.bfloat16) for _ in range(3))
    ends = jnp.full((1, 96), 96)
    mixed = blockwise_attention(query, key, value, ends, block=8)
    assert mixed.dtype == jnp.bfloat16
    wide = blockwise_attention(*(x.astype(jnp.float32) for x in (query, key, value)), ends, block=8)
    np.testing.assert_allclose(mixed.astype(jnp.float32), wide, atol=0.02)


@pytest.mark.parametrize("shape", [(4, 1, 2), (2, 1, 4)])
def test_devices_attend_to_their_own_rows_and_heads(shape):
    """Also two key heads on four devices."""
    rng, mesh = np.random.default_rng(0), learner_mesh(*shape)
    ends = jnp.asarray(np.stack([forest_ends(rng, LENGTH) for _ in range(4)]))
    query, key, value = (jnp.asarray(rng.normal(size=(4, LENGTH, h, DIM)), jnp.float32) for h in (4, 2, 2))
    whole = jax.jit(lambda *x: on_shards(blockwise_attention, *x, None))(query, key, value, ends)
    rows = P(sharding.ROWS)
    by_rows = over_rows(lambda *x: on_shards(blockwise_attention, *x, mesh), mesh, (rows,) * 4, rows)
    dealt = jax.jit(by_rows)(query, key, value, ends)
    np.testing.assert_allclose(dealt, whole, atol=1e-6)


def test_memory_is_linear_in_the_row():
    def temporaries(length):
        shapes = [jax.ShapeDtypeStruct((1, length, h, 8), jnp.float32) for h in (2, 2, 2)]
        ends = jax.ShapeDtypeStruct((1, length), jnp.int32)
        loss = jax.grad(lambda *x: blockwise_attention(*x).sum(), argnums=(0, 1, 2))
        return jax.jit(loss).lower(*shapes, ends).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 5 * temporaries(1024)

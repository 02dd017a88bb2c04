"""Attention of packed rows on TPUs, by JAX's splash kernel (`jax.experimental.pallas.ops.tpu.splash_attention`).

Rows of segments (every packing mode but `prefix_tree`) are causal attention within segments: the kernel compares
segment ids, no mask is stored, and tables made of the segments' ends name the blocks to compute.

In a prefix tree token j is seen by the interval [j, subtree_end[j]), which segment ids cannot express. There the kernel
reads a mask, made anew in every layer for one row at a time and shared by all heads: 4 bytes for each pair of tokens of
one row. Empty blocks of the mask are neither fetched nor computed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from agentr1_jax.policy.sharding import on_shards

BLOCKS = (512, 256, 128)
"""Sides of a block of scores, the best first: every block costs a step of the grid, computed or not."""

RESIDUALS = "splash_residuals"
"""Output and log-sum-exp of a row, which are kept for its backward pass; the mask is made again."""


def splash_attention(
    query: Float[Array, "rows length heads dim"],
    key: Float[Array, "rows length kv_heads dim"],
    value: Float[Array, "rows length kv_heads dim"],
    subtree_end: Int[Array, "rows length"],
    mesh: Mesh | None,
    *,
    tree: bool,
    interpret: bool = False,
) -> Float[Array, "rows length heads dim"]:
    """Return softmax(q·k) v over the ancestors of each token: token i sees token j iff j ≤ i < subtree_end[j].

    Args:
      query, key, value: `length` is a multiple of the last of `BLOCKS`.
      subtree_end: of each token; more than its own index, so that every token sees itself.
      mesh: heads are sharded over its `tensor`, as in `sharding.on_shards`; None for one device.
      tree: False if the tokens of a segment all have one subtree end, as in all packing modes but `prefix_tree`.
      interpret: run the kernel on any backend, slowly, for tests.

    Raises:
      ValueError: no block divides `length`.
    """
    attention = functools.partial(_tree_rows if tree else _segment_rows, interpret=interpret)
    return on_shards(attention, query, key, value, subtree_end, mesh)


def _segment_rows(query: Array, key: Array, value: Array, subtree_end: Array, *, interpret: bool) -> Array:
    """One row after the other, each with its own tables of the blocks that its segments leave."""
    length, heads = query.shape[1:3]
    sizes = _block_sizes(length)
    causal = splash.MultiHeadMask([splash.CausalMask((length, length))] * heads)

    def row(query: Array, key: Array, value: Array, end: Array) -> Array:
        kernel = splash.make_splash_mha(causal, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
        by_query, by_key, visible = block_tables(end, sizes.block_q)
        kernel.fwd_mask_info = kernel.fwd_mask_info._replace(data_next=by_query, block_mask=visible)
        kernel.dq_mask_info = kernel.dq_mask_info._replace(data_next=by_query, block_mask=visible)
        kernel.dkv_mask_info = kernel.dkv_mask_info._replace(data_next=by_key, block_mask=visible)
        return kernel(query, key, value, splash.SegmentIds(end, end))

    out = jax.lax.map(lambda x: row(*x), (*_heads_first(query, key, value), subtree_end))
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def block_tables(
    subtree_end: Int[Array, "length"], side: int
) -> tuple[Int[Array, "1 blocks blocks"], Int[Array, "1 blocks blocks"], Int[Array, "1 blocks blocks"]]:
    """Return which blocks of scores a row of segments needs, and what is fetched for each, as the kernel reads them.

    A row and column of the tables belong to a block of `side` queries and one of `side` keys.

    Args:
      subtree_end: of each token: that of its segment.
      side: divides `length`.

    Returns:
      the block of keys to have where the kernel goes through the keys of each block of queries; the block of queries
      to have where it goes through the queries of each block of keys; 1 where some query sees some key, else 0.
    """
    length = len(subtree_end)
    index = jnp.arange(length)
    begins = jnp.concatenate([jnp.ones(1, bool), subtree_end[1:] != subtree_end[:-1]])
    start = jax.lax.cummax(jnp.where(begins, index, 0))
    first_key, last_query = start[::side] // side, (subtree_end[side - 1 :: side] - 1) // side
    query, key = jnp.arange(length // side)[:, None], jnp.arange(length // side)[None, :]
    visible = (first_key[:, None] <= key) & (key <= query)
    # Where nothing is computed, what comes next is fetched already, or what is there stays.
    by_query = jnp.where(key <= query, jnp.maximum(key, first_key[:, None]), jnp.roll(first_key, -1)[:, None])
    by_key = jnp.clip(query, key, last_query[None, :])
    small = jnp.int8 if length // side <= 127 else jnp.int16
    by_query, by_key, needed = (table[None].astype(small) for table in (by_query, by_key, visible))
    return by_query, by_key, needed


def _tree_rows(query: Array, key: Array, value: Array, subtree_end: Array, *, interpret: bool) -> Array:
    """One row after the other, so that one mask is in memory; `vmap` of such a kernel is a loop anyway."""
    length = query.shape[1]
    index = jnp.arange(length)
    keep = jax.checkpoint_policies.save_only_these_names(RESIDUALS)

    @functools.partial(jax.checkpoint, policy=keep)  # Else the masks of all rows and layers wait for the backward pass.
    def row(query: Array, key: Array, value: Array, end: Array) -> Array:
        visible = (index[None, :] <= index[:, None]) & (index[:, None] < end[None, :])
        kernel = splash.make_splash_mha(
            visible[None],
            block_sizes=_block_sizes(length),
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=RESIDUALS,
            interpret=interpret,
        )
        # Within a traced function it is made an array, and the kernel then asks for its truth (jax 0.10.2 and 0.12.0).
        kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
        return kernel(query, key, value)

    out = jax.lax.map(lambda x: row(*x), (*_heads_first(query, key, value), subtree_end))
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def _heads_first(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """[rows, heads, length, dim] of each."""
    return jnp.swapaxes(query, 1, 2), jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)


def _block_sizes(length: int) -> splash.BlockSizes:
    """The largest blocks that divide a row, the same for the forward kernel and both backward ones."""
    side = next((block for block in BLOCKS if length % block == 0), None)
    if side is None:
        raise ValueError(f"splash attention needs rows of a multiple of {BLOCKS[-1]} tokens, not {length}")
    return splash.BlockSizes(
        block_q=side,
        block_kv=side,
        block_q_dkv=side,
        block_kv_dkv=side,
        block_q_dq=side,
        block_kv_dq=side,
    )

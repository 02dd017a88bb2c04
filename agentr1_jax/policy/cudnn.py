"""Attention of packed rows on GPUs, by cuDNN's fused kernels for sequences that are packed into one: Hopper or newer.

cuDNN is told where the segments of a row begin and how long they are: one kernel forward, one backward, no mask, and
nothing of other segments is computed. JAX has it as an internal function, so that a run tries it at its start
(`attention.check_attention`). Its tables have a fixed size: a row of more segments is computed by blocks instead.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.policy.attention import GPU_BLOCK, blockwise_attention
from agentr1_jax.policy.sharding import on_shards

TOKENS_PER_SEGMENT = 64
"""A row may have one segment for so many tokens. For each the kernel stores a float32 for each token and head."""


def cudnn_attention(
    query: Float[Array, "rows length heads dim"],
    key: Float[Array, "rows length kv_heads dim"],
    value: Float[Array, "rows length kv_heads dim"],
    subtree_end: Int[Array, "rows length"],
    mesh: Mesh | None,
) -> Float[Array, "rows length heads dim"]:
    """Return softmax(q·k) v over the earlier tokens of each token's segment and itself.

    Args:
      query, key, value: float16 or bfloat16.
      subtree_end: of each token: that of its segment.
      mesh: heads are sharded over its `tensor`, as in `sharding.on_shards`; None for one device.

    Raises:
      NotImplementedError, RuntimeError: the GPU, or its cuDNN, cannot do it.
    """
    return on_shards(_segment_rows, query, key, value, subtree_end, mesh)


def _segment_rows(query: Array, key: Array, value: Array, subtree_end: Array) -> Array:
    # It strides over keys as if there were as many heads as of queries (jax 0.10.2).
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    most = max(query.shape[1] // TOKENS_PER_SEGMENT, 2)
    start, length, alone = segment_tables(subtree_end, most)

    def by_kernel(query: Array, key: Array, value: Array) -> Array:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn  # jax.nn has no packed sequences.

        # Nothing is said of tokens outside of all segments: neither their output nor their gradients are used.
        query, key, inside_value = (jnp.where(alone[..., None, None], 0, x) for x in (query, key, value))
        mixed = cudnn.dot_product_attention(
            query,
            key,
            inside_value,
            q_seqlen=length,
            kv_seqlen=length,
            q_offsets=start,
            kv_offsets=start,
            scale=1.0,
            mask_type=cudnn.MaskType.PADDING_CAUSAL,
        )
        return jnp.where(alone[..., None, None], value, mixed)

    def by_blocks(query: Array, key: Array, value: Array) -> Array:
        return blockwise_attention(query, key, value, subtree_end, block=GPU_BLOCK)

    return jax.lax.cond((start[:, most] < 0).all(), by_kernel, by_blocks, query, key, value)


def segment_tables(
    subtree_end: Int[Array, "rows length"], most: int
) -> tuple[Int[Array, "rows starts"], Int[Array, "rows most"], Bool[Array, "rows length"]]:
    """Return where the segments of each row begin, and their lengths, -1 where there is none; and tokens on their own.

    A token on its own, such as padding, is in no segment of the tables. The last column of the first table is -1 where
    a row has no more segments than `most`.
    """
    rows, length = subtree_end.shape
    index = jnp.arange(length)
    begins = jnp.concatenate([jnp.ones((rows, 1), bool), subtree_end[:, 1:] != subtree_end[:, :-1]], axis=1)
    alone = begins & (subtree_end == index + 1)
    find = jax.vmap(lambda found: jnp.nonzero(found, size=most + 1, fill_value=-1)[0])
    start = find(begins & ~alone).astype(jnp.int32)
    end = jnp.take_along_axis(subtree_end, jnp.maximum(start[:, :most], 0), axis=1)
    return start, jnp.where(start[:, :most] >= 0, end - start[:, :most], -1).astype(jnp.int32), alone

"""Grouped-query attention and the memory that a decoder attends to.

The decoder attends to one of two memories. In training (`PackedRows`, here) a token sees its ancestors among the tokens
of its own row. In sampling (`rollout.cache.CacheView`) it sees the KV cache of its slot. Both have the same method, so
that there is one decoder and one set of parameters.
"""

from __future__ import annotations

from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.policy.blockwise import blockwise_attention
from agentr1_jax.policy.sharding import on_shards


class Memory(Protocol):
    """Keys and values that a block attends to."""

    def attend(
        self,
        query: Float[Array, "rows length heads dim"],
        key: Float[Array, "rows length kv_heads dim"],
        value: Float[Array, "rows length kv_heads dim"],
        layer: Int[Array, ""],
        state: Any,
    ) -> tuple[Float[Array, "rows length heads dim"], Any]:
        """Return the attention output, and the state (KV cache) to carry to the next layer."""
        ...


@flax.struct.dataclass
class PackedRows:
    """Ancestor attention over packed rows: token i sees token j iff j ≤ i < subtree_end[j].

    One rule serves all packing modes.

    Attributes:
      subtree_end: of each token.
      implementation: `xla` (visible blocks, on any backend), `dense` (all scores at once, the reference), `splash`
        (TPU, any packing mode but `prefix_tree`: all tokens of a segment have one subtree end, which serves as its
        segment id) or `splash_tree` (TPU, any mode).
      mesh: of the rows; `xla` and `splash` run in a `shard_map` over it.
    """

    subtree_end: Int[Any, "rows length"]
    implementation: str = flax.struct.field(pytree_node=False, default="xla")
    mesh: Mesh | None = flax.struct.field(pytree_node=False, default=None)

    def attend(
        self,
        query: Float[Array, "rows length heads dim"],
        key: Float[Array, "rows length kv_heads dim"],
        value: Float[Array, "rows length kv_heads dim"],
        layer: Int[Array, ""],
        state: Any,
    ) -> tuple[Float[Array, "rows length heads dim"], Any]:
        """See `Memory.attend`."""
        if self.implementation == "xla":
            return on_shards(blockwise_attention, query, key, value, self.subtree_end, self.mesh), state
        if self.implementation in ("splash", "splash_tree"):
            from agentr1_jax.policy.splash import splash_attention  # Pallas is slow to import, and only TPUs need it.

            tree = self.implementation == "splash_tree"
            return splash_attention(query, key, value, self.subtree_end, self.mesh, tree=tree), state
        index = jnp.arange(self.subtree_end.shape[1])
        visible = (index[None, None, :] <= index[None, :, None]) & (index[None, :, None] < self.subtree_end[:, None, :])
        return grouped_attention(query, key, value, visible), state


def grouped_attention(
    query: Float[Array, "rows queries heads dim"],
    key: Float[Array, "rows keys kv_heads dim"],
    value: Float[Array, "rows keys kv_heads dim"],
    visible: Bool[Array, "rows queries keys"],
) -> Float[Array, "rows queries heads dim"]:
    """Return softmax(q·k/√d) v, `heads / kv_heads` query heads to each key head; softmax in float32 or wider."""
    rows, queries, heads, dim = query.shape
    grouped = query.reshape(rows, queries, key.shape[2], heads // key.shape[2], dim)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, preferred_element_type=wide) * dim**-0.5
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, value).reshape(query.shape)

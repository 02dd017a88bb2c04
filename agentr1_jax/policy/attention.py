"""Grouped-query attention, rotary positions, and the memory that a decoder attends to.

The decoder knows two kinds of memory. In training (`PackedRows`, here) a token sees its ancestors among the nodes of
its own row. In sampling (`rollout.cache.CacheView`) it sees the KV cache of its slot. Both answer the same call, so
that there is one decoder and one set of parameters.
"""

from __future__ import annotations

from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Memory(Protocol):
    """What a block attends to."""

    def attend(
        self,
        query: Float[Array, "rows length heads dim"],
        key: Float[Array, "rows length kv_heads dim"],
        value: Float[Array, "rows length kv_heads dim"],
        layer: Int[Array, ""],
        state: Any,
    ) -> tuple[Float[Array, "rows length heads dim"], Any]:
        """Attention output, and the state (KV cache) to carry to the next layer."""
        ...


@flax.struct.dataclass
class PackedRows:
    """Ancestor attention over packed rows: token i sees token j iff j ≤ i < subtree_end[j].

    One rule serves rows of one step, chains of steps and trees of shared prefixes.
    """

    subtree_end: Int[Any, "rows length"]

    def attend(
        self,
        query: Float[Array, "rows length heads dim"],
        key: Float[Array, "rows length kv_heads dim"],
        value: Float[Array, "rows length kv_heads dim"],
        layer: Int[Array, ""],
        state: Any,
    ) -> tuple[Float[Array, "rows length heads dim"], Any]:
        """See `Memory.attend`."""
        index = jnp.arange(self.subtree_end.shape[1])
        visible = (index[None, None, :] <= index[None, :, None]) & (index[None, :, None] < self.subtree_end[:, None, :])
        return grouped_attention(query, key, value, visible), state


def grouped_attention(
    query: Float[Array, "rows queries heads dim"],
    key: Float[Array, "rows keys kv_heads dim"],
    value: Float[Array, "rows keys kv_heads dim"],
    visible: Bool[Array, "rows queries keys"],
) -> Float[Array, "rows queries heads dim"]:
    """softmax(q·k/√d) v, `heads / kv_heads` query heads to each key head; scores and softmax in float32 or wider."""
    rows, queries, heads, dim = query.shape
    grouped = query.reshape(rows, queries, key.shape[2], heads // key.shape[2], dim)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, preferred_element_type=wide) * dim**-0.5
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, value).reshape(query.shape)


def rotate(
    x: Float[Array, "rows length heads dim"], position: Int[Array, "rows length"], theta: float
) -> Float[Array, "rows length heads dim"]:
    """Rotary position embedding (Su et al. 2021) in the half-split layout of Llama and Qwen weights."""
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequency = theta ** (-jnp.arange(half, dtype=wide) / half)
    angle = position[..., None, None].astype(wide) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(wide), x[..., half:].astype(wide)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

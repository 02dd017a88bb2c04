"""The KV cache: one dense array per key and value, kept on the device across the steps of a trajectory.

         length  0 1 2 3 4 5 6 7 8 ...
    slot 0       p p p p r r o o o r r . .      p prompt   r response   o observation
    slot 1       p p p r r r . . x x x . .      x left over from a longer branch: masked, overwritten later

A slot belongs to one trajectory until that ends. Its length is host data: reusing a prefix is setting a length, and
what lies behind it is never seen, since a token at position i attends to positions ≤ i. The whole cache is carried
through the layer scan and written in place at (layer, slot, position).
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentr1_jax.policy.attention import grouped_attention
from agentr1_jax.policy.config import DecoderConfig


@flax.struct.dataclass
class KVCache:
    """Keys and values of all slots."""

    keys: Float[Any, "layers slots length kv_heads dim"]
    values: Float[Any, "layers slots length kv_heads dim"]


def cache_shape(config: DecoderConfig, slots: int, length: int) -> tuple[int, int, int, int, int]:
    """[layers, slots, length, kv_heads, head_dim]."""
    return config.layers, slots, length, config.kv_heads, config.head_dim


def empty_cache(config: DecoderConfig, slots: int, length: int) -> KVCache:
    """A cache of zeros in the policy's compute dtype."""
    shape = cache_shape(config, slots, length)
    return KVCache(keys=jnp.zeros(shape, config.dtype), values=jnp.zeros(shape, config.dtype))


@flax.struct.dataclass
class CacheView:
    """Attention of new tokens to the cache of their slots.

    Attributes:
      slot: slot of each row; None if row i is slot i. An index ≥ slots marks a padding row: nothing is written.
      position: position of each token in its slot; a position ≥ length marks a padding token: nothing is written.
      live: attention reads positions [0, live) only; every position of a real token must be below it.
    """

    slot: Int[Any, "rows"] | None
    position: Int[Any, "rows length"]
    live: int = flax.struct.field(pytree_node=False)

    def attend(
        self,
        query: Float[Array, "rows length heads dim"],
        key: Float[Array, "rows length kv_heads dim"],
        value: Float[Array, "rows length kv_heads dim"],
        layer: Int[Array, ""],
        state: KVCache,
    ) -> tuple[Float[Array, "rows length heads dim"], KVCache]:
        """See `policy.attention.Memory.attend`."""
        rows = jnp.arange(state.keys.shape[1]) if self.slot is None else self.slot
        where = (layer, rows[:, None], self.position)
        keys = state.keys.at[where].set(key, mode="drop", unique_indices=True)
        values = state.values.at[where].set(value, mode="drop", unique_indices=True)
        visible = jnp.arange(self.live)[None, None, :] <= self.position[:, :, None]
        mixed = grouped_attention(query, self._read(keys, layer), self._read(values, layer), visible)
        return mixed, KVCache(keys=keys, values=values)

    def _read(self, cache: Array, layer: Array) -> Array:
        if self.slot is None:
            start = (layer, 0, 0, 0, 0)
            size = (1, cache.shape[1], self.live, *cache.shape[3:])
            return jax.lax.dynamic_slice(cache, start, size)[0]
        return cache[layer, jnp.minimum(self.slot, cache.shape[1] - 1), : self.live]

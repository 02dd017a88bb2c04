"""The KV cache: one dense array per key and value, kept on the device across the steps of a trajectory.

         length  0 1 2 3 4 5 6 7 8 ...
    slot 0       p p p p r r o o o r r . .      p prompt   r response   o observation
    slot 1       p p p r r r . . x x x . .      x left over from a longer branch: masked, overwritten later

A slot belongs to one trajectory until that ends. Its length is host data: reusing a prefix is setting a length, and
what lies behind it is never seen, since a token at position i attends to positions ≤ i. The whole cache is carried
through the layer scan and written in place at (layer, slot, position).
"""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from agentr1_jax.policy.attention import grouped_attention
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.sharding import fit


@flax.struct.dataclass
class KVCache:
    """Keys and values of all slots."""

    keys: Float[Any, "layers slots length cached_heads dim"]
    values: Float[Any, "layers slots length cached_heads dim"]


def cache_shape(config: DecoderConfig, slots: int, length: int, tensor: int) -> tuple[int, int, int, int, int]:
    """[layers, slots, length, cached heads, head_dim].

    Key heads that `tensor` devices cannot share evenly are kept several times, so that each device holds those of its
    own query heads and no other: 2 heads on 4 devices are 4 in the cache, one for each device.
    """
    heads = math.lcm(config.kv_heads, tensor) if config.heads % tensor == 0 else config.kv_heads
    return config.layers, slots, length, heads, config.head_dim


def cache_sharding(config: DecoderConfig, mesh: Mesh) -> NamedSharding:
    """Slots over `data`, cached heads over `tensor`."""
    spec = (None, "data", None, "tensor", None)
    return fit(spec, cache_shape(config, mesh.shape["data"], 1, mesh.shape["tensor"]), mesh)


def empty_cache(config: DecoderConfig, slots: int, length: int, tensor: int) -> KVCache:
    """A cache of zeros in the policy's compute dtype, for heads dealt over so many devices."""
    shape = cache_shape(config, slots, length, tensor)
    return KVCache(keys=jnp.zeros(shape, config.dtype), values=jnp.zeros(shape, config.dtype))


@flax.struct.dataclass
class CacheView:
    """Attention of new tokens to the cache of their slots.

    Attributes:
      slot: slot of each row; None if row i is slot i, of one token each. An index ≥ slots marks a padding row: nothing
        is written.
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
        copies = state.keys.shape[3] // key.shape[2]
        if copies > 1:
            key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
        put = self._put_next if self.slot is None else self._put_rows
        keys, seen_keys = put(state.keys, key, layer)
        values, seen_values = put(state.values, value, layer)
        visible = jnp.arange(self.live)[None, None, :] <= self.position[:, :, None]
        return grouped_attention(query, seen_keys, seen_values, visible), KVCache(keys=keys, values=values)

    def _put_next(self, cache: Array, new: Array, layer: Array) -> tuple[Array, Array]:
        """The cache with one more token in every slot, and its live part."""
        slots = jnp.arange(cache.shape[1])
        cache = cache.at[layer, slots[:, None], self.position].set(new, mode="drop", unique_indices=True)
        size = (1, cache.shape[1], self.live, *cache.shape[3:])
        return cache, jax.lax.dynamic_slice(cache, (layer, 0, 0, 0, 0), size)[0]

    def _put_rows(self, cache: Array, new: Array, layer: Array) -> tuple[Array, Array]:
        """The cache with new tokens in some slots, and the live part of those.

        Row by row, each taken out, changed and put back: one scatter and gather for all rows makes the TPU compiler
        copy the whole cache in every layer, since the two want it in different layouts.
        """
        assert self.slot is not None
        slots = jnp.minimum(self.slot, cache.shape[1] - 1)  # A padding row puts back what it took.

        def put(cache: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            slot, position, new = row
            at = (layer, slot, 0, 0, 0)
            live = jax.lax.dynamic_slice(cache, at, (1, 1, self.live, *cache.shape[3:]))
            live = live.at[0, 0, position].set(new, mode="drop", unique_indices=True)
            return jax.lax.dynamic_update_slice(cache, live, at), live[0, 0]

        return jax.lax.scan(put, cache, (slots, self.position, new))

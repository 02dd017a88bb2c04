"""The KV cache: one dense array per key and value, kept on the device across the steps of a trajectory.

         length  0 1 2 3 4 5 6 7 8 ...
    line 0       p p p p r r o o o r r . .      slot: decoding      p prompt   r response   o observation
    line 1       p p p r r r . . x x x . .      slot: decoding      x left over from a longer branch
    line 2       p p p p r r r r . . . . .      parked: its tool is at work
    line 3       . . . . . . . . . . . . .      spare

A line belongs to one trajectory until that ends. Its length is host data: reusing a prefix is setting a length, and
what lies behind it is never seen, since a token at position i attends to positions ≤ i. The whole cache is carried
through the layer scan and written in place at (layer, line, head, position). Attention goes over it in blocks of
positions, as far as anybody's line reaches and no further.
"""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.sharding import fit

KeyAndValue = tuple[Array, Array]
"""Of new tokens, [rows, cached heads, length, dim] each."""


@flax.struct.dataclass
class KVCache:
    """Keys and values of all lines. A head's positions lie together, which is how attention reads them."""

    keys: Float[Any, "layers lines cached_heads length dim"]
    values: Float[Any, "layers lines cached_heads length dim"]


def cache_shape(config: DecoderConfig, lines: int, length: int, tensor: int) -> tuple[int, int, int, int, int]:
    """[layers, lines, cached heads, length, head_dim].

    Key heads that `tensor` devices cannot share evenly are kept several times, so that each device holds those of its
    own query heads and no other: 2 heads on 4 devices are 4 in the cache, one for each device.
    """
    heads = math.lcm(config.kv_heads, tensor) if config.heads % tensor == 0 else config.kv_heads
    return config.layers, lines, heads, length, config.head_dim


def cache_sharding(config: DecoderConfig, mesh: Mesh) -> NamedSharding:
    """Lines over `data`, cached heads over `tensor`."""
    spec = (None, "data", "tensor", None, None)
    return fit(spec, cache_shape(config, mesh.shape["data"], 1, mesh.shape["tensor"]), mesh)


def empty_cache(config: DecoderConfig, lines: int, length: int, tensor: int) -> KVCache:
    """A cache of zeros in the policy's compute dtype, for heads dealt over so many devices."""
    shape = cache_shape(config, lines, length, tensor)
    return KVCache(keys=jnp.zeros(shape, config.dtype), values=jnp.zeros(shape, config.dtype))


@flax.struct.dataclass
class CacheView:
    """Attention of new tokens to the cache of their lines.

    Attributes:
      line: line of each row; None if row i is line i, of one token each.
      position: position of each token in its line. With `line` they are consecutive, and all within the length; without
        it a position ≥ length marks an idle row: nothing is written.
      block: positions that attention reads at once; divides the length.
      together: lines that attention reads at once, as far as the longest of them reaches; divides the rows where there
        is no `line`.
    """

    line: Int[Any, "rows"] | None
    position: Int[Any, "rows length"]
    block: int = flax.struct.field(pytree_node=False)
    together: int = flax.struct.field(pytree_node=False, default=1)

    def attend(
        self,
        query: Float[Array, "rows length heads dim"],
        key: Float[Array, "rows length kv_heads dim"],
        value: Float[Array, "rows length kv_heads dim"],
        layer: Int[Array, ""],
        state: KVCache,
    ) -> tuple[Float[Array, "rows length heads dim"], KVCache]:
        """See `policy.attention.Memory.attend`."""
        copies = state.keys.shape[2] // key.shape[2]
        key, value = (jnp.repeat(jnp.swapaxes(x, 1, 2), copies, axis=1) for x in (key, value))
        attend = self._attend_next if self.line is None else self._attend_rows
        return attend(query, (key, value), layer, state)

    def _attend_next(self, query: Array, new: KeyAndValue, layer: Array, cache: KVCache) -> tuple[Array, KVCache]:
        """One more token in each of the first lines."""
        rows, heads, _, _ = new[0].shape
        at = layer, jnp.arange(rows)[:, None], jnp.arange(heads), self.position
        keys, values = (
            x.at[at].set(y[:, :, 0], mode="drop", unique_indices=True)
            for x, y in zip((cache.keys, cache.values), new, strict=True)
        )
        cache = KVCache(keys=keys, values=values)
        reach = jnp.where(self.position < cache.keys.shape[3], self.position + 1, 1)

        def group(_: None, group: tuple[Array, Array, Array, Array]) -> tuple[None, Array]:
            first, query, position, reach = group
            return None, self._by_blocks(query, position, cache, layer, first, reach.max())

        def split(x: Array) -> Array:
            return x.reshape(-1, self.together, *x.shape[1:])

        firsts = jnp.arange(0, rows, self.together)
        _, mixed = jax.lax.scan(group, None, (firsts, split(query), split(self.position), split(reach)))
        return mixed.reshape(query.shape), cache

    def _attend_rows(self, query: Array, new: KeyAndValue, layer: Array, cache: KVCache) -> tuple[Array, KVCache]:
        """New tokens in some lines, row by row.

        A row sees what the rows before it wrote to the same line, so that a long prompt is several rows of one call.
        One scatter and gather for all rows makes the TPU compiler copy the whole cache in every layer.
        """
        assert self.line is not None

        def put(cache: KVCache, row: tuple[Array, Array, Array, KeyAndValue]) -> tuple[KVCache, Array]:
            query, line, position, new = row
            at = (layer, line, 0, position[0], 0)
            keys, values = (
                jax.lax.dynamic_update_slice(x, y[None, None], at)
                for x, y in zip((cache.keys, cache.values), new, strict=True)
            )
            cache = KVCache(keys=keys, values=values)
            return cache, self._by_blocks(query[None], position[None], cache, layer, line, position[-1] + 1)[0]

        cache, mixed = jax.lax.scan(put, cache, (query, self.line, self.position, new))
        return mixed, cache

    def _by_blocks(
        self,
        query: Float[Array, "rows length heads dim"],
        position: Int[Array, "rows length"],
        cache: KVCache,
        layer: Array,
        first: Array | int,
        reach: Int[Array, ""],
    ) -> Float[Array, "rows length heads dim"]:
        """Attention to positions [0, reach) of as many lines from `first` on as there are rows, with a running softmax.

        Each block rescales what came before it to the new maximum (Milakov and Gimelshein, 2018).
        """
        rows, length, heads, dim = query.shape
        kv_heads = cache.keys.shape[2]
        q = (
            query.reshape(rows, length, kv_heads, heads // kv_heads, dim)
            .swapaxes(1, 2)
            .reshape(rows, kv_heads, -1, dim)
        )
        q = q.astype(jnp.float32) * dim**-0.5
        limit = jnp.repeat(position, heads // kv_heads, axis=1)[:, None, :, None]
        size = (1, rows, kv_heads, self.block, dim)

        def add(b: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            most, total, mixed = carry
            at = b * self.block
            keys, values = (
                jax.lax.dynamic_slice(x, (layer, first, 0, at, 0), size)[0] for x in (cache.keys, cache.values)
            )
            scores = jnp.einsum("rhqd,rhkd->rhqk", q.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
            visible = at + jnp.arange(self.block) <= limit
            scores = jnp.where(visible, scores, -jnp.inf)
            new_most = jnp.maximum(most, scores.max(3))
            weights = jnp.exp(scores - new_most[..., None])
            keep = jnp.exp(most - new_most)
            part = jnp.einsum(
                "rhqk,rhkd->rhqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
            )
            return new_most, total * keep + weights.sum(3), mixed * keep[..., None] + part

        lowest = jnp.full(q.shape[:3], jnp.finfo(jnp.float32).min)
        start = lowest, jnp.zeros(q.shape[:3]), jnp.zeros(q.shape)
        _, total, mixed = jax.lax.fori_loop(0, -(-reach // self.block), add, start)
        out = (mixed / total[..., None]).astype(query.dtype)
        return out.reshape(rows, kv_heads, length, -1, dim).swapaxes(1, 2).reshape(query.shape)


def copy_lines(
    cache: KVCache, source: Int[Array, "moves"], target: Int[Array, "moves"], count: Int[Array, "1"]
) -> KVCache:
    """Copies lines to other lines, for the first `count` moves, one after the other.

    Whole lines: a slice that begins in the middle of one makes the TPU compiler turn the cache to another layout.
    """
    layers, _, heads, length, dim = cache.keys.shape

    def move(i: Array, cache: KVCache) -> KVCache:
        def one(x: Array) -> Array:
            taken = jax.lax.dynamic_slice(x, (0, source[i], 0, 0, 0), (layers, 1, heads, length, dim))
            return jax.lax.dynamic_update_slice(x, taken, (0, target[i], 0, 0, 0))

        return jax.tree.map(one, cache)

    return jax.lax.fori_loop(0, count[0], move, cache)

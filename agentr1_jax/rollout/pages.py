"""The KV cache in pages: a pool of pages that trajectories share, and a table that says which ones a decode slot reads.

    page     0 1 2 3 4 5 6 7       a page: keys and values of so many consecutive positions, in every layer
             - p r p o q r .       slot 0 reads 1 2 4, slot 1 reads 1 5, another trajectory at its tools keeps 3 6

Page 0 belongs to nobody: idle slots and padding write there, and a table entry without a page is 0. Pages that several
trajectories read are full and never written again. `rollout.page_scheduler` decides on the host who has which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.sharding import fit
from agentr1_jax.rollout.cache import KeyAndValue, attend_by_blocks, cached_heads, round_to

DECODE_TOKENS = 8
"""Tokens, each of another sequence, that one step of the kernel takes in decoding."""
DECODE_BLOCK = 512
"""Most positions that one step of the kernel reads in decoding; it reads whole blocks, to the end of the last one."""
PREFILL_QUERIES = 1024
"""Most queries (tokens x heads) that one step of the kernel takes in prefill: as many as fit the fast memory."""


@flax.struct.dataclass
class PageCache:
    """Keys and values of all pages, and the pages of each decode slot; or the sharding of each.

    Attributes:
      pages: [layers, pages, tokens, 2 · cached heads, dim], the keys of a head at 2 · head, its values at 2 · head + 1,
        as the kernel reads them.
      table: int32 [slots, pages of a slot], page of each `tokens` positions, numbered within its data shard.
    """

    pages: Any
    table: Any

    @property
    def length(self) -> int:
        """Positions that a slot can hold."""
        return self.table.shape[1] * self.pages.shape[2]


def page_sharding(config: DecoderConfig, mesh: Mesh) -> PageCache:
    """Shardings of a cache: pages and slots over `data`, cached heads over `tensor`."""
    shape = config.layers, mesh.shape["data"], 1, cached_heads(config, mesh.shape["tensor"]), config.head_dim
    # A device has whole pairs of keys and values.
    spec = fit((None, "data", None, "tensor", None), shape, mesh)
    return PageCache(pages=spec, table=NamedSharding(mesh, P("data")))


def empty_pages(
    config: DecoderConfig, pages: int, page_tokens: int, *, tensor: int, table: tuple[int, int], dtype: str
) -> PageCache:
    """Cache of zeros; `table`: decode slots, and the pages of each."""
    shape = config.layers, pages, page_tokens, 2 * cached_heads(config, tensor), config.head_dim
    return PageCache(pages=jnp.zeros(shape, dtype), table=jnp.zeros(table, jnp.int32))


@flax.struct.dataclass
class PageView:
    """Attention of new tokens to the pages of their slots.

    Attributes:
      slot: decode slot of each row (prefill); None in decoding, where row i is slot i and has one token.
      position: position of each token. In prefill the positions of a row are consecutive; one without a page is
        padding. In decoding a position ≥ length marks an idle row.
      block: positions per attention block, a multiple of those of a page.
      group_size: slots per attention group in decoding, without the kernel.
      tensor: devices over which heads are sharded, inside of a `shard_map` over the other axes of the mesh.
      kernel: whether jax's ragged paged attention for TPU does it.
    """

    slot: Int[Any, "rows"] | None
    position: Int[Any, "rows length"]
    block: int = flax.struct.field(pytree_node=False)
    group_size: int = flax.struct.field(pytree_node=False, default=1)
    tensor: int = flax.struct.field(pytree_node=False, default=1)
    kernel: bool = flax.struct.field(pytree_node=False, default=False)

    def attend(
        self,
        query: Float[Array, "rows length heads dim"],
        key: Float[Array, "rows length kv_heads dim"],
        value: Float[Array, "rows length kv_heads dim"],
        layer: Int[Array, ""],
        state: PageCache,
    ) -> tuple[Float[Array, "rows length heads dim"], PageCache]:
        """Write the new keys and values and attend to the pages; see `policy.attention.Memory.attend`."""
        copies = state.pages.shape[3] // (2 * key.shape[2])
        new = round_to(jnp.repeat(jnp.stack([key, value], axis=3), copies, axis=2), state.pages.dtype)
        new = new.reshape(*key.shape[:2], -1, key.shape[3])
        attend = PageView._attend
        if self.tensor > 1 or (self.kernel and not jax.sharding.get_abstract_mesh().empty):
            # By hand over all axes that are left: a device writes and reads its own heads, and no compiler splits a
            # kernel, not even over axes of one device.
            heads = P(None, None, "tensor")
            cache = PageCache(pages=P(None, None, None, "tensor"), table=P())
            in_specs, out_specs = (P(), heads, heads, P(), cache), (heads, cache)
            names = {"fsdp", "tensor"}
            attend = jax.shard_map(attend, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)
        return attend(self, query, new, layer, state)

    def _attend(self, query: Array, new: Array, layer: Array, cache: PageCache) -> tuple[Array, PageCache]:
        # A row sees what the other rows of the call write: a long prompt can be several rows, and so can two prompts
        # that begin alike.
        table = cache.table if self.slot is None else cache.table.at[self.slot].get(mode="fill", fill_value=0)
        tokens = cache.pages.shape[2]
        page = jnp.take_along_axis(table, self.position // tokens, axis=1, mode="fill", fill_value=0)
        cache = PageCache(cache.pages.at[layer, page, self.position % tokens].set(new), cache.table)
        last = self.position[:, -1]
        idle = last >= cache.length if self.slot is None else jnp.zeros(last.shape, bool)
        reach = jnp.where(idle, 1, last + 1)
        if self.kernel:
            return self._by_kernel(query, table, reach, layer, cache), cache
        group_size = self.group_size if self.slot is None else 1

        def group(_: None, group: tuple[Array, ...]) -> tuple[None, Array]:
            query, position, table, reach = group
            read = self._reader(cache, layer, table)
            return None, attend_by_blocks(query, position, reach.max(), self.block, read)

        def split(x: Array) -> Array:
            return x.reshape(-1, group_size, *x.shape[1:])

        _, mixed = jax.lax.scan(group, None, tuple(map(split, (query, self.position, table, reach))))
        return mixed.reshape(query.shape), cache

    def _reader(self, cache: PageCache, layer: Array, table: Array) -> Callable[[Array], KeyAndValue]:
        """Return what reads a block of the rows of a table; a page beyond its end is page 0."""
        tokens = cache.pages.shape[2]
        count = self.block // tokens
        padded = jnp.pad(table, ((0, 0), (0, -table.shape[1] % count)))

        def read(b: Array) -> KeyAndValue:
            found = cache.pages[layer, jax.lax.dynamic_slice_in_dim(padded, b * count, count, axis=1)]
            rows, _, _, heads, dim = found.shape
            found = found.reshape(rows, self.block, heads // 2, 2, dim).transpose(3, 0, 2, 1, 4)
            return found[0], found[1]

        return read

    def _by_kernel(self, query: Array, table: Array, reach: Array, layer: Array, cache: PageCache) -> Array:
        """Attend with one call of the kernel, which reads each row's own positions and no more."""
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention  # Slow to import.

        rows, length, heads, dim = query.shape
        layers, pages, tokens = cache.pages.shape[:3]
        decodes = self.slot is None
        block = min(self.block, max(DECODE_BLOCK, tokens)) if decodes else self.block
        scale = None if cache.pages.dtype == query.dtype else 1.0  # A scale makes it cast to the dtype of the queries.
        out = ragged_paged_attention(
            query.reshape(rows * length, heads, dim),
            cache.pages.reshape(layers * pages, *cache.pages.shape[2:]),
            reach,
            table + layer * pages,
            jnp.arange(rows + 1, dtype=jnp.int32) * length,
            jnp.full(1, rows, jnp.int32),
            k_scale=scale,
            v_scale=scale,
            num_kv_pages_per_block=min(block // tokens, table.shape[1]),
            num_queries_per_block=DECODE_TOKENS if decodes else min(length, max(PREFILL_QUERIES // heads, 1)),
        )
        return out.reshape(query.shape)

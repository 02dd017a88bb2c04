"""Grouped-query attention and the memory that a decoder attends to.

The decoder attends to one of two memories. In training (`PackedRows`, here) a token sees its ancestors among the tokens
of its own row. In sampling (`rollout.cache.CacheView`) it sees the KV cache of its slot. Both have the same method, so
that there is one decoder and one set of parameters.

`blockwise_attention` is the ancestor attention of packed rows for any backend: only visible pairs of blocks are
computed. Memory is linear in the length of a row, and time in its visible pairs of blocks: few in a row of many short
segments, or in a tree whose branches do not see each other. Forward and backward pass walk over the same list of
visible pairs, whose number is data (online softmax of FlashAttention, arXiv 2205.14135; the backward pass computes the
weights again from the saved log-sum-exp).
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.policy.config import Attention, DecoderConfig
from agentr1_jax.policy.sharding import ROWS, on_shards, over_rows

BLOCK = 64
"""Measured on CPU: larger blocks leave the cache, smaller ones are mostly loop."""
GPU_BLOCK = 512
"""On a GPU every step of a block's loop is some ten launches."""
MOST_GPU_TOKENS = 16384
"""Rows of more tokens are more than half a million launches in an update of 36 layers."""
MOST_ERROR = 0.05
"""Of a kernel that is tried at the start, relative to the norm."""
SPLASH_BLOCK = 128
"""Rows for splash attention must be a multiple of this many tokens."""


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
        """Return softmax(q·k) v over what a token sees, and the state (KV cache) to carry to the next layer.

        Queries come scaled by 1/√d, whatever attends: in half precision sampling and training then round them alike.
        """
        ...


@flax.struct.dataclass
class PackedRows:
    """Ancestor attention over packed rows: token i sees token j iff j ≤ i < subtree_end[j].

    One rule serves all packing modes.

    Attributes:
      subtree_end: of each token.
      implementation: `xla` (visible blocks, on any backend), `dense` (all scores at once, the reference), `splash`
        (TPU, any packing mode but `prefix_tree`: all tokens of a segment have one subtree end, which serves as its
        segment id), `splash_tree` (TPU, any mode) or `cudnn` (GPU, as `splash`).
      mesh: heads are sharded over its `tensor`, inside of `sharding.over_rows`; None for one device.
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
        if self.implementation == "xla":
            gpu = self.mesh is not None and self.mesh.devices.flat[0].platform == "gpu"
            blocks = functools.partial(blockwise_attention, block=GPU_BLOCK if gpu else BLOCK)
            return on_shards(blocks, query, key, value, self.subtree_end, self.mesh), state
        if self.implementation in ("splash", "splash_tree"):
            from agentr1_jax.policy.splash import splash_attention  # Pallas is slow to import, and only TPUs need it.

            tree = self.implementation == "splash_tree"
            return splash_attention(query, key, value, self.subtree_end, self.mesh, tree=tree), state
        if self.implementation == "cudnn":
            from agentr1_jax.policy.cudnn import cudnn_attention

            return cudnn_attention(query, key, value, self.subtree_end, self.mesh), state
        index = jnp.arange(self.subtree_end.shape[1])
        visible = (index[None, None, :] <= index[None, :, None]) & (index[None, :, None] < self.subtree_end[:, None, :])
        return grouped_attention(query, key, value, visible), state


def grouped_attention(
    query: Float[Array, "rows queries heads dim"],
    key: Float[Array, "rows keys kv_heads dim"],
    value: Float[Array, "rows keys kv_heads dim"],
    visible: Bool[Array, "rows queries keys"],
) -> Float[Array, "rows queries heads dim"]:
    """Return softmax(q·k) v, `heads / kv_heads` query heads to each key head; softmax in float32 or wider."""
    rows, queries, heads, dim = query.shape
    grouped = query.reshape(rows, queries, key.shape[2], heads // key.shape[2], dim)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, preferred_element_type=wide)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, value).reshape(query.shape)


def blockwise_attention(
    query: Float[Array, "rows length heads dim"],
    key: Float[Array, "rows length kv_heads dim"],
    value: Float[Array, "rows length kv_heads dim"],
    subtree_end: Int[Array, "rows length"],
    *,
    block: int = BLOCK,
) -> Float[Array, "rows length heads dim"]:
    """Return softmax(q·k) v where token i sees token j iff j ≤ i < subtree_end[j]; softmax in float32 or wider.

    There are `heads / kv_heads` query heads to each key head, and every token sees itself. A row is padded to a
    multiple of `block` tokens.
    """
    rows, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    block = min(block, length)
    pad = -length % block
    blocks = (length + pad) // block

    def in_blocks(x: Array) -> Array:
        """[rows, length, heads, dim] -> [rows · blocks, kv_heads, heads/kv_heads · block, dim]."""
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
        x = x.reshape(rows * blocks, block, kv_heads, x.shape[2] // kv_heads, dim)
        return x.transpose(0, 2, 3, 1, 4).reshape(rows * blocks, kv_heads, -1, dim)

    alone = jnp.broadcast_to(jnp.arange(length, length + pad) + 1, (rows, pad)).astype(subtree_end.dtype)
    ends = jnp.concatenate([subtree_end, alone], axis=1).reshape(rows * blocks, block)
    out = _attend(in_blocks(query), in_blocks(key), in_blocks(value), ends, blocks)
    out = out.reshape(rows * blocks, kv_heads, heads // kv_heads, block, dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, length + pad, heads, dim)[:, :length].astype(query.dtype)


def visible_blocks(ends: Int[Array, "all_blocks block"], blocks: int) -> tuple[Int[Array, "n b"], Int[Array, "n"]]:
    """Return the key blocks that each query block sees, its own first, and their number."""
    rows, block = ends.shape[0] // blocks, ends.shape[1]
    last = ends.max(axis=1).reshape(rows, 1, blocks)
    index = jnp.arange(blocks)
    query, key = index[:, None], index[None, :]
    visible = (key == query) | ((key < query) & (last > query * block))
    count = visible.sum(axis=-1)
    # Sorted from the right: a block's own tokens come first, so that from then on every maximum is one of a score.
    order = blocks - 1 - jnp.argsort(~visible[..., ::-1], axis=-1, stable=True)
    return order.reshape(rows * blocks, blocks), count.reshape(rows * blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query: Array, key: Array, value: Array, ends: Array, blocks: int) -> Array:
    return _forward(query, key, value, ends, blocks)[0]


def _scores(query: Array, key: Array, ends: Array, q: Array, k: Array) -> Array:
    """Scores of one pair of blocks [kv_heads, queries, keys], least where not visible; `q`, `k`: indices of blocks."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    block = key.shape[1]
    scores = jnp.einsum("hqd,hkd->hqk", query, key, preferred_element_type=wide)
    i = (q * block + jnp.arange(query.shape[1]) % block)[:, None]
    j = (k * block + jnp.arange(block))[None, :]
    return jnp.where((j <= i) & (i < ends[None, :]), scores, jnp.finfo(wide).min)


def _forward(query: Array, key: Array, value: Array, ends: Array, blocks: int) -> tuple[Array, tuple[Array, ...]]:
    order, count = visible_blocks(ends, blocks)
    wide = jnp.promote_types(query.dtype, jnp.float32)

    def one_query_block(n: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        own, row = query[n], n - n % blocks

        def one_key_block(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            most, total, mixed = carry
            k = order[n, t]
            scores = _scores(own, key[row + k], ends[row + k], n % blocks, k)
            new_most = jnp.maximum(most, scores.max(axis=-1))
            weights = jnp.exp(scores - new_most[..., None])
            shrink = jnp.exp(most - new_most)
            new = jnp.einsum("hqk,hkd->hqd", weights.astype(value.dtype), value[row + k], preferred_element_type=wide)
            return new_most, total * shrink + weights.sum(axis=-1), mixed * shrink[..., None] + new

        least = jnp.full(own.shape[:2], jnp.finfo(wide).min)
        start = (least, jnp.zeros(own.shape[:2], wide), jnp.zeros(own.shape, wide))
        most, total, mixed = jax.lax.fori_loop(0, count[n], one_key_block, start)
        out, logsum = carry
        return out.at[n].set((mixed / total[..., None]).astype(out.dtype)), logsum.at[n].set(most + jnp.log(total))

    start = (jnp.zeros_like(query), jnp.zeros(query.shape[:3], wide))
    out, logsum = jax.lax.fori_loop(0, query.shape[0], one_query_block, start)
    return out, (query, key, value, ends, order, count, out, logsum)


def _backward(blocks: int, residuals: tuple[Array, ...], cotangent: Array) -> tuple[Array | None, ...]:
    query, key, value, ends, order, count, out, logsum = residuals
    wide = logsum.dtype
    delta = jnp.sum(cotangent.astype(wide) * out.astype(wide), axis=-1)

    def one_query_block(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        own, slope, row = query[n], cotangent[n], n - n % blocks

        def one_key_block(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_own, d_key, d_value = carry
            k = order[n, t]
            scores = _scores(own, key[row + k], ends[row + k], n % blocks, k)
            weights = jnp.exp(scores - logsum[n][..., None])
            d_weights = jnp.einsum("hqd,hkd->hqk", slope, value[row + k], preferred_element_type=wide)
            d_scores = (weights * (d_weights - delta[n][..., None])).astype(query.dtype)
            weights = weights.astype(query.dtype)
            d_value = d_value.at[row + k].add(jnp.einsum("hqk,hqd->hkd", weights, slope, preferred_element_type=wide))
            d_key = d_key.at[row + k].add(jnp.einsum("hqk,hqd->hkd", d_scores, own, preferred_element_type=wide))
            d_own = d_own + jnp.einsum("hqk,hkd->hqd", d_scores, key[row + k], preferred_element_type=wide)
            return d_own, d_key, d_value

        d_query, d_key, d_value = carry
        start = (jnp.zeros(own.shape, wide), d_key, d_value)
        d_own, d_key, d_value = jax.lax.fori_loop(0, count[n], one_key_block, start)
        return d_query.at[n].set(d_own.astype(d_query.dtype)), d_key, d_value

    start = (jnp.zeros_like(query), jnp.zeros(key.shape, wide), jnp.zeros(value.shape, wide))
    d_query, d_key, d_value = jax.lax.fori_loop(0, query.shape[0], one_query_block, start)
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None


_attend.defvjp(_forward, _backward)


def for_trees(attention: Attention) -> Attention:
    """Return the implementation for rows of prefix trees, where another one is chosen for segments."""
    other: dict[Attention, Attention] = {"splash": "splash_tree", "cudnn": "xla"}
    return other.get(attention, attention)


def check_attention(policy: DecoderConfig, mesh: Mesh, row_tokens: int, packing: str, *, call: bool = True) -> None:
    """Run `policy.attention` and its gradient over one short row for each shard of a batch, and compare with `xla`.

    Args:
      mesh: the learner's; all its processes call this.
      row_tokens: length of a packed row.
      packing: mode of the rows.
      call: False leaves out the call, for a mesh whose devices are not here.

    Raises:
      ValueError: the devices, the rows or the dtype do not suit the implementation, or the call failed or is wrong.
    """
    fault = _fault(policy, mesh.devices.flat[0].platform, row_tokens, packing)
    if fault:
        raise ValueError(f"policy.attention={policy.attention} {fault}")
    if policy.attention in ("xla", "dense") or not call:
        return
    what = (
        f"on {mesh.devices.flat[0].device_kind} with {policy.heads} query heads, {policy.kv_heads} key heads, head_dim "
        f"{policy.head_dim} and {policy.dtype}"
    )
    try:
        error = float(_error_of_short_rows(policy, mesh))
    except Exception as exception:  # A backend may raise anything.
        reason = (str(exception).strip().splitlines() or [type(exception).__name__])[0]
        raise ValueError(
            f"policy.attention={policy.attention} fails {what}: {reason}; policy.attention=xla works everywhere"
        ) from exception
    if not error < MOST_ERROR:
        raise ValueError(
            f"policy.attention={policy.attention} {what} is off by {error:.1%} from policy.attention=xla, where "
            "rounding is less than 2 %; set policy.attention=xla"
        )


def _fault(policy: DecoderConfig, platform: str, row_tokens: int, packing: str) -> str | None:
    """Return why the implementation does not suit, as the end of a sentence, or None."""
    everywhere = "; policy.attention=xla works everywhere"
    if policy.attention in ("splash", "splash_tree"):
        if platform != "tpu":
            return f"needs a TPU, and the devices here are of platform {platform!r}{everywhere}"
        if row_tokens % SPLASH_BLOCK:
            return (
                f"needs rows of a multiple of {SPLASH_BLOCK} tokens, and learner.row_tokens is {row_tokens}{everywhere}"
            )
    if policy.attention == "cudnn":
        if platform != "gpu":
            return f"needs a GPU, and the devices here are of platform {platform!r}{everywhere}"
        if policy.dtype not in ("bfloat16", "float16"):
            return f"needs policy.dtype=bfloat16, and that is {policy.dtype}{everywhere}"
    if packing == "prefix_tree" and for_trees(policy.attention) != policy.attention:
        trees = for_trees(policy.attention)
        return f"needs segments (learner.packing is prefix_tree); policy.attention={trees} takes any rows"
    if policy.attention == "xla" and platform == "gpu" and row_tokens > MOST_GPU_TOKENS:
        return (
            f"launches kernels for every pair of blocks of {GPU_BLOCK} tokens: too many for learner.row_tokens="
            f"{row_tokens} on a GPU, at most {MOST_GPU_TOKENS}; policy.attention=cudnn is one for each layer"
        )
    return None


def _error_of_short_rows(policy: DecoderConfig, mesh: Mesh) -> Array:
    """Return the largest error of output and gradients, relative to their norm; made within the program.

    No process holds an input. A row has a short segment, one that crosses a block, and padding.
    """
    rows, length = mesh.shape["data"] * mesh.shape["fsdp"], 2 * SPLASH_BLOCK
    ends = np.arange(1, length + 1)
    ends[:100], ends[100:230] = 100, 230

    def results(attention: str) -> list[Array]:
        def attend(query: Array, key: Array, value: Array) -> Array:
            own = jnp.broadcast_to(jnp.asarray(ends, jnp.int32), (query.shape[0], length))
            return PackedRows(own, attention, mesh).attend(query, key, value, jnp.zeros((), jnp.int32), None)[0]

        def loss(*inputs: Array) -> tuple[Array, Array]:
            out = over_rows(attend, mesh, (P(ROWS),) * 3, P(ROWS))(*inputs).astype(jnp.float32)
            out = out[:, :230]
            return (out * jnp.sin(jnp.arange(out.size).reshape(out.shape))).sum(), out

        keys, heads = jax.random.split(jax.random.key(0), 3), (policy.heads, policy.kv_heads, policy.kv_heads)
        shapes = [(rows, length, n, policy.head_dim) for n in heads]
        inputs = [jax.random.normal(k, shape).astype(policy.dtype) for k, shape in zip(keys, shapes, strict=True)]
        inputs[0] *= policy.head_dim**-0.5
        grads, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)
        return [out, *grads]

    def error() -> Array:
        pairs = zip(results(policy.attention), results("xla"), strict=True)
        wide = [(one.astype(jnp.float32), other.astype(jnp.float32)) for one, other in pairs]
        return jnp.stack([jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in wide]).max()

    return jax.jit(error, out_shardings=NamedSharding(mesh, P()))()

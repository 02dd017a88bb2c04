"""Log-probabilities and entropy of reads, in chunks, so that logits are never materialised whole."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.policy.sharding import ROWS, constrain, fit


def token_logprobs(
    hidden: Float[Array, "rows reads width"],
    target: Int[Array, "rows reads"],
    used: Bool[Array, "rows reads"],
    head: Float[Array, "width vocab"],
    *,
    temperature: float,
    chunk: int,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "rows reads"], Float[Array, "rows reads"]]:
    """log softmax(h·W/τ)[target] and the entropy of that softmax, in float32 or wider.

    Memory is O(chunk · vocab): the backward pass computes the logits of a chunk again. A chunk is a block of columns of
    all rows; rows are filled from the left, so that the last chunks hold only padding and cost nothing.

    Args:
      hidden: hidden states that predict the targets.
      target: ids.
      used: False for padding; its results are 0.
      head: output head W.
      temperature: τ, the sampler's.
      chunk: reads per chunk, rounded to whole columns.
      mesh: the vocabulary is dealt over its `tensor` axis; None leaves that to the compiler.

    Returns:
      log-probabilities and entropies in nats.
    """
    rows, reads = target.shape
    columns = max(1, min(chunk // rows, reads))
    by_chunks = functools.partial(_by_chunks, temperature=temperature, columns=columns, split=mesh is not None)
    if mesh is None:
        return by_chunks(hidden, target, used, head)
    # By hand over the rows: each device sums the head's gradient over its own chunks, and devices exchange it once. The
    # compiler would gather the head and reduce its gradient for every chunk.
    own = P(*fit((ROWS,), (rows,), mesh).spec)
    by_rows = jax.shard_map(
        by_chunks,
        mesh=mesh,
        in_specs=(own, own, own, P()),
        out_specs=(own, own),
        axis_names=set(ROWS),
        check_vma=False,
    )
    return by_rows(hidden, target, used, constrain(head, mesh, None, "tensor"))


def _by_chunks(
    hidden: Array, target: Array, used: Array, head: Array, *, temperature: float, columns: int, split: bool
) -> tuple[Array, Array]:
    """`token_logprobs` of the rows of one shard; with `split`, the vocabulary is dealt over the mesh's `tensor`."""
    rows, reads = target.shape
    pad = -reads % columns
    wide = jnp.promote_types(hidden.dtype, jnp.float32)

    def blocks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(rows, -1, columns, *x.shape[2:]), 1, 0)

    def one_chunk(h: Array, ids: Array, mask: Array) -> tuple[Array, Array]:
        logits = jnp.matmul(h, head.astype(h.dtype), preferred_element_type=wide) / temperature
        if split:
            logits = jax.lax.with_sharding_constraint(logits, P(None, None, "tensor"))
        logprobs = jax.nn.log_softmax(logits)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        chosen = jnp.take_along_axis(logprobs, ids[..., None], axis=-1)[..., 0]
        return jnp.where(mask, chosen, 0), jnp.where(mask, entropy, 0)

    def nothing(h: Array, ids: Array, mask: Array) -> tuple[Array, Array]:
        return jnp.zeros(mask.shape, wide), jnp.zeros(mask.shape, wide)

    # Around the cond, not within a branch: what a branch keeps for its gradient (the head!) is stacked over the chunks.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(_: None, block: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, Array]]:
        return None, jax.lax.cond(block[2].any(), one_chunk, nothing, *block)

    _, out = jax.lax.scan(body, None, (blocks(hidden), blocks(target), blocks(used)))
    logprob, entropy = (jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :reads] for x in out)
    return logprob, entropy

"""Log-probabilities and entropy of loss tokens, in chunks, so that logits are never materialised whole."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from agentr1_jax.policy.sharding import gather, scatter_sum


def token_logprobs(
    hidden: Float[Array, "rows tokens width"],
    target: Int[Array, "rows tokens"],
    used: Bool[Array, "rows tokens"],
    head: Float[Array, "columns vocab"],
    *,
    temperature: float,
    chunk: int,
    mesh: Mesh | None = None,
    entropy_gradient: bool = True,
) -> tuple[Float[Array, "rows tokens"], Float[Array, "rows tokens"]]:
    """Return log softmax(h·W/τ)[target] and the entropy of that softmax, in float32 or wider.

    Used tokens, wherever they lie, are moved together, and only the chunks that used tokens need are computed: time
    follows their number. Memory is O(chunk · vocab), since the backward pass computes the logits of a chunk again.
    Matrices are multiplied in the dtype of `hidden`; sums, the head's gradient among them, are float32 or wider.

    Args:
      hidden: hidden states that predict the targets.
      target: ids.
      used: False for padding, whose inputs are not read and whose results are 0.
      head: output head W, or, inside of `sharding.over_rows`, its shard over `fsdp`. Its gradient is summed over this
        device's chunks first, and exchanged once.
      temperature: τ, the sampler's.
      chunk: tokens per chunk on each device.
      mesh: the vocabulary is sharded over its `tensor`, inside of `sharding.over_rows`; None for one device.
      entropy_gradient: False where the entropy is only a metric: its gradient is then 0 and costs nothing.

    Returns:
      log-probabilities and entropies in nats.
    """
    by_vocab = mesh is not None and mesh.shape["tensor"] > 1 and head.shape[1] % mesh.shape["tensor"] == 0
    static = _Static(temperature, chunk, entropy_gradient, by_vocab)
    logprob, entropy = _logprobs(static, hidden.reshape(-1, hidden.shape[-1]), target.ravel(), used.ravel(), head)
    return logprob.reshape(target.shape), entropy.reshape(target.shape)


class _Static(NamedTuple):
    """Arguments known when compiling; with `shard_vocab`, the vocabulary is sharded over the mesh's `tensor`."""

    temperature: float
    chunk: int
    entropy_gradient: bool
    shard_vocab: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(static: _Static, hidden: Array, target: Array, used: Array, head: Array) -> tuple[Array, Array]:
    """`token_logprobs` of flat tokens."""
    return _forward(static, hidden, target, used, head)[0]


def _forward(
    static: _Static, hidden: Array, target: Array, used: Array, head: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """Return both results, and the residuals of the backward pass."""
    order, chunks = _compact(used, static.chunk)
    kernel = gather(head, (hidden.shape[1], head.shape[1]), hidden.dtype)

    def body(i: Array, out: tuple[Array, ...]) -> tuple[Array, ...]:
        ids = _pick(target, order[i])
        logits = _logits(static, _pick(hidden, order[i]), kernel)
        # All relative to the largest logit: differences of numbers near log Σexp lose digits when logits are large.
        largest = jnp.max(logits, axis=-1)
        below = logits - largest[:, None]
        weight = jnp.exp(below)
        total = jnp.sum(weight, axis=-1)
        log_total = jnp.log(total)
        logprob = jnp.sum(jnp.where(_is_target(ids, logits), below, 0), axis=-1) - log_total
        entropy = log_total - jnp.sum(weight * below, axis=-1) / total
        return _put(out, i, (logprob, entropy, largest, log_total))

    empty = jnp.zeros(order.shape, _wide(hidden))
    logprob, entropy, *normalizers = jax.lax.fori_loop(0, chunks, body, (empty,) * 4)
    residuals = (hidden, target, used, head, kernel, entropy, *normalizers)
    return (_spread(logprob, used), _spread(entropy, used)), residuals


def _backward(
    static: _Static, residuals: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, None, None, Array]:
    """Apply ∂log π/∂z = 1[target] − p and ∂H/∂z = −p·(log p + H) for logits z.

    The target's column is found by comparing ids: the transpose of a gather would be a scatter into a chunk's logits.
    """
    hidden, target, used, head, kernel, entropy, largest, log_total = residuals
    order, chunks = _compact(used, static.chunk)
    wide = _wide(hidden)

    def body(i: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        h, ids = _pick(hidden, order[i]), _pick(target, order[i])
        d_logprob, d_entropy = (_pick(x, order[i])[:, None] / static.temperature for x in cotangents)
        logits = _logits(static, h, kernel)
        logprobs = logits - largest[i][:, None] - log_total[i][:, None]
        slope = -d_logprob
        if static.entropy_gradient:
            slope -= d_entropy * (logprobs + entropy[i][:, None])
        d_logits = jnp.exp(logprobs) * slope + jnp.where(_is_target(ids, logits), d_logprob, 0)
        d_logits = _constrain_vocab(static, d_logits.astype(hidden.dtype))
        d_h = jnp.matmul(d_logits, kernel.T, preferred_element_type=wide)
        d_kernel = jnp.matmul(h.T, d_logits, preferred_element_type=wide)
        return _put(grads[0], i, d_h.astype(hidden.dtype)), _constrain_vocab(static, grads[1] + d_kernel)

    empty = jnp.zeros((*order.shape, hidden.shape[-1]), hidden.dtype)
    no_gradient = _constrain_vocab(static, jnp.zeros(kernel.shape, wide))
    d_hidden, d_head = jax.lax.fori_loop(0, chunks, body, (empty, no_gradient))
    if head.shape != kernel.shape:
        d_head = scatter_sum(d_head, 0, head.dtype)
    return _spread(d_hidden, used), None, None, d_head.astype(head.dtype)


_logprobs.defvjp(_forward, _backward)


def _compact(used: Bool[Array, "tokens"], chunk: int) -> tuple[Int[Array, "most_chunks chunk"], Int[Array, ""]]:
    """Indices of used tokens in chunks, then indices beyond all tokens; and the number of chunks with used tokens."""
    chunk = min(chunk, used.size)
    order = jnp.flatnonzero(used, size=used.size + -used.size % chunk, fill_value=used.size)
    return order.reshape(-1, chunk), (jnp.sum(used) + chunk - 1) // chunk


def _pick(x: Shaped[Array, "tokens *features"], index: Int[Array, "chunk"]) -> Shaped[Array, "chunk *features"]:
    """The tokens of a chunk, 0 beyond them."""
    return x.at[index].get(mode="fill", fill_value=0)


def _put(whole: Any, i: Array, chunk: Any) -> Any:
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, 0), whole, chunk)


def _spread(x: Float[Array, "most_chunks chunk *features"], used: Bool[Array, "tokens"]) -> Array:
    """Move compact results back to their tokens; 0 at unused ones. A gather, which every device does fast."""
    index = jnp.maximum(jnp.cumsum(used) - 1, 0)
    flat = x.reshape(-1, *x.shape[2:])
    return jnp.where(used.reshape(-1, *(1,) * (flat.ndim - 1)), flat[index], 0)


def _logits(static: _Static, h: Float[Array, "chunk width"], kernel: Array) -> Float[Array, "chunk vocab"]:
    return _constrain_vocab(static, jnp.matmul(h, kernel, preferred_element_type=_wide(h)) / static.temperature)


def _is_target(ids: Int[Array, "chunk"], logits: Float[Array, "chunk vocab"]) -> Bool[Array, "chunk vocab"]:
    return jax.lax.broadcasted_iota(ids.dtype, logits.shape, 1) == ids[:, None]


def _constrain_vocab(static: _Static, x: Float[Array, "any vocab"]) -> Float[Array, "any vocab"]:
    return jax.lax.with_sharding_constraint(x, P(None, "tensor")) if static.shard_vocab else x


def _wide(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)

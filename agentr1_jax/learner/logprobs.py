"""Log-probabilities and entropy of reads, in chunks, so that logits are never materialised whole."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

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
    entropy_gradient: bool = True,
) -> tuple[Float[Array, "rows reads"], Float[Array, "rows reads"]]:
    """log softmax(h·W/τ)[target] and the entropy of that softmax, in float32 or wider.

    Used reads, wherever they lie, are moved together, and each device takes as many chunks as its own fill: time
    follows the used reads. Memory is O(chunk · vocab), since the backward pass computes the logits of a chunk again.
    Matrices are multiplied in the dtype of `hidden`; sums, the head's gradient among them, are float32 or wider.

    Args:
      hidden: hidden states that predict the targets.
      target: ids.
      used: False for padding; nothing of it is looked at, and its results are 0.
      head: output head W.
      temperature: τ, the sampler's.
      chunk: reads per chunk on each device.
      mesh: rows are dealt over its `data` and `fsdp`, the vocabulary over its `tensor`; None leaves that to the
        compiler.
      entropy_gradient: False where the entropy is only looked at: its gradient is then 0 and costs nothing.

    Returns:
      log-probabilities and entropies in nats.
    """
    how = _How(temperature, chunk, entropy_gradient, split=False)
    if mesh is None:
        return _of_rows(how, hidden, target, used, head)
    how = how._replace(split=head.shape[1] % mesh.shape["tensor"] == 0)
    # By hand over the rows: each device sums the head's gradient over its own chunks, and devices exchange it once. The
    # compiler would gather the head and reduce its gradient for every chunk.
    own = P(*fit((ROWS,), (target.shape[0],), mesh).spec)
    by_rows = jax.shard_map(
        functools.partial(_of_rows, how),
        mesh=mesh,
        in_specs=(own, own, own, P()),
        out_specs=(own, own),
        axis_names=set(ROWS),
        check_vma=False,
    )
    return by_rows(hidden, target, used, constrain(head, mesh, None, "tensor"))


class _How(NamedTuple):
    """What is known when the program is compiled; with `split`, the vocabulary is dealt over the mesh's `tensor`."""

    temperature: float
    chunk: int
    entropy_gradient: bool
    split: bool


def _of_rows(how: _How, hidden: Array, target: Array, used: Array, head: Array) -> tuple[Array, Array]:
    """`token_logprobs` of the rows of one shard."""
    logprob, entropy = _logprobs(how, hidden.reshape(-1, hidden.shape[-1]), target.ravel(), used.ravel(), head)
    return logprob.reshape(target.shape), entropy.reshape(target.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(
    how: _How,
    hidden: Float[Array, "reads width"],
    target: Int[Array, "reads"],
    used: Bool[Array, "reads"],
    head: Float[Array, "width vocab"],
) -> tuple[Float[Array, "reads"], Float[Array, "reads"]]:
    return _forward(how, hidden, target, used, head)[0]


def _forward(
    how: _How, hidden: Array, target: Array, used: Array, head: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """Both results, and what the backward pass needs."""
    order, chunks = _compact(used, how.chunk)
    kernel = head.astype(hidden.dtype)

    def body(i: Array, out: tuple[Array, ...]) -> tuple[Array, ...]:
        ids = _pick(target, order[i])
        logits = _logits(how, _pick(hidden, order[i]), kernel)
        # All relative to the largest logit: differences of numbers near log Σexp lose digits when logits are large.
        largest = jnp.max(logits, axis=-1)
        below = logits - largest[:, None]
        weight = jnp.exp(below)
        total = jnp.sum(weight, axis=-1)
        log_total = jnp.log(total)
        logprob = jnp.sum(jnp.where(_chosen(ids, logits), below, 0), axis=-1) - log_total
        entropy = log_total - jnp.sum(weight * below, axis=-1) / total
        return _put(out, i, (logprob, entropy, largest, log_total))

    empty = jnp.zeros(order.shape, _wide(hidden))
    logprob, entropy, *normalizers = jax.lax.fori_loop(0, chunks, body, (empty,) * 4)
    kept = (hidden, target, used, head, entropy, *normalizers)
    return (_spread(logprob, used), _spread(entropy, used)), kept


def _backward(how: _How, kept: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Array, None, None, Array]:
    """∂log π/∂z = 1[target] − p and ∂H/∂z = −p·(log p + H) for logits z.

    The target's place is found by comparing ids: the transpose of a gather would be a scatter into a chunk's logits.
    """
    hidden, target, used, head, entropy, largest, log_total = kept
    order, chunks = _compact(used, how.chunk)
    kernel, wide = head.astype(hidden.dtype), _wide(hidden)

    def body(i: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        h, ids = _pick(hidden, order[i]), _pick(target, order[i])
        of_logprob, of_entropy = (_pick(x, order[i])[:, None] / how.temperature for x in cotangents)
        logits = _logits(how, h, kernel)
        logprobs = logits - largest[i][:, None] - log_total[i][:, None]
        slope = -of_logprob
        if how.entropy_gradient:
            slope -= of_entropy * (logprobs + entropy[i][:, None])
        of_logits = jnp.exp(logprobs) * slope + jnp.where(_chosen(ids, logits), of_logprob, 0)
        of_logits = _dealt(how, of_logits.astype(hidden.dtype))
        of_h = jnp.matmul(of_logits, kernel.T, preferred_element_type=wide)
        of_kernel = jnp.matmul(h.T, of_logits, preferred_element_type=wide)
        return _put(grads[0], i, of_h.astype(hidden.dtype)), _dealt(how, grads[1] + of_kernel)

    empty = jnp.zeros((*order.shape, hidden.shape[-1]), hidden.dtype)
    of_hidden, of_head = jax.lax.fori_loop(0, chunks, body, (empty, _dealt(how, jnp.zeros(head.shape, wide))))
    return _spread(of_hidden, used), None, None, of_head.astype(head.dtype)


_logprobs.defvjp(_forward, _backward)


def _compact(used: Bool[Array, "reads"], chunk: int) -> tuple[Int[Array, "most_chunks chunk"], Int[Array, ""]]:
    """Indices of the used reads in chunks, then indices beyond all reads; and how many chunks hold used reads."""
    chunk = min(chunk, used.size)
    order = jnp.flatnonzero(used, size=used.size + -used.size % chunk, fill_value=used.size)
    return order.reshape(-1, chunk), (jnp.sum(used) + chunk - 1) // chunk


def _pick(x: Shaped[Array, "reads *of_each"], index: Int[Array, "chunk"]) -> Shaped[Array, "chunk *of_each"]:
    """The reads of a chunk, 0 beyond them."""
    return x.at[index].get(mode="fill", fill_value=0)


def _put(whole: Any, i: Array, chunk: Any) -> Any:
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, 0), whole, chunk)


def _spread(
    x: Float[Array, "most_chunks chunk *of_each"], used: Bool[Array, "reads"]
) -> Float[Array, "reads *of_each"]:
    """Compact results where their reads are; 0 at unused ones. A gather, which every device does fast."""
    place = jnp.maximum(jnp.cumsum(used) - 1, 0)
    flat = x.reshape(-1, *x.shape[2:])
    return jnp.where(used.reshape(-1, *(1,) * (flat.ndim - 1)), flat[place], 0)


def _logits(
    how: _How, h: Float[Array, "chunk width"], kernel: Float[Array, "width vocab"]
) -> Float[Array, "chunk vocab"]:
    return _dealt(how, jnp.matmul(h, kernel, preferred_element_type=_wide(h)) / how.temperature)


def _chosen(ids: Int[Array, "chunk"], logits: Float[Array, "chunk vocab"]) -> Bool[Array, "chunk vocab"]:
    return jax.lax.broadcasted_iota(ids.dtype, logits.shape, 1) == ids[:, None]


def _dealt(how: _How, x: Float[Array, "any vocab"]) -> Float[Array, "any vocab"]:
    return jax.lax.with_sharding_constraint(x, P(None, "tensor")) if how.split else x


def _wide(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)

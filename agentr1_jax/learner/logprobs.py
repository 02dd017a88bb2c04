"""Log-probabilities and entropy of reads, in chunks, so that logits are never materialised whole."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_logprobs(
    hidden: Float[Array, "reads width"],
    target: Int[Array, "reads"],
    head: Float[Array, "width vocab"],
    *,
    temperature: float,
    chunk: int,
) -> tuple[Float[Array, "reads"], Float[Array, "reads"]]:
    """log softmax(h·W/τ)[target] and the entropy of that softmax, in float32 or wider.

    Memory is O(chunk · vocab): the backward pass computes the logits of a chunk again.

    Args:
      hidden: hidden states that predict the targets.
      target: ids.
      head: output head W.
      temperature: τ, the sampler's.
      chunk: reads per chunk; the last one is padded.

    Returns:
      log-probabilities and entropies in nats.
    """
    n = hidden.shape[0]
    chunk = min(chunk, n)
    pad = -n % chunk
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    blocks = (
        jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk, hidden.shape[1]),
        jnp.pad(target, (0, pad)).reshape(-1, chunk),
    )

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_chunk(_: None, block: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        h, ids = block
        logits = jnp.matmul(h, head.astype(h.dtype), preferred_element_type=wide) / temperature
        logprobs = jax.nn.log_softmax(logits)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return None, (jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0], entropy)

    _, (logprob, entropy) = jax.lax.scan(one_chunk, None, blocks)
    return logprob.reshape(-1)[:n], entropy.reshape(-1)[:n]

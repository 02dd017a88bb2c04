"""Sampling on the device: the id of each token, its log-probability, and whether the response ends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

NO_TOKEN = -1


def sample(
    logits: Float[Array, "slots vocab"],
    temperature: Float[Array, "slots"],
    top_k: Int[Array, "slots"],
    top_p: Float[Array, "slots"],
    key: UInt32[Array, "slots 2"],
    index: Int[Array, "slots"],
) -> tuple[Int[Array, "slots"], Float[Array, "slots"]]:
    """Sample one id per slot by Gumbel-max from softmax(logits / temperature), keyed by (key, index).

    Args:
      logits: of the next token.
      temperature, top_k, top_p: see `SamplingConfig`.
      key: raw threefry key of each response.
      index: index of the token in its response.

    Returns:
      ids, and their log-probabilities under the distribution sampled from (0 where greedy: a point mass).
    """
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    some = ((top_k > 0) | (top_p < 1)) & ~greedy
    # The sort is a branch of its own, which costs nothing where no slot needs it.
    scaled = jax.lax.cond(some.any(), truncate_logits, lambda scaled, k, p: scaled, scaled, top_k, top_p)
    logprobs = jax.nn.log_softmax(scaled)
    noise = jax.vmap(lambda k, i: jax.random.gumbel(jax.random.fold_in(k, i), logits.shape[1:], logits.dtype))(
        jax.random.wrap_key_data(key, impl="threefry2x32"), index
    )
    ids = jnp.argmax(logprobs + jnp.where(greedy[:, None], 0.0, noise), axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]
    return ids, jnp.where(greedy, 0.0, chosen)


def truncate_logits(
    logits: Float[Array, "slots vocab"], top_k: Int[Array, "slots"], top_p: Float[Array, "slots"]
) -> Float[Array, "slots vocab"]:
    """Return the logits with −inf outside the k most likely ids, and outside the nucleus of mass p among those."""
    vocab = logits.shape[1]
    ranked = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    kept = jnp.arange(vocab) < jnp.where(top_k > 0, top_k, vocab)[:, None]
    probabilities = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    # The most likely id stays, also where p rounds to 0 in float32.
    last = jnp.take_along_axis(ranked, jnp.maximum(kept.sum(-1, keepdims=True), 1) - 1, axis=-1)
    return jnp.where(logits >= last, logits, -jnp.inf)


def matches_stop(tail: Int[Array, "slots width"], stops: Int[Array, "slots stops width"]) -> Bool[Array, "slots"]:
    """Return whether the response so far ends with one of the stop sequences of its slot."""
    used = stops != NO_TOKEN
    equal = (stops == tail[:, None, :]) | ~used
    return jnp.any(equal.all(-1) & used.any(-1), axis=-1)

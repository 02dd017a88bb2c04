"""What is decided on the device for each sampled token: which one, its log-probability, whether the response ends."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The distribution a response is sampled from.

    Attributes:
      temperature: logits are divided by it; 0 is greedy.
      top_k: only the k likeliest ids (more where several are equal to the last); 0 for all.
      top_p: only the likeliest ids whose probabilities sum to p, the one that reaches it included; 1 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def fault(self) -> str | None:
        """What is wrong with it, or None."""
        if not 0 <= self.temperature < float("inf"):
            return f"temperature is {self.temperature}; it must be 0 (greedy) or positive"
        if self.top_k < 0:
            return f"top_k is {self.top_k}; it must be 0 (all) or positive"
        if not 0 < self.top_p <= 1:
            return f"top_p is {self.top_p}; it must lie in (0, 1]"
        return None


def sample(
    logits: Float[Array, "slots vocab"],
    temperature: Float[Array, "slots"],
    top_k: Int[Array, "slots"],
    top_p: Float[Array, "slots"],
    key: UInt32[Array, "slots 2"],
    index: Int[Array, "slots"],
) -> tuple[Int[Array, "slots"], Float[Array, "slots"]]:
    """Samples one id per slot by Gumbel-max from softmax(logits / temperature), keyed by (slot's key, token index).

    Returns:
      ids, and their log-probabilities under the distribution sampled from (0 where greedy: a point mass).
    """
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    some = ((top_k > 0) | (top_p < 1)) & ~greedy
    # The sort is a path of its own: who asks for neither does not pay for it.
    scaled = jax.lax.cond(some.any(), without_tail, lambda scaled, k, p: scaled, scaled, top_k, top_p)
    logprobs = jax.nn.log_softmax(scaled)
    noise = jax.vmap(lambda k, i: jax.random.gumbel(jax.random.fold_in(k, i), logits.shape[1:], logits.dtype))(
        jax.random.wrap_key_data(key, impl="threefry2x32"), index
    )
    ids = jnp.argmax(logprobs + jnp.where(greedy[:, None], 0.0, noise), axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]
    return ids, jnp.where(greedy, 0.0, chosen)


def without_tail(
    logits: Float[Array, "slots vocab"], top_k: Int[Array, "slots"], top_p: Float[Array, "slots"]
) -> Float[Array, "slots vocab"]:
    """Logits with −inf for ids outside the k likeliest, and outside the nucleus of mass p of what is left."""
    vocab = logits.shape[1]
    ranked = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    kept = jnp.arange(vocab) < jnp.where(top_k > 0, top_k, vocab)[:, None]
    probabilities = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    # The likeliest stays, also where float32 takes p for 0.
    last = jnp.take_along_axis(ranked, jnp.maximum(kept.sum(-1, keepdims=True), 1) - 1, axis=-1)
    return jnp.where(logits >= last, logits, -jnp.inf)


def matches_stop(tail: Int[Array, "slots width"], stops: Int[Array, "slots stops width"]) -> Bool[Array, "slots"]:
    """True where the response so far ends with one of the slot's stop sequences."""
    used = stops != NO_TOKEN
    equal = (stops == tail[:, None, :]) | ~used
    return jnp.any(equal.all(-1) & used.any(-1), axis=-1)

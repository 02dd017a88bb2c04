"""Policy and value losses of loss tokens: ratio × clip, both chosen by name. The aggregate is in the weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentr1_jax.learner.batch import LossTokens
from agentr1_jax.learner.config import LossConfig
from agentr1_jax.learner.ratios import log_ratio


def policy_loss(
    config: LossConfig, logprob: Float[Array, "rows tokens"], loss_tokens: LossTokens
) -> tuple[Float[Array, "rows tokens"], Float[Array, "rows tokens"], Float[Array, "rows tokens"]]:
    """Return the loss of each token, before weighting.

    `ppo`/`asymmetric`: max(−Aρ, −A·clip(ρ)); `dual`: as `asymmetric`, and for A < 0 at most −A·c;
    `cispo`: −sg(clip ρ)·A·log π; `sapo`: −(4/τ)·σ(τ(ρ − 1))·A, τ by the sign of A (arXiv 2511.20347); `none`: −A·log π.

    Returns:
      loss, log ρ, and 1 where the clip was active, else 0 (`sapo` has none).

    Raises:
      ValueError: loss tokens without the `log_ratio` that the ratio needs; when traced.
    """
    advantage = loss_tokens.advantage
    if config.clip == "none":
        return -advantage * logprob, jnp.zeros_like(logprob), jnp.zeros_like(logprob)
    log_rho = log_ratio(config.ratio, logprob, loss_tokens)
    if config.clip == "sapo":
        # Far below this bound the gate has reached 1; an infinite ρ would make its gradient NaN.
        rho = jnp.exp(jnp.minimum(log_rho, 20.0))
        tau = jnp.where(advantage > 0, config.sapo_positive, config.sapo_negative).astype(rho.dtype)
        return -4 / tau * jax.nn.sigmoid(tau * (rho - 1)) * advantage, log_rho, jnp.zeros_like(logprob)
    rho = jnp.exp(log_rho)
    clipped = jnp.clip(rho, 1 - config.clip_low, 1 + config.clip_high)
    active = (-advantage * clipped > -advantage * rho).astype(logprob.dtype)
    if config.clip == "cispo":
        return -jax.lax.stop_gradient(clipped) * advantage * logprob, log_rho, active
    loss = jnp.maximum(-advantage * rho, -advantage * clipped)
    if config.clip == "dual":
        loss = jnp.where(advantage < 0, jnp.minimum(loss, -advantage * config.dual_c), loss)
    return loss, log_rho, active


def value_loss(
    config: LossConfig, value: Float[Array, "rows tokens"], loss_tokens: LossTokens
) -> Float[Array, "rows tokens"]:
    """Return ½·max((V − R)², (clip(V, V_old ± c) − R)²) of each token, before weighting."""
    old, target = loss_tokens.old_value, loss_tokens.value_target
    assert old is not None and target is not None, "loss tokens without CRITIC_FIELDS"
    near = jnp.clip(value, old - config.value_clip, old + config.value_clip)
    return 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2)

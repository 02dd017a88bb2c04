"""Losses of loss tokens, chosen by name: ratio × clip of the policy, value, KL. The aggregate is in the loss weights.

The ratio ρ is between the policy and the old policy, by unit: token, step, trajectory, or CAPO's centred step.
Whatever the unit, the value of ρ is the unit's and its gradient flows through each token: ∇ log ρ = ∇ log π.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.learner.batch import LossTokens
from agentr1_jax.learner.config import KLEstimate, LossConfig

MINIBATCH_RATIOS = ("trajectory", "centred_step")
"""Ratios whose value takes a forward pass over the whole minibatch."""


def policy_loss(
    config: LossConfig, logprob: Float[Array, "rows tokens"], loss_tokens: LossTokens
) -> tuple[Float[Array, "rows tokens"], Float[Array, "rows tokens"], Float[Array, "rows tokens"]]:
    """Return the loss of each token, before weighting.

    `ppo`/`asymmetric`: max(−Aρ, −A·clip(ρ)); `dual`: as `asymmetric`, and for A < 0 at most −A·c;
    `cispo`: −sg(clip ρ)·A·log π; `sapo`: −(4/τ)·σ(τ(ρ − 1))·A, τ by the sign of A (arXiv 2511.20347); `none`: −A·log π.
    `gmpo`: −Aρ, ρ of the log-ratios of tokens that `token_log_ratio` clips (GMPO, arXiv 2507.20673).
    `dppo_tv`/`dppo_kl`: −sg(min(ρ, c))·A·log π, 0 where `_leaves_trust_region` (DPPO, arXiv 2602.04879).

    Returns:
      loss, log ρ, and 1 where the clip was active, else 0 (`sapo` has none).
    """
    advantage = loss_tokens.advantage
    if config.clip == "none":
        return -advantage * logprob, jnp.zeros_like(logprob), jnp.zeros_like(logprob)
    log_rho = log_ratio(config, logprob, loss_tokens)
    if config.clip == "sapo":
        # Far below this bound the gate has reached 1; an infinite ρ would make its gradient NaN.
        rho = jnp.exp(jnp.minimum(log_rho, 20.0))
        tau = jnp.where(advantage > 0, config.sapo_positive, config.sapo_negative).astype(rho.dtype)
        return -4 / tau * jax.nn.sigmoid(tau * (rho - 1)) * advantage, log_rho, jnp.zeros_like(logprob)
    rho = jnp.exp(log_rho)
    if config.clip == "gmpo":
        free = jnp.where(loss_tokens.is_action, logprob - loss_tokens.old_logprob, 0)
        active = (token_log_ratio(config, logprob, loss_tokens) != free).astype(logprob.dtype)
        return -advantage * rho, log_rho, active
    if config.clip in ("dppo_tv", "dppo_kl"):
        leaves = _leaves_trust_region(config, logprob, loss_tokens)
        bounded = jax.lax.stop_gradient(jnp.minimum(rho, config.dual_c))
        return jnp.where(leaves, 0, -bounded * advantage * logprob), log_rho, leaves.astype(logprob.dtype)
    clipped = jnp.clip(rho, 1 - config.clip_low, 1 + config.clip_high)
    active = (-advantage * clipped > -advantage * rho).astype(logprob.dtype)
    if config.clip == "cispo":
        return -jax.lax.stop_gradient(clipped) * advantage * logprob, log_rho, active
    loss = jnp.maximum(-advantage * rho, -advantage * clipped)
    if config.clip == "dual":
        loss = jnp.where(advantage < 0, jnp.minimum(loss, -advantage * config.dual_c), loss)
    return loss, log_rho, active


def token_log_ratio(
    config: LossConfig, logprob: Float[Array, "*shape"], loss_tokens: LossTokens
) -> Float[Array, "*shape"]:
    """Return z = log π − log π_old of each token; 0 where `is_action` is False.

    With the clip `gmpo` it is clipped before the ratio of its unit is formed: min(z, clip_high) where A > 0, else
    max(z, −clip_low), bounds of log ρ (published: 0.4); a clipped token has no gradient.
    """
    z = jnp.where(loss_tokens.is_action, logprob - loss_tokens.old_logprob, 0)
    if config.clip != "gmpo":
        return z
    return jnp.where(loss_tokens.advantage > 0, jnp.minimum(z, config.clip_high), jnp.maximum(z, -config.clip_low))


def log_ratio(
    config: LossConfig, logprob: Float[Array, "rows tokens"], loss_tokens: LossTokens
) -> Float[Array, "rows tokens"]:
    """Return log ρ of each loss token; 0 where `is_action` is False.

    The update sets `is_action` of whatever it trains: where an ablation trains observation tokens, each has a ratio of
    its own (`token`), or takes part in that of its step or trajectory (`step`, `trajectory`, `centred_step`).

    `token`: z of `token_log_ratio`.
    `step`: log s = sg[mean of z over the step's tokens] + z − sg[z], clamped to ≤ 10, so that the value is the step's
    and the gradient flows through each token (GSPO, arXiv 2507.18071).
    `trajectory`, `centred_step`: the same with `loss_tokens.log_ratio` (see `minibatch_log_ratio`) as the value, since
    a trajectory, and the mean of a minibatch, spread over rows and microbatches.
    """
    z = token_log_ratio(config, logprob, loss_tokens)
    if config.ratio == "token":
        return z
    if config.ratio == "step":
        value = jax.lax.stop_gradient(_mean_over_steps(z, loss_tokens.is_action, loss_tokens.step))
    else:
        assert loss_tokens.log_ratio is not None, "loss tokens without minibatch_log_ratio"
        value = loss_tokens.log_ratio
    through = z - jax.lax.stop_gradient(z)
    return jnp.where(loss_tokens.is_action, jnp.minimum(value + through, 10.0), 0)


def _leaves_trust_region(
    config: LossConfig, logprob: Float[Array, "rows tokens"], loss_tokens: LossTokens
) -> Bool[Array, "rows tokens"]:
    """Return True where DPPO masks a token: the policy has moved too far, and the gradient would move it further.

    Over the sampled token and all others together, whatever the unit of ρ: `dppo_tv` bounds π − π_old (published: by
    0.15 either way), `dppo_kl` the KL(π_old‖π) of the two outcomes in nats (published: 0.05). `clip_high` is the bound
    where A > 0, `clip_low` elsewhere.
    """
    up, old_logprob = loss_tokens.advantage > 0, loss_tokens.old_logprob
    bound = jnp.where(up, config.clip_high, config.clip_low)
    p, old = jnp.exp(logprob), jnp.exp(old_logprob)
    if config.clip == "dppo_tv":
        return jnp.where(up, p - old, old - p) > bound
    rest, old_rest = (jnp.maximum(-jnp.expm1(x), 1e-8) for x in (logprob, old_logprob))
    divergence = old * (old_logprob - logprob) + old_rest * jnp.log(old_rest / rest)
    return (divergence > bound) & jnp.where(up, p > old, p < old)


def _mean_over_steps(
    x: Float[Array, "rows tokens"], mask: Array, step: Int[Array, "rows tokens"]
) -> Float[Array, "rows tokens"]:
    """Mean of x over the masked tokens of each step; a step is never split over rows."""
    changes = jnp.pad(step[:, 1:] != step[:, :-1], ((0, 0), (1, 0)))
    local = jnp.cumsum(changes, axis=1)

    def one_row(x: Array, mask: Array, local: Array) -> Array:
        n = x.shape[0]
        total = jax.ops.segment_sum(jnp.where(mask, x, 0), local, n)
        count = jax.ops.segment_sum(mask.astype(x.dtype), local, n)
        return (total / jnp.maximum(count, 1))[local]

    return jax.vmap(one_row)(x, mask, local)


def minibatch_log_ratio(
    config: LossConfig, logprob: Float[Array, "*rows tokens"], loss_tokens: LossTokens
) -> Float[Array, "*rows tokens"]:
    """Return the value of log ρ that takes the whole minibatch (`LossTokens.log_ratio`); 0 where `is_action` is False.

    `trajectory`: mean of z over all action tokens of the trajectory, z = log π − log π_old of `token_log_ratio`.
    `centred_step`: CAPO's ratio of an action, which is a step of L_t action tokens (figure 2 of its paper: centring,
    1/√L_t, mean restoration), log w_t = μ + (1/√L_t)·Σⱼ (zⱼ − μ), μ the mean of z over the minibatch: a drift that all
    tokens share counts once, at any length, and independent noise has the variance of a token's. Its loss code is
    unpublished. OUR READINGS: μ is over tokens (`ratio_mean=token`) or over the steps' means (`step`); the gradient
    flows through each token as for `step`, not scaled by 1/√L_t ("retaining token-level gradient computation"), so that
    the aggregate alone decides how much an action of L_t tokens weighs.

    Args:
      config: `ratio` is one of `MINIBATCH_RATIOS`; `ratio_mean` is of `centred_step`.
      logprob: log π of one forward pass over the minibatch, [microbatches, rows, tokens] (or any leading shape).
      loss_tokens: of the same shape; step and trajectory indices are unique over the minibatch and all its processes,
        and below its number of loss tokens. Only tokens with `is_action` take part.
    """
    mask = loss_tokens.is_action.ravel()
    z = token_log_ratio(config, logprob, loss_tokens).ravel()
    unit = (loss_tokens.trajectory if config.ratio == "trajectory" else loss_tokens.step).ravel()
    # Padding, of unit -1, adds 0 wherever it lands.
    total = jax.ops.segment_sum(z, unit, mask.size)
    count = jax.ops.segment_sum(mask.astype(z.dtype), unit, mask.size)
    length = jnp.maximum(count, 1)
    if config.ratio == "trajectory":
        value = total / length
    else:
        by_step = config.ratio_mean == "step"
        mean = jnp.sum(total / length if by_step else total) / jnp.maximum(jnp.sum(count > 0 if by_step else count), 1)
        value = mean + (total - count * mean) / jnp.sqrt(length)
    return jnp.where(mask, value[unit], 0).reshape(logprob.shape)


def value_loss(
    config: LossConfig, value: Float[Array, "rows tokens"], loss_tokens: LossTokens
) -> Float[Array, "rows tokens"]:
    """Return ½·max((V − R)², (clip(V, V_old ± c) − R)²) of each token, before weighting."""
    old, target = loss_tokens.old_value, loss_tokens.value_target
    assert old is not None and target is not None, "loss tokens without CRITIC_FIELDS"
    near = jnp.clip(value, old - config.value_clip, old + config.value_clip)
    return 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2)


def kl_estimate(
    kind: KLEstimate, logprob: Float[Any, "*shape"], ref_logprob: Float[Any, "*shape"]
) -> Float[Any, "*shape"]:
    """Estimate KL(π‖π_ref) from each sampled token; x = log π − log π_ref (http://joschu.net/blog/kl-approx.html).

    `k1` = x; `k2` = x²/2; `k3` = e⁻ˣ + x − 1; `abs` = |x|. On samples of π: as a loss, k2 has the gradient of the KL in
    expectation and k1 none; as a reward, k1 has it. `k1+`, `k3+`: the value of k1 or k3, with the gradient of k2 (the
    straight-through estimates of verl). Both log-probs are numpy or JAX arrays, and so is the result.
    """
    x = logprob - ref_logprob
    if kind == "k2":
        return x**2 / 2
    if kind == "abs":
        return abs(x)
    # Nearly all tokens have a small x, where e⁻ˣ − 1 would lose its digits.
    value = x if kind in ("k1", "k1+") else x.__array_namespace__().expm1(-x) + x
    if not kind.endswith("+") or isinstance(x, np.ndarray):
        return value
    square = x**2 / 2
    return square + jax.lax.stop_gradient(value - square)


def kl_rewards(
    kind: KLEstimate, old_logprob: Float[np.ndarray, "tokens"], ref_logprob: Float[np.ndarray, "tokens"], coef: float
) -> Float[np.ndarray, "tokens"]:
    """Return the reward −coef·KL of each token, float32, where the KL is in the reward and not in the loss."""
    kl = kl_estimate(kind, old_logprob.astype(np.float64), ref_logprob.astype(np.float64))
    return (-coef * kl).astype(np.float32)


def next_kl_coef(coef: float, kl: float, trajectories: int, *, target: float, horizon: float) -> float:
    """Return the next coefficient of the KL reward: coef·(1 + clip(kl/target − 1, ±0.2)·trajectories/horizon).

    From Ziegler et al. 2019 (arXiv 1909.08593). A KL that is not a number leaves the coefficient as it is.

    Args:
      coef: the present coefficient.
      kl: mean KL of the batch that it was used for, nats.
      trajectories: of that batch.
      target: KL aimed at, nats.
      horizon: trajectories in which the coefficient changes by at most 20 %.

    Raises:
      ValueError: a horizon so short that the coefficient may reach 0.
    """
    if not horizon > trajectories / 5:
        raise ValueError(
            f"the horizon of the adaptive KL is {horizon}, with {trajectories} trajectories a batch; "
            "it must be above a fifth of them, or the coefficient falls to 0"
        )
    if math.isnan(kl):
        return coef
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * trajectories / horizon)

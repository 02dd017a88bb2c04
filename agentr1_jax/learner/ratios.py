"""The ratio ρ between the policy and the old policy, by unit: token, step, trajectory, or CAPO's centred step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentr1_jax.learner.batch import LossTokens
from agentr1_jax.learner.config import RATIOS, Ratio

MINIBATCH_RATIOS = ("trajectory", "capo")
"""Ratios whose value takes a forward pass over the whole minibatch."""


def log_ratio(
    kind: Ratio, logprob: Float[Array, "rows tokens"], loss_tokens: LossTokens
) -> Float[Array, "rows tokens"]:
    """Return log ρ of each loss token; 0 where `is_action` is False.

    The update sets `is_action` of whatever it trains: where an ablation trains observation tokens, each has a ratio of
    its own (`token`), or takes part in the mean of its step or trajectory (`step`, `trajectory`, `capo`).

    `token`: log π − log π_old.
    `step`: log s = sg[mean over the step's tokens of log π − log π_old] + log π − sg[log π], clamped to ≤ 10, so
    that the value is the step's and the gradient flows through each token (GSPO, arXiv 2507.18071).
    `trajectory`, `capo`: the same with `loss_tokens.log_ratio` (see `minibatch_log_ratio`) as the value, since a
    trajectory spreads over rows and microbatches.

    Raises:
      ValueError: unknown kind, or loss tokens without the `log_ratio` that it needs; when traced.
    """
    difference = jnp.where(loss_tokens.is_action, logprob - loss_tokens.old_logprob, 0)
    if kind == "token":
        return difference
    if kind == "step":
        value = jax.lax.stop_gradient(_mean_over_steps(difference, loss_tokens.is_action, loss_tokens.step))
    elif kind not in MINIBATCH_RATIOS:
        raise ValueError(f"unknown loss.ratio {kind!r}; choose one of {', '.join(RATIOS)}")
    elif loss_tokens.log_ratio is None:
        raise ValueError(
            f"loss.ratio {kind!r} takes its value from the whole minibatch, but these loss tokens have no "
            "log_ratio; set it to minibatch_log_ratio of one forward pass over the minibatch"
        )
    else:
        value = loss_tokens.log_ratio
    through = logprob - jax.lax.stop_gradient(logprob)
    return jnp.where(loss_tokens.is_action, jnp.minimum(value + through, 10.0), 0)


def minibatch_log_ratio(
    kind: Ratio, logprob: Float[Array, "*rows tokens"], loss_tokens: LossTokens
) -> Float[Array, "*rows tokens"]:
    """Return the value of log ρ that takes the whole minibatch (`LossTokens.log_ratio`); 0 where `is_action` is False.

    `trajectory`: mean over all action tokens of the trajectory of log π − log π_old.
    `capo`: an action is a step; z_t = (1/√L_t)·Σ over its L_t action tokens of (log π − log π_old), and
    log s_t = z_t − mean of z over the minibatch's steps, each step once. This is OUR READING of CAPO (August 2026),
    whose paper says "per-action ratio centred over the batch and scaled by 1/√L_t" and whose loss code is unpublished.

    Args:
      kind: one of `MINIBATCH_RATIOS`.
      logprob: log π of one forward pass over the minibatch, [microbatches, rows, tokens] (or any leading shape).
      loss_tokens: of the same shape; step and trajectory indices are unique over the minibatch and all its processes,
        and below its number of loss tokens. Only tokens with `is_action` take part.

    Raises:
      ValueError: unknown kind; when traced.
    """
    if kind not in MINIBATCH_RATIOS:
        raise ValueError(f"no minibatch has a ratio {kind!r}; choose one of {', '.join(MINIBATCH_RATIOS)}")
    mask = loss_tokens.is_action.ravel()
    difference = jnp.where(mask, (logprob - loss_tokens.old_logprob).ravel(), 0)
    unit = (loss_tokens.trajectory if kind == "trajectory" else loss_tokens.step).ravel()
    # Padding, of unit -1, adds 0 wherever it lands.
    total = jax.ops.segment_sum(difference, unit, mask.size)
    count = jax.ops.segment_sum(mask.astype(difference.dtype), unit, mask.size)
    if kind == "trajectory":
        value = total / jnp.maximum(count, 1)
    else:
        z = total / jnp.sqrt(jnp.maximum(count, 1))
        value = z - jnp.sum(z) / jnp.maximum(jnp.sum(count > 0), 1)
    return jnp.where(mask, value[unit], 0).reshape(logprob.shape)


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

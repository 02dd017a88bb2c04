"""The ratio ρ between the policy and the old policy, by unit: token, step, trajectory, or CAPO's centred step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentr1_jax.learner.batch import Reads

RATIOS = ("token", "step", "trajectory", "capo")
MINIBATCH_RATIOS = ("trajectory", "capo")
"""Those whose value takes a forward pass over the whole minibatch."""


def log_ratio(kind: str, logprob: Float[Array, "rows reads"], reads: Reads) -> Float[Array, "rows reads"]:
    """log ρ of each read; 0 where it is no action.

    The update calls action whatever it trains: where an ablation trains observation tokens, each has a ratio of its own
    (`token`), or takes part in the mean of its step or trajectory like any other (`step`, `trajectory`, `capo`).

    `token`: log π − log π_old.
    `step`: log s = sg[mean over the step's tokens of log π − log π_old] + log π − sg[log π], clamped to ≤ 10, so
    that the value is the step's and the gradient flows through each token (GSPO, arXiv 2507.18071).
    `trajectory`, `capo`: the same with `reads.log_ratio` (see `minibatch_log_ratio`) as the value, since a trajectory
    spreads over rows and microbatches.

    Raises:
      ValueError: unknown kind, or reads without the `log_ratio` that theirs needs; when traced.
    """
    difference = jnp.where(reads.is_action, logprob - reads.old_logprob, 0)
    if kind == "token":
        return difference
    if kind == "step":
        value = jax.lax.stop_gradient(_mean_over_steps(difference, reads.is_action, reads.step))
    elif kind not in MINIBATCH_RATIOS:
        raise ValueError(f"unknown loss.ratio {kind!r}; choose one of {', '.join(RATIOS)}")
    elif reads.log_ratio is None:
        raise ValueError(
            f"loss.ratio {kind!r} takes its value from the whole minibatch, but these reads have no log_ratio; "
            "fill it with minibatch_log_ratio of one forward pass over the minibatch"
        )
    else:
        value = reads.log_ratio
    through = logprob - jax.lax.stop_gradient(logprob)
    return jnp.where(reads.is_action, jnp.minimum(value + through, 10.0), 0)


def minibatch_log_ratio(kind: str, logprob: Float[Array, "*rows reads"], reads: Reads) -> Float[Array, "*rows reads"]:
    """The value of log ρ that takes the whole minibatch: `Reads.log_ratio`, at every action read; 0 elsewhere.

    `trajectory`: mean over all action tokens of the trajectory of log π − log π_old.
    `capo`: an action is a step; z_t = (1/√L_t)·Σ over its L_t action tokens of (log π − log π_old), and
    log s_t = z_t − mean of z over the minibatch's steps, each step once. This is OUR READING of CAPO (August 2026),
    whose paper says "per-action ratio centred over the batch and scaled by 1/√L_t" and whose loss code is unpublished.

    Args:
      kind: one of `MINIBATCH_RATIOS`.
      logprob: log π of one forward pass over the minibatch, [microbatches, rows, reads] (or any leading shape).
      reads: of the same shape; the ids of steps and trajectories are unique over the minibatch and all its processes,
        and below its number of reads. Only reads with `is_action` take part.

    Raises:
      ValueError: unknown kind; when traced.
    """
    if kind not in MINIBATCH_RATIOS:
        raise ValueError(f"no minibatch has a ratio {kind!r}; choose one of {', '.join(MINIBATCH_RATIOS)}")
    mask = reads.is_action.ravel()
    difference = jnp.where(mask, (logprob - reads.old_logprob).ravel(), 0)
    unit = (reads.trajectory if kind == "trajectory" else reads.step).ravel()
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
    x: Float[Array, "rows reads"], mask: Array, step: Int[Array, "rows reads"]
) -> Float[Array, "rows reads"]:
    """Mean of x over the masked reads of each step; a step is never split over rows."""
    changes = jnp.pad(step[:, 1:] != step[:, :-1], ((0, 0), (1, 0)))
    local = jnp.cumsum(changes, axis=1)

    def one_row(x: Array, mask: Array, local: Array) -> Array:
        n = x.shape[0]
        total = jax.ops.segment_sum(jnp.where(mask, x, 0), local, n)
        count = jax.ops.segment_sum(mask.astype(x.dtype), local, n)
        return (total / jnp.maximum(count, 1))[local]

    return jax.vmap(one_row)(x, mask, local)

"""The few operations every scheme is made of: one linear recurrence, segment statistics, whitening, broadcasting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.credit.batch import Credit, CreditBatch


def backward_recurrence(x: Float[Array, "n"], decay: Float[Array, "n"]) -> Float[Array, "n"]:
    """yₖ = xₖ + dₖ·yₖ₊₁, with y beyond the end = 0; d = 0 cuts the stream (a trajectory's end).

    An associative scan: returns, GAE and every discounted sum of this room are instances of it.
    """

    def combine(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        x_later, d_later = later
        x_earlier, d_earlier = earlier
        return x_earlier + d_earlier * x_later, d_earlier * d_later

    y, _ = jax.lax.associative_scan(combine, (x, decay), reverse=True)
    return y


def shift_back(x: Float[Array, "n"]) -> Float[Array, "n"]:
    """xₖ₊₁ at k; 0 at the end."""
    return jnp.concatenate([x[1:], jnp.zeros((1,), x.dtype)])


def continues(segment: Int[Array, "n"]) -> Bool[Array, "n"]:
    """True at k if k + 1 belongs to the same segment."""
    return jnp.concatenate([segment[1:] == segment[:-1], jnp.zeros((1,), bool)])


def segment_moments(
    x: Float[Array, "n"], segment: Int[Array, "n"], segments: int
) -> tuple[Float[Array, "s"], Float[Array, "s"], Float[Array, "s"]]:
    """Count, mean and sample standard deviation (n − 1) of each segment, with one extra segment for padding.

    A segment of one or no element has standard deviation 0. The deviation is taken about the mean (two passes), so
    that equal elements give exactly 0 up to rounding of the mean.
    """
    count = jax.ops.segment_sum(jnp.ones_like(x), segment, segments + 1)
    mean = jax.ops.segment_sum(x, segment, segments + 1) / jnp.maximum(count, 1)
    square = jax.ops.segment_sum((x - mean[segment]) ** 2, segment, segments + 1)
    return count, mean, jnp.sqrt(square / jnp.maximum(count - 1, 1))


def whiten(x: Float[Array, "n"], mask: Bool[Array, "n"]) -> Float[Array, "n"]:
    """(x − mean) / √(var + 1e-8) over the masked elements, var with n − 1; 0 elsewhere.

    One element gives 0; equal elements give 0.
    """
    count = mask.sum()
    mean = jnp.where(mask, x, 0).sum() / jnp.maximum(count, 1)
    # Rounding of the mean must not be blown up where nothing differs, hence the exact test.
    differ = jnp.max(jnp.where(mask, x, -jnp.inf)) > jnp.min(jnp.where(mask, x, jnp.inf))
    centred = jnp.where(mask & differ, x - mean, 0)
    variance = (centred**2).sum() / jnp.maximum(count - 1, 1)
    return centred * jax.lax.rsqrt(variance + 1e-8)


def of_step(batch: CreditBatch, per_step: Float[Array, "steps"]) -> Float[Array, "tokens"]:
    """A value per step, broadcast to the step's sampled tokens; 0 elsewhere."""
    padded = jnp.concatenate([per_step, jnp.zeros((1,), per_step.dtype)])
    return jnp.where(batch.trained, padded[batch.token_step], 0)


def of_trajectory(batch: CreditBatch, per_trajectory: Float[Array, "trajectories"]) -> Float[Array, "steps"]:
    """A value per trajectory, broadcast to its steps; 0 for padding."""
    padded = jnp.concatenate([per_trajectory, jnp.zeros((1,), per_trajectory.dtype)])
    return padded[batch.traj_of_step]


def without_critic(batch: CreditBatch, advantages: Float[Array, "tokens"]) -> Credit:
    """The credit of a scheme that gives the critic no targets."""
    return Credit(
        advantages=advantages,
        value_targets=jnp.zeros_like(advantages),
        value_mask=jnp.zeros(advantages.shape, bool),
    )

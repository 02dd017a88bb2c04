"""Schemes that compare the samples of one task row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agentr1_jax.credit.batch import Credit, CreditBatch
from agentr1_jax.credit.primitives import of_step, of_trajectory, segment_moments, without_critic
from agentr1_jax.credit.registry import register


@register("grpo")
def grpo(batch: CreditBatch) -> Credit:
    """Aᵢ = (Rᵢ − mean_g) / (std_g + 1e-6), broadcast to every sampled token of trajectory i.

    The unit of mean and std (n − 1) is the trajectory, whatever its number of steps. A lone member of a group and
    a group of equal rewards get 0.

    Source: DeepSeekMath, arXiv 2402.03300.
    """
    count, mean, std = segment_moments(batch.outcome, batch.group, batch.trajectories)
    advantage = (batch.outcome - mean[batch.group]) / (std[batch.group] + 1e-6)
    # Rounding of the mean must not turn equal rewards into an advantage, hence the exact test.
    highest = jax.ops.segment_max(batch.outcome, batch.group, batch.trajectories + 1)
    lowest = jax.ops.segment_min(batch.outcome, batch.group, batch.trajectories + 1)
    alive = batch.real_trajectory & ((count > 1) & (highest > lowest))[batch.group]
    advantage = jnp.where(alive, advantage, 0)
    return without_critic(batch, of_step(batch, of_trajectory(batch, advantage)))

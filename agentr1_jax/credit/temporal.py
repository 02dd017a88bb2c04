"""Schemes that follow time: generalised advantage estimation over tokens or over steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentr1_jax.credit.batch import Credit, CreditBatch
from agentr1_jax.credit.primitives import backward_recurrence, continues, of_step, of_trajectory, shift_back, whiten
from agentr1_jax.credit.registry import register


@register("step_gae", needs_critic=True)
def step_gae(batch: CreditBatch, *, gamma: float = 1.0, lam: float = 1.0) -> Credit:
    """GAE whose time is the step: one value before each response, one advantage for all its tokens.

    δₜ = rₜ + γVₜ₊₁ − Vₜ,  Aₜ = δₜ + γλAₜ₊₁, with V_t the critic at the last prompt token of step t and V after the last
    step the bootstrap value. Advantages are whitened over steps and broadcast to the step's tokens. The critic's target
    is Rₜ = Aₜ + Vₜ (A before whitening), at that one position only. rₜ includes the rewards of the step's tokens.

    Source: StepPO, arXiv 2604.18401.
    """
    assert batch.values is not None
    value = _sum_to_steps(batch, jnp.where(batch.first_token, batch.values, 0))
    reward = batch.rewards + _sum_to_steps(batch, jnp.where(batch.trained, batch.token_rewards, 0))
    goes_on = continues(batch.traj_of_step)
    next_value = jnp.where(goes_on, shift_back(value), of_trajectory(batch, batch.bootstrap))
    delta = jnp.where(batch.real_step, reward + gamma * next_value - value, 0)
    advantage = backward_recurrence(delta, gamma * lam * goes_on)
    return Credit(
        advantages=of_step(batch, whiten(advantage, batch.real_step)),
        value_targets=jnp.where(batch.first_token, of_step(batch, advantage + value), 0),
        value_mask=batch.first_token,
    )


@register("token_gae", needs_critic=True)
def token_gae(batch: CreditBatch, *, gamma: float = 1.0, lam: float = 1.0) -> Credit:
    """GAE whose time is the sampled token, over the whole trajectory.

    δₖ = rₖ + γVₖ₊₁ − Vₖ,  Aₖ = δₖ + γλAₖ₊₁. Tokens that were not sampled are skipped: the last token of step t
    bootstraps from the first token of step t + 1 (the "advantage mask" of Agent-R1). A step's reward falls on its last
    token. Advantages are whitened over tokens; the critic's target is Rₖ = Aₖ + Vₖ (A before whitening).

    Source: PPO, arXiv 1707.06347; Agent-R1, arXiv 2511.14460.
    """
    assert batch.values is not None
    trajectory = _trajectory_of_token(batch)
    goes_on = continues(trajectory)
    end_value = jnp.concatenate([batch.bootstrap, jnp.zeros((1,), batch.bootstrap.dtype)])[trajectory]
    reward = batch.token_rewards + jnp.where(batch.last_token, of_step(batch, batch.rewards), 0)
    # V at the next sampled token: skipped tokens hand on what follows them.
    handed = jnp.where(batch.trained, batch.values, jnp.where(goes_on, 0, end_value))
    value_from_here = backward_recurrence(handed, 1.0 * (goes_on & ~batch.trained))
    next_value = jnp.where(goes_on, shift_back(value_from_here), end_value)
    delta = jnp.where(batch.trained, reward + gamma * next_value - batch.values, 0)
    decay = jnp.where(batch.trained, gamma * lam, 1.0) * goes_on
    advantage = backward_recurrence(delta, decay)
    return Credit(
        advantages=whiten(advantage, batch.trained),
        value_targets=jnp.where(batch.trained, advantage + batch.values, 0),
        value_mask=batch.trained,
    )


def _sum_to_steps(batch: CreditBatch, per_token: Float[Array, "tokens"]) -> Float[Array, "steps"]:
    return jax.ops.segment_sum(per_token, batch.token_step, batch.steps + 1)[: batch.steps]


def _trajectory_of_token(batch: CreditBatch) -> Array:
    padded = jnp.concatenate([batch.traj_of_step, jnp.full((1,), batch.trajectories, batch.traj_of_step.dtype)])
    return padded[batch.token_step]

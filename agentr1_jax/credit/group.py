"""Schemes that compare the samples of one task row by their returns.

R_i is the sum of a trajectory's rewards; all tokens of the trajectory get one advantage. A lone member of a group and
a group of equal returns get exactly 0.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.credit.primitives import (
    Norm,
    Unit,
    Whitening,
    broadcast_to_steps,
    broadcast_to_tokens,
    center_by_group,
    group_ids,
    normalise_by_group,
    step_returns,
    sum_to_steps,
    whiten_tokens,
)
from agentr1_jax.credit.scheme import register
from agentr1_jax.validation import Fraction, NonNegative


@register("grpo", needs_samples=True)
def grpo(batch: TokenBatch, *, unit: Unit = "trajectory") -> Credit:
    """Aᵢ = (Rᵢ − mean_g) / (std_g + 1e-6), std with n − 1.

    The unit of mean and std is the trajectory, whatever its number of steps; `step` and `token` count a trajectory
    once for each of its steps or tokens, as code that keeps a row for each step does.

    Source: DeepSeekMath, arXiv 2402.03300.
    """
    return _one_advantage(batch, outcome_advantage(batch, "mean_std_norm", unit))


@register("dr_grpo", needs_samples=True)
def dr_grpo(batch: TokenBatch, *, unit: Unit = "trajectory") -> Credit:
    """Aᵢ = Rᵢ − mean_g; belongs with the loss aggregate `fixed`.

    Source: Dr.GRPO, arXiv 2503.20783.
    """
    return _one_advantage(batch, outcome_advantage(batch, "mean_norm", unit))


@register("rloo", needs_samples=True)
def rloo(batch: TokenBatch) -> Credit:
    """Aᵢ = n/(n − 1)·(Rᵢ − mean_g) = Rᵢ − mean of the others.

    Source: Kool et al. 2019; RLOO, arXiv 2402.14740.
    """
    centred, _, count = center_by_group(batch.returns, batch.group, batch.trajectories)
    return _one_advantage(batch, centred * count / jnp.maximum(count - 1, 1))


@register("reinforce_pp_baseline", needs_samples=True)
def reinforce_pp_baseline(batch: TokenBatch, *, unit: Unit = "trajectory", whiten: Whitening = "token") -> Credit:
    """Aᵢ = Rᵢ − mean_g, broadcast to tokens, then whitened over the tokens of the batch.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    advantages = _one_advantage(batch, outcome_advantage(batch, "mean_norm", unit)).advantages
    return Credit(whiten_tokens(batch, advantages, whiten))


@register("remax", needs_greedy=True)
def remax(batch: TokenBatch) -> Credit:
    """Aᵢ = Rᵢ − reward of the greedy rollout of the same row.

    Source: ReMax, arXiv 2310.10505.
    """
    assert batch.greedy_return is not None
    return _one_advantage(batch, jnp.where(batch.real_trajectory, batch.returns - batch.greedy_return, 0))


@register("opo", needs_samples=True)
def opo(batch: TokenBatch) -> Credit:
    """Aᵢ = Rᵢ − Σ lenᵢ·Rᵢ / Σ lenᵢ over the group, lenᵢ the trajectory's sampled tokens.

    The baseline of least variance where gradients of tokens are orthogonal and of equal norm.

    Source: OPO, arXiv 2505.23585.
    """
    return _one_advantage(batch, outcome_advantage(batch, "mean_norm", "token"))


@register("turn_grpo", needs_samples=True)
def turn_grpo(
    batch: TokenBatch,
    *,
    outcome_weight: NonNegative = 1.0,
    norm: Norm = "mean_norm",
    signal: Literal["reward", "return"] = "reward",
    gamma: Fraction = 1.0,
) -> Credit:
    """Aᵢₜ = norm of xᵢₜ among the steps of equal index t in the group + λ·norm of Rᵢ in the group.

    x is the `signal`: the step's `reward` r_t or its `return` G_t (which takes γ); λ is `outcome_weight`; norm is
    x − mean (`mean_norm`) or that over std + 1e-6 (`mean_std_norm`). BIASED where the policy decides when to stop: the
    steps at index t are then those of the samples that chose to go on.

    Source: MT-GRPO, arXiv 2505.11821.
    """
    reward = batch.rewards + sum_to_steps(batch, batch.token_rewards)
    x = reward if signal == "reward" else step_returns(batch, gamma)
    cell = jnp.where(batch.real_step, group_ids(batch.step_group, batch.step_index)[1], batch.steps)
    turn = normalise_by_group(x, cell, batch.steps, norm)
    outcome = broadcast_to_steps(batch, outcome_advantage(batch, norm, "trajectory"))
    return Credit(broadcast_to_tokens(batch, turn + outcome_weight * outcome))


def outcome_advantage(batch: TokenBatch, norm: Norm, unit: Unit) -> Float[Array, "trajectories"]:
    """Return R_i normalised in its group, where mean and standard deviation count each `unit` once."""
    count = {"step": batch.trajectory_steps, "token": batch.trajectory_tokens}
    weight = None if unit == "trajectory" else count[unit].astype(batch.returns.dtype)
    return normalise_by_group(batch.returns, batch.group, batch.trajectories, norm, weight)


def _one_advantage(batch: TokenBatch, advantage: Float[Array, "trajectories"]) -> Credit:
    """Give all tokens of a trajectory one advantage."""
    return Credit(broadcast_to_tokens(batch, broadcast_to_steps(batch, advantage)))

"""Schemes that compare the samples of one task row by their outcomes.

R_i is the sum of a trajectory's rewards; a scheme gives all its tokens one advantage. A lone member of a group and a
group of equal outcomes get exactly 0.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from agentr1_jax.credit.batch import Credit, CreditBatch
from agentr1_jax.credit.primitives import (
    classes,
    deviations,
    group_of_step,
    of_step,
    of_trajectory,
    sample_std,
    step_returns,
    sum_to_steps,
    whiten_tokens,
    without_critic,
)
from agentr1_jax.credit.registry import register


@register("grpo", needs_samples=True)
def grpo(batch: CreditBatch, *, unit: str = "trajectory") -> Credit:
    """Aᵢ = (Rᵢ − mean_g) / (std_g + 1e-6), std with n − 1.

    The unit of mean and std is the trajectory, whatever its number of steps; `step` and `token` count a trajectory
    once for each of its steps or tokens, as code that keeps a row for each step does.

    Source: DeepSeekMath, arXiv 2402.03300.
    """
    return _to_tokens(batch, outcome_advantage(batch, "mean_std_norm", unit))


@register("dr_grpo", needs_samples=True)
def dr_grpo(batch: CreditBatch, *, unit: str = "trajectory") -> Credit:
    """Aᵢ = Rᵢ − mean_g; belongs with the loss aggregate `fixed`.

    Source: Dr.GRPO, arXiv 2503.20783.
    """
    return _to_tokens(batch, outcome_advantage(batch, "mean_norm", unit))


@register("rloo", needs_samples=True)
def rloo(batch: CreditBatch) -> Credit:
    """Aᵢ = n/(n − 1)·(Rᵢ − mean_g) = Rᵢ − mean of the others.

    Source: Kool et al. 2019; RLOO, arXiv 2402.14740.
    """
    centred, _, count = deviations(batch.outcome, batch.group, batch.trajectories)
    return _to_tokens(batch, centred * count / jnp.maximum(count - 1, 1))


@register("reinforce_pp_baseline", needs_samples=True)
def reinforce_pp_baseline(batch: CreditBatch, *, unit: str = "trajectory", whiten: str = "token") -> Credit:
    """Aᵢ = Rᵢ − mean_g, broadcast to tokens, then whitened over the tokens of the batch.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    advantages = _to_tokens(batch, outcome_advantage(batch, "mean_norm", unit)).advantages
    return without_critic(batch, whiten_tokens(batch, advantages, whiten))


@register("remax", needs_greedy=True)
def remax(batch: CreditBatch) -> Credit:
    """Aᵢ = Rᵢ − reward of the greedy rollout of the same row.

    Source: ReMax, arXiv 2310.10505.
    """
    assert batch.greedy_reward is not None
    return _to_tokens(batch, jnp.where(batch.real_trajectory, batch.outcome - batch.greedy_reward, 0))


@register("opo", needs_samples=True)
def opo(batch: CreditBatch) -> Credit:
    """Aᵢ = Rᵢ − Σ lenᵢ·Rᵢ / Σ lenᵢ over the group, lenᵢ the trajectory's sampled tokens.

    The baseline of least variance where gradients of tokens are orthogonal and of equal norm.

    Source: OPO, arXiv 2505.23585.
    """
    return _to_tokens(batch, outcome_advantage(batch, "mean_norm", "token"))


@register("turn_grpo", needs_samples=True)
def turn_grpo(
    batch: CreditBatch,
    *,
    outcome_weight: float = 1.0,
    norm: str = "mean_norm",
    of: str = "reward",
    gamma: float = 1.0,
) -> Credit:
    """Aᵢₜ = norm of xᵢₜ among the steps of equal index t in the group + λ·norm of Rᵢ in the group.

    x is the step's `reward` r_t or its `return` G_t (which takes γ); λ is `outcome_weight`; norm is x − mean
    (`mean_norm`) or that over std + 1e-6 (`mean_std_norm`). BIASED where the policy decides when to stop: the steps at
    index t are then those of the samples that chose to go on.

    Source: MT-GRPO, arXiv 2505.11821.
    """
    reward = batch.rewards + sum_to_steps(batch, batch.token_rewards)
    x = reward if of == "reward" else step_returns(batch, gamma)
    cell = jnp.where(batch.real_step, classes(group_of_step(batch), batch.step_index)[1], batch.steps)
    turn = normalised(*deviations(x, cell, batch.steps), norm)
    outcome = of_trajectory(batch, outcome_advantage(batch, norm, "trajectory"))
    return without_critic(batch, of_step(batch, turn + outcome_weight * outcome))


def outcome_advantage(batch: CreditBatch, norm: str, unit: str) -> Float[Array, "trajectories"]:
    """R_i normalised in its group; the unit is what mean and std count once."""
    count = {"step": batch.steps_of_trajectory, "token": batch.tokens_of_trajectory}
    weight = None if unit == "trajectory" else count[unit].astype(batch.outcome.dtype)
    return normalised(*deviations(batch.outcome, batch.group, batch.trajectories, weight), norm)


def normalised(
    centred: Float[Array, "n"], variance: Float[Array, "n"], count: Float[Array, "n"], norm: str
) -> Float[Array, "n"]:
    """x − mean (`mean_norm`), or that over std + 1e-6, std with n − 1 (`mean_std_norm`)."""
    return centred if norm == "mean_norm" else centred / (sample_std(variance, count) + 1e-6)


def _to_tokens(batch: CreditBatch, per_trajectory: Float[Array, "trajectories"]) -> Credit:
    return without_critic(batch, of_step(batch, of_trajectory(batch, per_trajectory)))

"""Schemes that compare what followed equal states: steps of one group whose `state_key` agrees."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.credit.batch import Credit, CreditBatch
from agentr1_jax.credit.group import normalised, outcome_advantage
from agentr1_jax.credit.primitives import (
    classes,
    deviations,
    group_of_step,
    of_step,
    of_trajectory,
    step_returns,
    sum_to_steps,
    whiten_steps,
    without_critic,
)
from agentr1_jax.credit.registry import register

UNKNOWN, NO_STEP = -1, -2
"""Keys of what has none."""


@register("gigpo", needs_samples=True, needs_state_key=True)
def gigpo(
    batch: CreditBatch,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    norm: str = "mean_norm",
    unit: str = "trajectory",
) -> Credit:
    """Aᵢₜ = A^Eᵢ + w·A^Sᵢₜ.

    A^E is the outcome normalised in its group, over trajectories (`unit`); A^S the return Gₜ = rₜ + γGₜ₊₁ normalised
    among all steps of the group that start in the same state (own revisits included). norm is x − mean (`mean_norm`)
    or that over std + 1e-6 (`mean_std_norm`). A lone anchor, or a step without a key, has A^S = 0.

    Source: GiGPO, arXiv 2505.10978.
    """
    anchor = jnp.where(_known(batch), classes(group_of_step(batch), batch.state_key)[1], batch.steps)
    step = normalised(*deviations(step_returns(batch, gamma), anchor, batch.steps), norm)
    episode = of_trajectory(batch, outcome_advantage(batch, norm, unit))
    return without_critic(batch, of_step(batch, episode + step_weight * step))


@register("hgpo", needs_samples=True, needs_state_key=True)
def hgpo(batch: CreditBatch, *, gamma: float = 0.95, history: int = 2, alpha: float = 1.0) -> Credit:
    """Aᵢₜ = Σₖ wₖ·A^kᵢₜ / Σₖ wₖ over the levels k = 0..K at which the step has company, wₖ = (k + 1)^α.

    A^k is (Gₜ − mean) / (std + 1e-6), population std, among the steps of the group that agree in their state and in the
    k states before it (an earlier start agrees with an earlier start). K is `history`. A step alone at every level, or
    without a key, gets 0.

    Source: HGPO, arXiv 2602.22817.
    """
    returns, known = step_returns(batch, gamma), _known(batch)
    keys = [_key_before(batch, k) for k in range(history + 1)]
    total, weights = jnp.zeros_like(returns), jnp.zeros_like(returns)
    for k, path in enumerate(classes(group_of_step(batch), *keys)[1:]):
        known &= keys[k] != UNKNOWN
        centred, variance, count = deviations(returns, jnp.where(known, path, batch.steps), batch.steps)
        weight = jnp.where(count > 1, float(k + 1) ** alpha, 0)
        total += weight * centred / (jnp.sqrt(variance) + 1e-6)
        weights += weight
    return without_critic(batch, of_step(batch, total / jnp.maximum(weights, 1e-30)))


@register("state_baseline", uses_critic=True, needs_state_key=True)
def state_baseline(batch: CreditBatch, *, gamma: float = 1.0, whiten: str = "none") -> Credit:
    """Aᵢₜ = Gₜ − mean of G over visits to the same state by OTHER trajectories of the group.

    Own revisits are left out: they follow from the action that is judged. Where no other trajectory came by, the
    baseline is the critic's V_t, which learns Gₜ, or without a critic `state_value` (a running mean of earlier
    batches); never Gₜ itself, whose A = 0 would weigh states by how many samples reach them. All of these are
    independent of the action, so the gradient is unbiased, also where the policy decides when to stop.
    """
    returns, known = step_returns(batch, gamma), _known(batch)
    _, anchor, own = classes(group_of_step(batch), batch.state_key, batch.traj_of_step)
    anchor, own = (jnp.where(known, x, batch.steps) for x in (anchor, own))
    centred, _, count = deviations(returns, anchor, batch.steps)

    def of_own(x: Float[Array, "steps"]) -> Float[Array, "steps"]:
        return jax.ops.segment_sum(x, own, batch.steps + 1)[own]

    others = count - of_own(jnp.ones_like(returns))
    # About the mean of all visits, the others' sum is minus that of one's own; equal returns give exactly 0.
    among_others = centred + of_own(centred) / jnp.maximum(others, 1)
    first = batch.first_token
    fallback = jnp.zeros_like(returns) if batch.state_value is None else batch.state_value
    if batch.values is not None:
        fallback = sum_to_steps(batch, jnp.where(first, batch.values, 0))
    advantage = jnp.where(known & (others > 0), among_others, returns - fallback)
    credit = without_critic(batch, of_step(batch, whiten_steps(batch, advantage, whiten)))
    if batch.values is None:
        return credit
    targets = jnp.where(first, of_step(batch, returns), 0)
    return dataclasses.replace(credit, value_targets=targets, value_mask=first)


def _known(batch: CreditBatch) -> Bool[Array, "steps"]:
    """Steps whose state has a key."""
    return batch.real_step & (batch.state_key >= 0)


def _key_before(batch: CreditBatch, k: int) -> Int[Array, "steps"]:
    """Key of the state k steps before each step: `UNKNOWN` without one, `NO_STEP` before the trajectory's start."""

    def before(x: Int[Array, "steps"]) -> Int[Array, "steps"]:
        return jnp.concatenate([jnp.full((min(k, batch.steps),), -1, x.dtype), x[: max(batch.steps - k, 0)]])

    key = jnp.where(batch.state_key < 0, UNKNOWN, batch.state_key)
    return jnp.where(before(batch.traj_of_step) == batch.traj_of_step, before(key), NO_STEP) if k else key

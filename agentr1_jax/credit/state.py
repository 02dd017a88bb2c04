"""Schemes that compare what followed equal states: steps of one group whose `state_key` agrees."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.credit.group import outcome_advantage
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
    whiten_steps,
)
from agentr1_jax.credit.scheme import register
from agentr1_jax.validation import Fraction, NonNegative, Whole

UNKNOWN, NO_STEP = -1, -2
"""Keys of a state without a key, and of a step before the first."""


@register("gigpo", needs_samples=True, needs_state_key=True)
def gigpo(
    batch: TokenBatch,
    *,
    gamma: Fraction = 0.95,
    step_weight: NonNegative = 1.0,
    norm: Norm = "mean_norm",
    unit: Unit = "trajectory",
) -> Credit:
    """Aᵢₜ = A^Eᵢ + w·A^Sᵢₜ.

    A^E is the outcome normalised in its group, over trajectories (`unit`); A^S the return Gₜ = rₜ + γGₜ₊₁ normalised
    among all steps of the group that start in the same state (own revisits included). norm is x − mean (`mean_norm`)
    or that over std + 1e-6 (`mean_std_norm`). A step that is alone in its state, or has no
    key, has A^S = 0.

    Source: GiGPO, arXiv 2505.10978.
    """
    anchor = jnp.where(_has_key(batch), group_ids(batch.step_group, batch.state_key)[1], batch.steps)
    step = normalise_by_group(step_returns(batch, gamma), anchor, batch.steps, norm)
    episode = broadcast_to_steps(batch, outcome_advantage(batch, norm, unit))
    return Credit(broadcast_to_tokens(batch, episode + step_weight * step))


@register("hgpo", needs_samples=True, needs_state_key=True)
def hgpo(batch: TokenBatch, *, gamma: Fraction = 0.95, history: Whole = 2, alpha: NonNegative = 1.0) -> Credit:
    """Aᵢₜ = Σₖ wₖ·A^kᵢₜ / Σₖ wₖ over the levels k = 0..K at which the step is not alone, wₖ = (k + 1)^α.

    A^k is (Gₜ − mean) / (std + 1e-6), population std, among the steps of the group that agree in their state and in the
    k states before it (steps before the first agree with each other). K is `history`. A step alone at every level, or
    without a key, gets 0.

    Source: HGPO, arXiv 2602.22817.
    """
    returns, known = step_returns(batch, gamma), _has_key(batch)
    keys = [_key_before(batch, k) for k in range(history + 1)]
    total, weights = jnp.zeros_like(returns), jnp.zeros_like(returns)
    for k, path in enumerate(group_ids(batch.step_group, *keys)[1:]):
        known &= keys[k] != UNKNOWN
        centred, variance, count = center_by_group(returns, jnp.where(known, path, batch.steps), batch.steps)
        weight = jnp.where(count > 1, float(k + 1) ** alpha, 0)
        total += weight * centred / (jnp.sqrt(variance) + 1e-6)
        weights += weight
    return Credit(broadcast_to_tokens(batch, total / jnp.maximum(weights, 1e-30)))


@register("state_baseline", uses_critic=True, needs_state_key=True)
def state_baseline(batch: TokenBatch, *, gamma: Fraction = 1.0, whiten: Whitening = "none") -> Credit:
    """Aᵢₜ = Gₜ − mean of G over visits to the same state by OTHER trajectories of the group.

    Revisits by the same trajectory are left out: they follow from the action that is judged. Where no other trajectory
    visits the state, the baseline is the critic's V_t, which learns Gₜ, or without a critic `state_value` (a running
    mean of earlier batches); not Gₜ itself, whose A = 0 would weigh states by how many samples reach them. All of
    these are independent of the action, so the gradient is unbiased, also where the policy decides when to stop.
    """
    returns, known = step_returns(batch, gamma), _has_key(batch)
    _, anchor, own = group_ids(batch.step_group, batch.state_key, batch.step_trajectory)
    anchor, own = (jnp.where(known, x, batch.steps) for x in (anchor, own))
    centred, _, count = center_by_group(returns, anchor, batch.steps)

    def sum_own(x: Float[Array, "steps"]) -> Float[Array, "steps"]:
        return jax.ops.segment_sum(x, own, batch.steps + 1)[own]

    others = count - sum_own(jnp.ones_like(returns))
    # Deviations from the mean of all visits sum to 0, so those of the others are minus the own; equal returns give 0.
    among_others = centred + sum_own(centred) / jnp.maximum(others, 1)
    first = batch.first_token
    fallback = jnp.zeros_like(returns) if batch.state_value is None else batch.state_value
    if batch.values is not None:
        fallback = sum_to_steps(batch, jnp.where(first, batch.values, 0))
    advantage = jnp.where(known & (others > 0), among_others, returns - fallback)
    credit = Credit(broadcast_to_tokens(batch, whiten_steps(batch, advantage, whiten)))
    if batch.values is None:
        return credit
    targets = jnp.where(first, broadcast_to_tokens(batch, returns), 0)
    return dataclasses.replace(credit, value_targets=targets, value_mask=first)


def _has_key(batch: TokenBatch) -> Bool[Array, "steps"]:
    """Return True for the steps whose state has a key."""
    return batch.real_step & (batch.state_key >= 0)


def _key_before(batch: TokenBatch, k: int) -> Int[Array, "steps"]:
    """Return the key of the state k steps earlier: `UNKNOWN` where it has none, `NO_STEP` before the first step."""

    def before(x: Int[Array, "steps"]) -> Int[Array, "steps"]:
        return jnp.concatenate([jnp.full((min(k, batch.steps),), -1, x.dtype), x[: max(batch.steps - k, 0)]])

    key = jnp.where(batch.state_key < 0, UNKNOWN, batch.state_key)
    return jnp.where(before(batch.step_trajectory) == batch.step_trajectory, before(key), NO_STEP) if k else key

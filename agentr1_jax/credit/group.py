"""Schemes that compare the samples of one task row: their returns, or what followed equal states.

R_i is the sum of a trajectory's rewards. Steps have equal states where their `state_key` agrees. A lone member of a
group and a group of equal returns get exactly 0.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.credit.primitives import (
    Norm,
    Unit,
    Whitening,
    broadcast_to_steps,
    broadcast_to_tokens,
    center_by_group,
    group_ids,
    mean_of_tokens,
    normalise_by_group,
    step_returns,
    sum_to_steps,
    whiten_steps,
    whiten_term,
    whiten_tokens,
)
from agentr1_jax.credit.scheme import register
from agentr1_jax.trajectory import Term
from agentr1_jax.validation import Fraction, NonNegative, Whole

OUTCOME = "outcome in its group"
"""Name of the term that compares R_i."""
UNKNOWN, NO_STEP = -1, -2
"""Keys of a state without a key, and of a step before the first."""


@register("grpo", needs_samples=True)
def grpo(batch: TokenBatch, *, unit: Unit = "trajectory") -> Credit:
    """Aᵢ = (Rᵢ − mean_g) / (std_g + 1e-6), std with n − 1.

    The unit of mean and std is the trajectory, whatever its number of steps; `step` and `token` count a trajectory
    once for each of its steps or tokens, as code that keeps a row for each step does.

    Source: DeepSeekMath, arXiv 2402.03300.
    """
    return _of_outcome(batch, *normalise_outcome(batch, "mean_std_norm", unit))


@register("dr_grpo", needs_samples=True)
def dr_grpo(batch: TokenBatch, *, unit: Unit = "trajectory") -> Credit:
    """Aᵢ = Rᵢ − mean_g; belongs with the loss aggregate `fixed`.

    Source: Dr.GRPO, arXiv 2503.20783.
    """
    return _of_outcome(batch, *normalise_outcome(batch, "mean_norm", unit))


@register("rloo", needs_samples=True)
def rloo(batch: TokenBatch) -> Credit:
    """Aᵢ = n/(n − 1)·(Rᵢ − mean_g) = Rᵢ − mean of the others.

    Source: Kool et al. 2019; RLOO, arXiv 2402.14740.
    """
    centred, mean, _, count = center_by_group(batch.returns, batch.group, batch.trajectories)
    others = mean - centred / jnp.maximum(count - 1, 1)
    term = Term({"return": batch.returns}, {"mean of the others": others})
    return _of_outcome(batch, centred * count / jnp.maximum(count - 1, 1), term)


@register("reinforce_pp_baseline", needs_samples=True)
def reinforce_pp_baseline(batch: TokenBatch, *, unit: Unit = "trajectory", whiten: Whitening = "token") -> Credit:
    """Aᵢ = Rᵢ − mean_g, broadcast to tokens, then whitened over the tokens of the batch.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    per_step = outcome_to_steps(batch, *normalise_outcome(batch, "mean_norm", unit))
    outcome, term = jax.tree.map(lambda x: broadcast_to_tokens(batch, x) if jnp.ndim(x) else x, per_step)
    advantages, mean, std = whiten_tokens(batch, outcome, whiten)
    return Credit(advantages, terms={OUTCOME: mean_of_tokens(batch, whiten_term(term, mean, std))})


@register("remax", needs_greedy=True)
def remax(batch: TokenBatch) -> Credit:
    """Aᵢ = Rᵢ − reward of the greedy rollout of the same row.

    Source: ReMax, arXiv 2310.10505.
    """
    assert batch.greedy_return is not None
    advantage = jnp.where(batch.real_trajectory, batch.returns - batch.greedy_return, 0)
    term = Term({"return": batch.returns}, {"greedy return": batch.greedy_return})
    return _of_outcome(batch, advantage, term, name="outcome against the greedy rollout")


@register("opo", needs_samples=True)
def opo(batch: TokenBatch) -> Credit:
    """Aᵢ = Rᵢ − Σ lenᵢ·Rᵢ / Σ lenᵢ over the group, lenᵢ the trajectory's sampled tokens.

    The baseline of least variance where gradients of tokens are orthogonal and of equal norm.

    Source: OPO, arXiv 2505.23585.
    """
    return _of_outcome(batch, *normalise_outcome(batch, "mean_norm", "token"))


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

    x is the `signal`: the step's `reward` r_t or its `return` G_t (which takes γ); λ is `outcome_weight`. BIASED where
    the policy decides when to stop: the steps at index t are then those of the samples that chose to go on.

    Source: MT-GRPO, arXiv 2505.11821.
    """
    reward = batch.rewards + sum_to_steps(batch, batch.token_rewards)
    x = reward if signal == "reward" else step_returns(batch, gamma)
    cell = jnp.where(batch.real_step, group_ids(batch.step_group, batch.step_index)[1], batch.steps)
    names = ("reward" if signal == "reward" else "return to go", "mean at this index")
    turn, turn_term = normalise_by_group(x, cell, batch.steps, norm, names=names)
    outcome, outcome_term = outcome_to_steps(batch, *normalise_outcome(batch, norm, "trajectory"))
    return Credit(
        advantages=broadcast_to_tokens(batch, turn + outcome_weight * outcome),
        terms={"among equal step indices": turn_term, OUTCOME: outcome_term._replace(weight=outcome_weight)},
    )


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
    among all steps of the group that start in the same state (own revisits included). A step that is alone in its
    state, or has no key, has A^S = 0.

    Source: GiGPO, arXiv 2505.10978.
    """
    anchor = jnp.where(_has_key(batch), group_ids(batch.step_group, batch.state_key)[1], batch.steps)
    names = ("return to go", "mean of the state")
    step, step_term = normalise_by_group(step_returns(batch, gamma), anchor, batch.steps, norm, names=names)
    episode, episode_term = outcome_to_steps(batch, *normalise_outcome(batch, norm, unit))
    return Credit(
        advantages=broadcast_to_tokens(batch, episode + step_weight * step),
        terms={OUTCOME: episode_term, "among equal states": step_term._replace(weight=step_weight)},
    )


@register("hgpo", needs_samples=True, needs_state_key=True)
def hgpo(
    batch: TokenBatch,
    *,
    gamma: Fraction = 0.95,
    history: Whole = 2,
    alpha: NonNegative = 1.0,
    norm: Norm = "mean_std_norm",
) -> Credit:
    """Aᵢₜ = Σₖ wₖ·A^kᵢₜ / Σₖ wₖ over the levels k = 0..K at which the step is not alone, wₖ = (k + 1)^α.

    A^k is (Gₜ − mean) / (std + 1e-6), population std, among the steps of the group that agree in their state and in the
    k states before it (steps before the first agree with each other); with `norm=mean_norm`, Gₜ − mean. K is `history`.
    A step alone at every level, or without a key, gets 0.

    Source: HGPO, arXiv 2602.22817.
    """
    returns, known = step_returns(batch, gamma), _has_key(batch)
    keys = [_key_before(batch, k) for k in range(history + 1)]
    total, weights = jnp.zeros_like(returns), jnp.zeros_like(returns)
    terms = {}
    for k, path in enumerate(group_ids(batch.step_group, *keys)[1:]):
        known &= keys[k] != UNKNOWN
        centred, mean, variance, count = center_by_group(returns, jnp.where(known, path, batch.steps), batch.steps)
        weight = jnp.where(count > 1, float(k + 1) ** alpha, 0)
        std = jnp.sqrt(variance) + 1e-6 if norm == "mean_std_norm" else jnp.ones_like(variance)
        total += weight * centred / std
        weights += weight
        name = "among equal states" + (f", {k} before them equal too" if k else "")
        terms[name] = Term({"return to go": returns}, {"mean": mean}, weight, std)
    weights = jnp.maximum(weights, 1e-30)
    return Credit(
        advantages=broadcast_to_tokens(batch, total / weights),
        terms={name: term._replace(weight=term.weight / weights) for name, term in terms.items()},
    )


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
    centred, mean, _, count = center_by_group(returns, anchor, batch.steps)

    def sum_own(x: Float[Array, "steps"]) -> Float[Array, "steps"]:
        return jax.ops.segment_sum(x, own, batch.steps + 1)[own]

    others = count - sum_own(jnp.ones_like(returns))
    # Deviations from the mean of all visits sum to 0, so those of the others are minus the own; equal returns give 0.
    own_share = sum_own(centred) / jnp.maximum(others, 1)
    first, compared = batch.first_token, known & (others > 0)
    fallback = jnp.zeros_like(returns) if batch.state_value is None else batch.state_value
    if batch.values is not None:
        fallback = sum_to_steps(batch, jnp.where(first, batch.values, 0))
    advantage = jnp.where(compared, centred + own_share, returns - fallback)
    whitened, batch_mean, std = whiten_steps(batch, advantage, whiten)

    def term(baseline: str, value: Float[Array, "steps"], applies: Bool[Array, "steps"]) -> Term:
        return Term({"return to go": returns}, {baseline: value, **batch_mean}, jnp.where(applies, 1.0, 0.0), std)

    name = "mean of earlier batches" if batch.values is None else "value"
    credit = Credit(
        advantages=broadcast_to_tokens(batch, whitened),
        terms={
            "among visits by others": term("their mean", mean - own_share, compared),
            "without visits by others": term(name, fallback, ~compared),
        },
    )
    if batch.values is None:
        return credit
    targets = jnp.where(first, broadcast_to_tokens(batch, returns), 0)
    return dataclasses.replace(credit, value_targets=targets, value_mask=first)


def normalise_outcome(batch: TokenBatch, norm: Norm, unit: Unit) -> tuple[Float[Array, "trajectories"], Term]:
    """Return R_i normalised in its group, where mean and standard deviation count each `unit` once, and its term."""
    count = {"step": batch.trajectory_steps, "token": batch.trajectory_tokens}
    weight = None if unit == "trajectory" else count[unit].astype(batch.returns.dtype)
    names = ("return", "group mean" if unit == "trajectory" else f"group mean over {unit}s")
    return normalise_by_group(batch.returns, batch.group, batch.trajectories, norm, weight, names=names)


def outcome_to_steps(
    batch: TokenBatch, advantage: Float[Array, "trajectories"], term: Term
) -> tuple[Float[Array, "steps"], Term]:
    """Give all steps of a trajectory its advantage and its term."""
    return jax.tree.map(lambda x: broadcast_to_steps(batch, x) if jnp.ndim(x) else x, (advantage, term))


def _of_outcome(batch: TokenBatch, advantage: Float[Array, "trajectories"], term: Term, name: str = OUTCOME) -> Credit:
    """Give all tokens of a trajectory one advantage, with its term."""
    per_step, term = outcome_to_steps(batch, advantage, term)
    return Credit(broadcast_to_tokens(batch, per_step), terms={name: term})


def _has_key(batch: TokenBatch) -> Bool[Array, "steps"]:
    return batch.real_step & (batch.state_key >= 0)


def _key_before(batch: TokenBatch, k: int) -> Int[Array, "steps"]:
    """Return the key of the state k steps earlier: `UNKNOWN` where it has none, `NO_STEP` before the first step."""

    def before(x: Int[Array, "steps"]) -> Int[Array, "steps"]:
        return jnp.concatenate([jnp.full((min(k, batch.steps),), -1, x.dtype), x[: max(batch.steps - k, 0)]])

    key = jnp.where(batch.state_key < 0, UNKNOWN, batch.state_key)
    return jnp.where(before(batch.step_trajectory) == batch.step_trajectory, before(key), NO_STEP) if k else key

"""Operations that schemes are made of: one linear recurrence, statistics over a unit, sums and broadcasts.

A unit is what a mean counts once: a token, a step or a trajectory. Statistics take it as weights: a "mean over steps"
of values that live on tokens weighs each token by one over the number of tokens of its step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.credit.batch import TokenBatch
from agentr1_jax.trajectory import Term

Unit = Literal["token", "step", "trajectory"]
"""What a mean and a standard deviation count once."""
Whitening = Literal["none", "token", "step", "trajectory"]
"""Unit of whitening, or `none` for no whitening."""
Norm = Literal["mean_norm", "mean_std_norm"]
"""x − mean, or (x − mean) / (std + 1e-6)."""
BATCH_MEAN = "batch mean"
"""Name of what whitening subtracts."""


def backward_recurrence(x: Float[Array, "n"], decay: Float[Array, "n"]) -> Float[Array, "n"]:
    """Solve yₖ = xₖ + dₖ·yₖ₊₁, with y = 0 beyond the end; d = 0 ends a segment (a trajectory).

    An associative scan: returns, GAE and every other discounted sum of this package are instances of it.
    """

    def combine(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        x_later, d_later = later
        x_earlier, d_earlier = earlier
        return x_earlier + d_earlier * x_later, d_earlier * d_later

    y, _ = jax.lax.associative_scan(combine, (x, decay), reverse=True)
    return y


def shift_left(x: Float[Array, "n"]) -> Float[Array, "n"]:
    """Return xₖ₊₁ at k; 0 at the end."""
    return jnp.concatenate([x[1:], jnp.zeros((1,), x.dtype)])


def has_successor(segment: Int[Array, "n"]) -> Bool[Array, "n"]:
    """Return True at k where k + 1 belongs to the same segment."""
    return jnp.concatenate([segment[1:] == segment[:-1], jnp.zeros((1,), bool)])


def group_ids(*keys: Int[Array, "n"]) -> list[Int[Array, "n"]]:
    """Number the groups of equal keys: by the first key, by the first two keys, and so on, with one sort for all.

    Returns:
      one array for each number of leading keys: the group of each element, in [0, n).
    """
    n = keys[0].shape[0]
    # The order among equal elements does not matter.
    *ordered, index = jax.lax.sort((*keys, jnp.arange(n)), num_keys=len(keys), is_stable=False)
    out, differ = [], jnp.zeros((n - 1,), bool)
    for key in ordered:
        differ |= key[1:] != key[:-1]
        number = jnp.cumsum(jnp.concatenate([jnp.zeros((1,), jnp.int32), differ.astype(jnp.int32)]))
        out.append(jnp.zeros((n,), jnp.int32).at[index].set(number, unique_indices=True))
    return out


def center_by_group(
    x: Float[Array, "n"], group: Int[Array, "n"], groups: int, weight: Float[Array, "n"] | None = None
) -> tuple[Float[Array, "n"], Float[Array, "n"], Float[Array, "n"], Float[Array, "n"]]:
    """Subtract from each element the mean of its group, in which it counts `weight` times (1 by default).

    The result is exactly 0 for a lone element and where all elements of a group are equal up to rounding (see
    `_differ`). Elements of group `groups` or of weight 0 are padding and get 0.

    Returns:
      (xᵢ − mean, mean, variance Σ w(x − mean)² / Σ w, count Σ w), the last three of each element's group; the mean is
      the element itself where the result is exactly 0.
    """
    weight = jnp.where(group < groups, jnp.ones_like(x) if weight is None else weight, 0)
    present = weight > 0

    def total(values: Array) -> Array:
        return jax.ops.segment_sum(values, group, groups + 1)

    count = total(weight)
    mean = total(weight * jnp.where(present, x, 0)) / jnp.maximum(count, 1e-30)
    highest = jax.ops.segment_max(jnp.where(present, x, -jnp.inf), group, groups + 1)
    lowest = jax.ops.segment_min(jnp.where(present, x, jnp.inf), group, groups + 1)
    differs = present & _differ(lowest, highest)[group]
    centred = jnp.where(differs, x - mean[group], 0)
    variance = total(weight * centred**2) / jnp.maximum(count, 1e-30)
    return centred, jnp.where(differs, mean[group], x), variance[group], jnp.where(present, count[group], 0)


def normalise_by_group(
    x: Float[Array, "n"],
    group: Int[Array, "n"],
    groups: int,
    norm: Norm,
    weight: Float[Array, "n"] | None = None,
    *,
    names: tuple[str, str] = ("return", "group mean"),
) -> tuple[Float[Array, "n"], Term]:
    """Return x − mean of its group, over std + 1e-6 with n − 1 where `norm` says so, and its term; x and mean by name.

    See `center_by_group` for the other arguments.
    """
    centred, mean, variance, count = center_by_group(x, group, groups, weight)
    std = 1.0 if norm == "mean_norm" else jnp.sqrt(variance * count / jnp.maximum(count - 1, 1)) + 1e-6
    return centred / std, Term({names[0]: x}, {names[1]: mean}, std=std)


def whiten(
    x: Float[Array, "n"], weight: Float[Array, "n"]
) -> tuple[Float[Array, "n"], Mapping[str, Float[Array, "n"]], Float[Array, ""]]:
    """Return (x − mean) / √(var + 1e-8) over the elements with weight, var with n − 1, n = Σ weight; 0 elsewhere.

    A lone element and equal elements give 0.

    Returns:
      the whitened values, and for their term the mean by name (each element itself where they are equal) and the std.
    """
    present, count = weight > 0, weight.sum()
    mean = (weight * jnp.where(present, x, 0)).sum() / jnp.maximum(count, 1e-30)
    lowest, highest = jnp.where(present, x, jnp.inf).min(), jnp.where(present, x, -jnp.inf).max()
    differ = _differ(lowest, highest)
    centred = jnp.where(present & differ, x - mean, 0)
    variance = (weight * centred**2).sum() / jnp.maximum(count - 1, 1)
    std = jnp.where(differ, jnp.sqrt(variance + 1e-8), 1)
    return centred * jax.lax.rsqrt(variance + 1e-8), {BATCH_MEAN: jnp.where(differ, mean, x)}, std


def _differ(lowest: Float[Array, "*s"], highest: Float[Array, "*s"]) -> Bool[Array, "*s"]:
    """Return True where the largest and the smallest value differ by more than rounding.

    A return is a sum whose rounding depends on its position in the scan. Divided by the standard deviation of equal
    returns, that rounding would be a large advantage.
    """
    size = jnp.maximum(jnp.abs(lowest), jnp.abs(highest))
    return highest - lowest > 32 * jnp.finfo(lowest.dtype).eps * size


def whiten_tokens(
    batch: TokenBatch, x: Float[Array, "tokens"], unit: Whitening
) -> tuple[Float[Array, "tokens"], Mapping[str, Float[Array, "tokens"]], Float[Array, ""] | float]:
    """Whiten values of the sampled tokens; mean and variance count each `unit` once. See `whiten` for the result."""
    weight = batch.real_token.astype(x.dtype)
    if unit == "none":
        return jnp.where(batch.real_token, x, 0), {}, 1.0
    if unit == "step":
        weight = broadcast_to_tokens(batch, 1 / jnp.maximum(batch.step_tokens, 1).astype(x.dtype))
    if unit == "trajectory":
        tokens = jnp.maximum(batch.trajectory_tokens, 1).astype(x.dtype)
        weight = broadcast_to_tokens(batch, broadcast_to_steps(batch, 1 / tokens))
    return whiten(x, weight)


def whiten_steps(
    batch: TokenBatch, x: Float[Array, "steps"], unit: Whitening
) -> tuple[Float[Array, "steps"], Mapping[str, Float[Array, "steps"]], Float[Array, ""] | float]:
    """Whiten values of the steps; mean and variance count each `unit` once. See `whiten` for the result."""
    if unit == "none":
        return jnp.where(batch.real_step, x, 0), {}, 1.0
    weight = batch.real_step.astype(x.dtype)
    if unit == "token":
        weight = batch.step_tokens.astype(x.dtype)
    if unit == "trajectory":
        weight = broadcast_to_steps(batch, 1 / jnp.maximum(batch.trajectory_steps, 1).astype(x.dtype))
    return whiten(x, weight)


def whiten_term(term: Term, mean: Mapping[str, Array], std: Float[Array, ""] | float) -> Term:
    """Return the term of whitened values, from the term of the values; mean and std as from `whiten`."""
    return term._replace(minus={**term.minus, **mean}, std=std)


def broadcast_to_tokens(batch: TokenBatch, per_step: Float[Array, "steps"]) -> Float[Array, "tokens"]:
    """Give each sampled token the value of its step; 0 elsewhere."""
    padded = jnp.concatenate([per_step, jnp.zeros((1,), per_step.dtype)])
    return jnp.where(batch.real_token, padded[batch.token_step], 0)


def broadcast_to_steps(batch: TokenBatch, per_trajectory: Float[Array, "trajectories"]) -> Float[Array, "steps"]:
    """Give each step the value of its trajectory; 0 for padding."""
    padded = jnp.concatenate([per_trajectory, jnp.zeros((1,), per_trajectory.dtype)])
    return padded[batch.step_trajectory]


def sum_to_steps(batch: TokenBatch, per_token: Float[Array, "tokens"]) -> Float[Array, "steps"]:
    """Sum over the sampled tokens of each step."""
    return jax.ops.segment_sum(jnp.where(batch.real_token, per_token, 0), batch.token_step, batch.steps + 1)[:-1]


def mean_of_tokens(batch: TokenBatch, term: Term) -> Term:
    """Average a term whose quantities are [tokens] over the sampled tokens of each step; weight and std are scalars."""
    # One sum of rows takes half the time of a sum for each quantity.
    columns = jnp.stack([*term.plus.values(), *term.minus.values()], axis=-1)
    sums = jax.ops.segment_sum(jnp.where(batch.real_token[:, None], columns, 0), batch.token_step, batch.steps + 1)
    means = iter((sums[:-1] / jnp.maximum(batch.step_tokens, 1)[:, None]).T)
    plus, minus = ({name: next(means) for name in part} for part in (term.plus, term.minus))
    return term._replace(plus=plus, minus=minus)


def step_returns(batch: TokenBatch, gamma: float) -> Float[Array, "steps"]:
    """Return Gₜ = rₜ + γGₜ₊₁, rₜ with the rewards of the step's tokens, G beyond the last step the bootstrap value."""
    return gae_over_steps(batch, jnp.zeros_like(batch.rewards), gamma, 1.0)[0]


def length_lambda(lam: float, alpha: float, length: Float[Array, "n"]) -> Float[Array, "*lambdas"] | float:
    """Return λ = max(0, 1 − 1/(α·L)), by which credit reaches back about α·L of the L steps or tokens; `lam` for α = 0.

    Source: VAPO, arXiv 2504.05118 (tokens, α 0.05); SAO, arXiv 2607.07508 (α 1.5).
    """
    if isinstance(alpha, int | float) and not alpha:
        return lam
    adapted = jnp.maximum(1 - 1 / (jnp.maximum(alpha, 1e-30) * jnp.maximum(length, 1)), 0)
    return jnp.where(jnp.asarray(alpha) > 0, adapted, lam)


def gae_over_steps(
    batch: TokenBatch, value: Float[Array, "steps"], gamma: float, lam: Float[Array, "*steps"] | float
) -> tuple[Float[Array, "steps"], Term]:
    """Return Aₜ = δₜ + γλAₜ₊₁, δₜ = rₜ + γVₜ₊₁ − Vₜ, with V beyond the last step the bootstrap value; 0 for padding.

    Also return its term: r, γV′ and γλA′ less V.
    """
    reward = batch.rewards + sum_to_steps(batch, batch.token_rewards)
    continues = has_successor(batch.step_trajectory)
    after = gamma * jnp.where(continues, shift_left(value), broadcast_to_steps(batch, batch.bootstrap))
    decay = gamma * lam * continues
    advantage = backward_recurrence(jnp.where(batch.real_step, reward + after - value, 0), decay)
    return advantage, td_term(reward, after, decay * shift_left(advantage), value)


def td_term(
    reward: Float[Array, "n"], after: Float[Array, "n"], later: Float[Array, "n"], value: Float[Array, "n"]
) -> Term:
    """Term of A = r + γV′ + γλA′ − V, of which r + γV′ − V is the error δ of temporal differences."""
    return Term(
        {"reward": reward, "discounted next value": after, "discounted later advantages": later}, {"value": value}
    )


def next_value(batch: TokenBatch, values: Float[Array, "tokens"]) -> Float[Array, "tokens"]:
    """Return V at the next sampled token of the trajectory, skipping other tokens; the bootstrap value at its end."""
    trajectory = batch.token_trajectory
    continues = has_successor(trajectory)
    end_value = jnp.concatenate([batch.bootstrap, jnp.zeros((1,), batch.bootstrap.dtype)])[trajectory]
    passed_back = jnp.where(batch.real_token, values, jnp.where(continues, 0, end_value))
    value_from_here = backward_recurrence(passed_back, 1.0 * (continues & ~batch.real_token))
    return jnp.where(continues, shift_left(value_from_here), end_value)


def gae_over_tokens(
    batch: TokenBatch, values: Float[Array, "tokens"], gamma: float, lam: Float[Array, "*tokens"] | float
) -> tuple[Float[Array, "tokens"], Term]:
    """Return Aₖ = δₖ + γλAₖ₊₁, δₖ = rₖ + γVₖ₊₁ − Vₖ, on the timeline of the sampled tokens of a trajectory.

    A step's reward falls on its last sampled token. Tokens that were not sampled take no time. Also return the term:
    r, γV′ and γλA′ less V.
    """
    reward, after = rewards_with_step(batch), gamma * next_value(batch, values)
    advantage = _recur_over_tokens(batch, reward + after - values, gamma * lam)
    later = gamma * lam * has_successor(batch.token_trajectory) * shift_left(advantage)
    return advantage, td_term(reward, after, later, values)


def token_returns(batch: TokenBatch, gamma: float) -> Float[Array, "tokens"]:
    """Return Gₖ = rₖ + γGₖ₊₁ on the same timeline; G beyond the last sampled token is the bootstrap value."""
    at_end = jnp.where(has_successor(batch.step_trajectory), 0, broadcast_to_steps(batch, batch.bootstrap))
    batch = dataclasses.replace(batch, rewards=batch.rewards + gamma * at_end)
    return _recur_over_tokens(batch, rewards_with_step(batch), gamma)


def rewards_with_step(batch: TokenBatch) -> Float[Array, "tokens"]:
    """Return r_k: the token's own reward, plus the step's reward at the last sampled token of each step."""
    return batch.token_rewards + jnp.where(batch.last_token, broadcast_to_tokens(batch, batch.rewards), 0)


def _recur_over_tokens(
    batch: TokenBatch, x: Float[Array, "tokens"], decay: Float[Array, "*tokens"] | float
) -> Float[Array, "tokens"]:
    """Solve yₖ = xₖ + decay·yₖ₊₁ over the sampled tokens of each trajectory."""
    passes_on = jnp.where(batch.real_token, decay, 1.0) * has_successor(batch.token_trajectory)
    return backward_recurrence(jnp.where(batch.real_token, x, 0), passes_on)

"""The few operations every scheme is made of: one linear recurrence, statistics over a unit, sums and broadcasts.

A unit is what a mean counts once: a token, a step or a trajectory. Statistics take it as weights, so that "mean over
steps" of values that live on tokens weighs each token by one over the tokens of its step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.credit.batch import Credit, CreditBatch

UNITS = ("token", "step", "trajectory")
WHITENINGS = ("none", *UNITS)


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


def classes(*keys: Int[Array, "n"]) -> list[Int[Array, "n"]]:
    """Classes by the first key, by the first two keys, and so on: one sort serves them all.

    Returns:
      for each number of leading keys, the number in [0, n) of each element's class; two elements are of one class iff
      they agree in all of those keys.
    """
    n = keys[0].shape[0]
    # Which of several equal elements comes first does not matter.
    *ordered, index = jax.lax.sort((*keys, jnp.arange(n)), num_keys=len(keys), is_stable=False)
    out, differ = [], jnp.zeros((n - 1,), bool)
    for key in ordered:
        differ |= key[1:] != key[:-1]
        number = jnp.cumsum(jnp.concatenate([jnp.zeros((1,), jnp.int32), differ.astype(jnp.int32)]))
        out.append(jnp.zeros((n,), jnp.int32).at[index].set(number, unique_indices=True))
    return out


def deviations(
    x: Float[Array, "n"], segment: Int[Array, "n"], segments: int, weight: Float[Array, "n"] | None = None
) -> tuple[Float[Array, "n"], Float[Array, "n"], Float[Array, "n"]]:
    """Where each element stands among those of its segment.

    Equal elements (see `_differ`), and a lone one, deviate by exactly 0, whatever the mean was rounded to. Elements
    beyond `segments` are padding and get 0.

    Args:
      x: values.
      segment: of each, in [0, segments].
      segments: their number.
      weight: how often each element counts; 1 unless given. One without weight is padding.

    Returns:
      xᵢ − mean, the variance Σ w(x − mean)² / (Σ w) and the count Σ w of its segment, at each element.
    """
    weight = jnp.where(segment < segments, jnp.ones_like(x) if weight is None else weight, 0)
    present = weight > 0

    def total(values: Array) -> Array:
        return jax.ops.segment_sum(values, segment, segments + 1)

    count = total(weight)
    mean = total(weight * jnp.where(present, x, 0)) / jnp.maximum(count, 1e-30)
    highest = jax.ops.segment_max(jnp.where(present, x, -jnp.inf), segment, segments + 1)
    lowest = jax.ops.segment_min(jnp.where(present, x, jnp.inf), segment, segments + 1)
    centred = jnp.where(present & _differ(lowest, highest)[segment], x - mean[segment], 0)
    variance = total(weight * centred**2) / jnp.maximum(count, 1e-30)
    return centred, variance[segment], jnp.where(present, count[segment], 0)


def sample_std(variance: Float[Array, "n"], count: Float[Array, "n"]) -> Float[Array, "n"]:
    """The standard deviation with n − 1 from the variance with n; 0 for a lone element."""
    return jnp.sqrt(variance * count / jnp.maximum(count - 1, 1))


def whiten(x: Float[Array, "n"], weight: Float[Array, "n"]) -> Float[Array, "n"]:
    """(x − mean) / √(var + 1e-8) over the elements with weight, var with n − 1, n the sum of weights; 0 elsewhere.

    One element gives 0; equal elements give 0.
    """
    present, count = weight > 0, weight.sum()
    mean = (weight * jnp.where(present, x, 0)).sum() / jnp.maximum(count, 1e-30)
    lowest, highest = jnp.where(present, x, jnp.inf).min(), jnp.where(present, x, -jnp.inf).max()
    centred = jnp.where(present & _differ(lowest, highest), x - mean, 0)
    variance = (weight * centred**2).sum() / jnp.maximum(count - 1, 1)
    return centred * jax.lax.rsqrt(variance + 1e-8)


def _differ(lowest: Float[Array, "*s"], highest: Float[Array, "*s"]) -> Bool[Array, "*s"]:
    """Whether values differ by more than rounding.

    A return is a sum whose rounding depends on its place in the scan; divided by the std of equal returns, what is left
    would be a large advantage.
    """
    size = jnp.maximum(jnp.abs(lowest), jnp.abs(highest))
    return highest - lowest > 32 * jnp.finfo(lowest.dtype).eps * size


def whiten_tokens(batch: CreditBatch, x: Float[Array, "tokens"], unit: str) -> Float[Array, "tokens"]:
    """Whitens values of the trained tokens; `unit` is what mean and variance count once, or `none` for no whitening."""
    weight = batch.trained.astype(x.dtype)
    if unit == "none":
        return jnp.where(batch.trained, x, 0)
    if unit == "step":
        weight = of_step(batch, 1 / jnp.maximum(batch.tokens_of_step, 1).astype(x.dtype))
    if unit == "trajectory":
        tokens = jnp.maximum(batch.tokens_of_trajectory, 1).astype(x.dtype)
        weight = of_step(batch, of_trajectory(batch, 1 / tokens))
    return whiten(x, weight)


def whiten_steps(batch: CreditBatch, x: Float[Array, "steps"], unit: str) -> Float[Array, "steps"]:
    """Whitens values of the steps; `unit` is what mean and variance count once, or `none` for no whitening."""
    if unit == "none":
        return jnp.where(batch.real_step, x, 0)
    weight = batch.real_step.astype(x.dtype)
    if unit == "token":
        weight = batch.tokens_of_step.astype(x.dtype)
    if unit == "trajectory":
        weight = of_trajectory(batch, 1 / jnp.maximum(batch.steps_of_trajectory, 1).astype(x.dtype))
    return whiten(x, weight)


def of_step(batch: CreditBatch, per_step: Float[Array, "steps"]) -> Float[Array, "tokens"]:
    """A value per step, broadcast to the step's sampled tokens; 0 elsewhere."""
    padded = jnp.concatenate([per_step, jnp.zeros((1,), per_step.dtype)])
    return jnp.where(batch.trained, padded[batch.token_step], 0)


def of_trajectory(batch: CreditBatch, per_trajectory: Float[Array, "trajectories"]) -> Float[Array, "steps"]:
    """A value per trajectory, broadcast to its steps; 0 for padding."""
    padded = jnp.concatenate([per_trajectory, jnp.zeros((1,), per_trajectory.dtype)])
    return padded[batch.traj_of_step]


def sum_to_steps(batch: CreditBatch, per_token: Float[Array, "tokens"]) -> Float[Array, "steps"]:
    """Σ over the sampled tokens of each step."""
    return jax.ops.segment_sum(jnp.where(batch.trained, per_token, 0), batch.token_step, batch.steps + 1)[:-1]


def group_of_step(batch: CreditBatch) -> Int[Array, "steps"]:
    """Group of each step; N for padding."""
    padded = jnp.concatenate([batch.group, jnp.full((1,), batch.trajectories, batch.group.dtype)])
    return padded[batch.traj_of_step]


def step_returns(batch: CreditBatch, gamma: float) -> Float[Array, "steps"]:
    """Gₜ = rₜ + γGₜ₊₁, rₜ with the rewards of the step's tokens; where a trajectory was cut, G beyond it is its
    bootstrap value."""
    return gae_over_steps(batch, jnp.zeros_like(batch.rewards), gamma, 1.0)


def gae_over_steps(batch: CreditBatch, value: Float[Array, "steps"], gamma: float, lam: float) -> Float[Array, "steps"]:
    """δₜ = rₜ + γVₜ₊₁ − Vₜ,  Aₜ = δₜ + γλAₜ₊₁, with V beyond the last step the bootstrap value; 0 for padding."""
    reward = batch.rewards + sum_to_steps(batch, batch.token_rewards)
    goes_on = continues(batch.traj_of_step)
    next_value = jnp.where(goes_on, shift_back(value), of_trajectory(batch, batch.bootstrap))
    delta = jnp.where(batch.real_step, reward + gamma * next_value - value, 0)
    return backward_recurrence(delta, gamma * lam * goes_on)


def next_value(batch: CreditBatch, values: Float[Array, "tokens"]) -> Float[Array, "tokens"]:
    """V at the next sampled token of the trajectory, over whatever lies between; the bootstrap value at its end."""
    trajectory = trajectory_of_token(batch)
    goes_on = continues(trajectory)
    end_value = jnp.concatenate([batch.bootstrap, jnp.zeros((1,), batch.bootstrap.dtype)])[trajectory]
    handed = jnp.where(batch.trained, values, jnp.where(goes_on, 0, end_value))
    value_from_here = backward_recurrence(handed, 1.0 * (goes_on & ~batch.trained))
    return jnp.where(goes_on, shift_back(value_from_here), end_value)


def gae_over_tokens(
    batch: CreditBatch, values: Float[Array, "tokens"], gamma: float, lam: float
) -> Float[Array, "tokens"]:
    """δₖ = rₖ + γVₖ₊₁ − Vₖ,  Aₖ = δₖ + γλAₖ₊₁ on the timeline of the sampled tokens of a trajectory.

    A step's reward falls on its last sampled token. Tokens that were not sampled hand on what follows them.
    """
    delta = token_rewards(batch) + gamma * next_value(batch, values) - values
    return _over_tokens(batch, delta, gamma * lam)


def token_returns(batch: CreditBatch, gamma: float) -> Float[Array, "tokens"]:
    """Gₖ = rₖ + γGₖ₊₁ on the same timeline; G beyond the last sampled token is the bootstrap value."""
    at_end = jnp.where(continues(batch.traj_of_step), 0, of_trajectory(batch, batch.bootstrap))
    batch = dataclasses.replace(batch, rewards=batch.rewards + gamma * at_end)
    return _over_tokens(batch, token_rewards(batch), gamma)


def token_rewards(batch: CreditBatch) -> Float[Array, "tokens"]:
    """r_k: the token's own reward, and on the last sampled token of a step the step's."""
    return batch.token_rewards + jnp.where(batch.last_token, of_step(batch, batch.rewards), 0)


def _over_tokens(batch: CreditBatch, x: Float[Array, "tokens"], decay: float) -> Float[Array, "tokens"]:
    """yₖ = xₖ + decay·yₖ₊₁ over the sampled tokens of each trajectory."""
    passes_on = jnp.where(batch.trained, decay, 1.0) * continues(trajectory_of_token(batch))
    return backward_recurrence(jnp.where(batch.trained, x, 0), passes_on)


def trajectory_of_token(batch: CreditBatch) -> Int[Array, "tokens"]:
    """Trajectory of each token; N for padding."""
    padded = jnp.concatenate([batch.traj_of_step, jnp.full((1,), batch.trajectories, batch.traj_of_step.dtype)])
    return padded[batch.token_step]


def without_critic(batch: CreditBatch, advantages: Float[Array, "tokens"]) -> Credit:
    """The credit of a scheme that gives the critic no targets."""
    return Credit(
        advantages=advantages,
        value_targets=jnp.zeros_like(advantages),
        value_mask=jnp.zeros(advantages.shape, bool),
    )

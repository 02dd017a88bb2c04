"""Schemes that compare what the samples of one task row did in equal states: by state and action, or by transition.

G_t is the return to go. Two steps of a group are in one state where their `state_key` agrees, and took one action there
where their `action_key` agrees, too. A step without a key is in a state, or took an action, of its own. Padding gets 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.credit.group import OUTCOME, normalise_outcome, outcome_to_steps
from agentr1_jax.credit.primitives import (
    Norm,
    Unit,
    broadcast_to_steps,
    broadcast_to_tokens,
    center_by_group,
    group_ids,
    has_successor,
    normalise_by_group,
    step_returns,
)
from agentr1_jax.credit.scheme import register
from agentr1_jax.trajectory import Term
from agentr1_jax.validation import Finite, Fraction, NonNegative, Positive, Whole

SUCCESS_RETURN = 10.0
"""What GraphGPO pays for a step that reaches success."""


class ActionMeans(NamedTuple):
    """Means of a quantity by state, and by state and action, at each step.

    Attributes:
      difference: mean of the action less that of the state; exactly 0 where one action alone was taken in the state.
      state: mean of the state.
      action_count: weight of the visits that took the action.
      state_count: weight of all visits to the state.
      between, within: variance between the means of the state's actions, and within its actions.
    """

    difference: Float[Array, "steps"]
    state: Float[Array, "steps"]
    action_count: Float[Array, "steps"]
    state_count: Float[Array, "steps"]
    between: Float[Array, "steps"]
    within: Float[Array, "steps"]


@register("rtmc", needs_samples=True, needs_state_key=True, needs_action_key=True)
def rtmc(batch: TokenBatch, *, gamma: Fraction = 0.99, prior: NonNegative = 0.0) -> Credit:
    """Aₜ = Q̂(Sₜ, aₜ) − V′(Sₜ), V′ = (n·V̂ + m·R̄) / (n + m).

    Q̂(S, a) is the mean of G over the trajectories of the group that did a in S, each by its first visit to (S, a). V̂(S)
    is the mean over the same n visits, of all actions. R̄ is the group's mean return, which counts as m (`prior`)
    visits. Without a prior a state in which one action was taken, and so a lone visit, gets exactly 0; later visits by
    a trajectory get the advantage of the first.

    BIASED: V̂ holds the return of the action that it judges, so that a state with n visits counts (n − 1)/n or less.

    Source: RTMC, arXiv 2604.11037, whose definition of Q̂ and V̂ we know from other papers and programs. Those smooth by
    its equation 11 with m = 2 and may divide by the group's std; 0 and no division are our choice.
    """
    returns = step_returns(batch, gamma)
    state, action = _anchors(batch)
    first = _first_visit(batch, action)
    means = _action_means(returns, state, action, first.astype(returns.dtype))
    group_mean = broadcast_to_steps(batch, center_by_group(batch.returns, batch.group, batch.trajectories)[1])
    above = _mean(returns - group_mean, state, first.astype(returns.dtype))
    share = prior / jnp.maximum(means.state_count + prior, 1e-30)
    advantage = means.difference + share * above
    return Credit(
        broadcast_to_tokens(batch, advantage),
        terms={
            "among actions in equal states": Term(
                {"mean of the action": means.state + means.difference}, {"mean of the state": means.state}
            ),
            "of the state in its group": Term(
                {"mean of the state": group_mean + above}, {"group mean": group_mean}, weight=share
            ),
        },
    )


@register("ecpo", needs_samples=True, needs_state_key=True, needs_action_key=True)
def ecpo(
    batch: TokenBatch,
    *,
    gamma: Fraction = 0.95,
    step_weight: NonNegative = 1.0,
    kappa: NonNegative = 2.0,
    tau: Positive = 4.0,
    norm: Norm = "mean_std_norm",
    unit: Unit = "trajectory",
) -> Credit:
    """Aᵢₜ = A^Eᵢ + w·ρ(S)·A^S(S, a), with the means of actions shrunk towards their state's.

    A^E is the outcome normalised in its group, as in `gigpo`. Of the visits to S, Ḡ is the mean of G, Ḡₐ that of those
    nₐ that took a, and Ḡ + nₐ/(nₐ + κ)·(Ḡₐ − Ḡ) the calibrated mean; A^S is the latter normalised among the visits.
    ρ(S) = tanh(n/τ)·B/(B + W + 1e-8), n the number of visits, B and W the variance of G between and within actions. A
    lone visit, and a state in which one action was taken, have A^S = 0 exactly; each revisit counts as a visit.

    BIASED, as `gigpo` is: it adds two advantages, and the weight of a state follows from what was sampled in it.

    Source: ECPO, arXiv 2606.05885, which we know from notes on it: they give shrinkage (κ = 2), ρ and the sum. That A^S
    is normalised over visits, and τ = 4, are our reading.
    """
    returns = step_returns(batch, gamma)
    state, action = _anchors(batch)
    means = _action_means(returns, state, action, batch.real_step.astype(returns.dtype))
    shrunk = means.difference * means.action_count / jnp.maximum(means.action_count + kappa, 1e-30)
    names = ("shrunk difference of the action", "mean of the state")
    step, step_term = normalise_by_group(shrunk, state, batch.steps, norm, names=names)
    trust = jnp.tanh(means.state_count / tau) * means.between / (means.between + means.within + 1e-8)
    episode, episode_term = outcome_to_steps(batch, *normalise_outcome(batch, norm, unit))
    return Credit(
        broadcast_to_tokens(batch, episode + step_weight * trust * step),
        terms={
            OUTCOME: episode_term,
            "among actions in equal states": step_term._replace(weight=step_weight * trust),
        },
    )


@register("salt", needs_samples=True, needs_state_key=True, needs_action_key=True)
def salt(batch: TokenBatch, *, history: Whole = 0, norm: Norm = "mean_std_norm", unit: Unit = "trajectory") -> Credit:
    """Aₜ = mean of A^E over the steps of the group that are one edge of its graph: equal Sₜ, aₜ and Sₜ₊₁.

    A^E is the outcome of a trajectory normalised in its group. A step that no other shares keeps its own A^E, whatever
    its keys. With `history` = k, steps are one edge only if the states and actions of the k steps before agree, too
    (steps before the first agree with each other). All ends of trajectories are one state. A trajectory that takes an
    edge twice counts twice.

    BIASED: as for `grpo`, of which it is an average.

    Source: SALT, arXiv 2510.20022; edges as arXiv papers that compare with it describe them. `history`, and that all
    ends are one state, are our reading.
    """
    state, action = _own_number(batch.state_key), _own_number(batch.action_key)
    keys = [state, action, _neighbour(batch, state, 1)]
    for k in range(1, history + 1):
        keys += [_neighbour(batch, state, -k), _neighbour(batch, action, -k)]
    edge = jnp.where(batch.real_step, group_ids(batch.step_group, *keys)[-1], batch.steps)
    outcome, term = outcome_to_steps(batch, *normalise_outcome(batch, norm, unit))
    _, shared, _, _ = center_by_group(outcome, edge, batch.steps)
    (returns,) = term.plus.values()
    _, mean_return, _, _ = center_by_group(returns, edge, batch.steps)
    term = term._replace(plus={"mean return of all that share the step": mean_return})
    return Credit(broadcast_to_tokens(batch, shared), terms={OUTCOME: term})


@register("graph_gpo", needs_samples=True, needs_state_key=True)
def graph_gpo(
    batch: TokenBatch,
    *,
    omega: Fraction = 0.1,
    relative: bool = False,
    threshold: Finite = 0.0,
    step_weight: NonNegative = 1.0,
    norm: Norm = "mean_std_norm",
    unit: Unit = "trajectory",
) -> Credit:
    """Aᵢₜ = A^Eᵢ + w·A^Sᵢₜ, A^S the value 10·ω^d(S′) normalised among the steps of the group in one state.

    The transitions S → S′ that any trajectory of the group made are the edges of a graph, and d(S) is the least number
    of edges from S to success, which the last step of a trajectory leads to if its rewards (without the KL) sum to more
    than `threshold`. From where no success is reached, and after the last step of any other trajectory, d is the
    largest in the group plus 1. `relative` takes 10·ω^(d(S′) − d(S) + 1), the progress that the step made. A^E is the
    outcome normalised in its group. Where no trajectory of the group succeeds, at a lone visit and where all steps lead
    equally far, A^S = 0 exactly. A revisit is an edge as any other. An unknown state is one that no other step is in.

    BIASED: d is that of the best that any sample did from there, and not of what the policy will do.

    Source: GraphGPO, arXiv 2605.26684, and its code (recipe/GraphGPO of verl-agent, where ω is `gamma`, `relative` is
    `normalize_distance` and `unit` is `step`). There every trajectory says whether it succeeded, and its last state.
    """
    state, _ = _anchors(batch)
    ends = batch.real_step & ~has_successor(batch.step_trajectory)
    total = jax.ops.segment_sum(batch.rewards, batch.step_trajectory, batch.trajectories + 1)[:-1]
    succeeds = ends & (broadcast_to_steps(batch, total) > threshold)
    here, ahead = _distances(batch, state, succeeds)
    value = SUCCESS_RETURN * jnp.asarray(omega, batch.rewards.dtype) ** (ahead - (here - 1 if relative else 0))
    names = ("value of the next state", "mean of the state")
    step, step_term = normalise_by_group(value, state, batch.steps, norm, names=names)
    episode, episode_term = outcome_to_steps(batch, *normalise_outcome(batch, norm, unit))
    return Credit(
        broadcast_to_tokens(batch, episode + step_weight * step),
        terms={OUTCOME: episode_term, "among equal states": step_term._replace(weight=step_weight)},
    )


def _own_number(key: Int[Array, "steps"]) -> Int[Array, "steps"]:
    """Give each step without a key a negative one that no other step has."""
    return jnp.where(key < 0, -1 - jnp.arange(key.size, dtype=key.dtype), key)


def _anchors(batch: TokenBatch) -> tuple[Int[Array, "steps"], Int[Array, "steps"]]:
    """Number the states of each group, and the pairs of state and action; padding is `batch.steps`."""
    keys = batch.step_group, _own_number(batch.state_key), _own_number(batch.action_key)
    _, state, action = (jnp.where(batch.real_step, x, batch.steps) for x in group_ids(*keys))
    return state, action


def _neighbour(batch: TokenBatch, key: Int[Array, "steps"], offset: int) -> Int[Array, "steps"]:
    """Return the key of the step `offset` later in the trajectory; the least integer where there is no such step."""
    place = jnp.arange(batch.steps) + offset
    at = jnp.clip(place, 0, batch.steps - 1)
    exists = (place == at) & (batch.step_trajectory[at] == batch.step_trajectory)
    return jnp.where(exists, key[at], jnp.iinfo(key.dtype).min)


def _first_visit(batch: TokenBatch, action: Int[Array, "steps"]) -> Bool[Array, "steps"]:
    """Return True where a trajectory takes an action in a state for the first time; False for padding."""
    visit, index = group_ids(action, batch.step_trajectory)[1], jnp.arange(batch.steps)
    return batch.real_step & (index == jax.ops.segment_min(index, visit, batch.steps)[visit])


def _mean(x: Float[Array, "steps"], group: Int[Array, "steps"], weight: Float[Array, "steps"]) -> Float[Array, "steps"]:
    """Return the weighted mean of each step's group; 0 for padding."""
    return _total(weight * x, group) / jnp.maximum(_total(weight, group), 1e-30)


def _total(x: Float[Array, "steps"], group: Int[Array, "steps"]) -> Float[Array, "steps"]:
    """Return the sum over each step's group; 0 for padding."""
    return jnp.where(group < x.size, jax.ops.segment_sum(x, group, x.size + 1)[group], 0)


def _action_means(
    x: Float[Array, "steps"], state: Int[Array, "steps"], action: Int[Array, "steps"], weight: Float[Array, "steps"]
) -> ActionMeans:
    """Average x over the visits to each state, and to each pair of state and action, `weight` times each."""
    centred, _, _, _ = center_by_group(x, state, x.size, weight)  # Exactly 0 in a state of equal returns.
    action_count, state_count = _total(weight, action), _total(weight, state)
    difference = jnp.where(action_count < state_count, _mean(centred, action, weight), 0)
    return ActionMeans(
        difference=difference,
        state=_mean(x, state, weight),
        action_count=action_count,
        state_count=state_count,
        between=_mean(difference**2, state, weight),
        within=_mean((centred - difference) ** 2, state, weight),
    )


def _distances(
    batch: TokenBatch, state: Int[Array, "steps"], succeeds: Bool[Array, "steps"]
) -> tuple[Int[Array, "steps"], Int[Array, "steps"]]:
    """Return the least number of steps to success from the state of each step, and from the state that it leads to.

    Breadth-first search from success: what is k steps from it is known after k rounds.
    """
    unreached = batch.steps + 1
    continues = has_successor(batch.step_trajectory)
    following = jnp.where(continues, jnp.roll(state, -1), batch.steps)
    end = jnp.where(succeeds, 0, unreached)

    def ahead(distance: Int[Array, "states"]) -> Int[Array, "steps"]:
        return jnp.where(continues, distance[following], end)

    def relax(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        before, _ = carry
        after = jnp.minimum(before, jax.ops.segment_min(1 + ahead(before), state, batch.steps + 1))
        return after, (after < before).any()

    start = jnp.full((batch.steps + 1,), unreached), jnp.array(True)
    distance, _ = jax.lax.while_loop(lambda carry: carry[1], relax, start)
    here, there = distance[state], ahead(distance)
    reached = jnp.where(batch.real_step & (here < unreached), here, 0)
    beyond = jax.ops.segment_max(reached, batch.step_group, batch.trajectories + 1)[batch.step_group] + 1
    return jnp.minimum(here, beyond), jnp.minimum(there, beyond)

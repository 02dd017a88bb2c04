"""Schemes that credit a step with what it did to the belief in the gold answer.

b_t is the belief at the prompt of step t: the mean log-prob of the gold answer's tokens there (see `train.probes`), so
that step t leads from b_t to b_{t+1}. The last step leads to no prompt: it has the outcome R_i instead, the sum of all
rewards of the trajectory, as in the schemes that compare outcomes alone.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.credit.group import OUTCOME
from agentr1_jax.credit.primitives import (
    backward_recurrence,
    broadcast_to_steps,
    broadcast_to_tokens,
    center_by_group,
    group_ids,
    has_successor,
    shift_left,
)
from agentr1_jax.credit.scheme import register
from agentr1_jax.trajectory import Term
from agentr1_jax.validation import Count, Fraction, NonNegative, Positive

Belief = Literal["probability", "logprob"]
"""exp(b_t), the geometric mean of the probabilities of the answer's tokens; or b_t itself."""


@register("igpo", needs_belief=True)
def igpo(
    batch: TokenBatch,
    *,
    gamma: Fraction = 1.0,
    belief: Belief = "probability",
    normalise: Literal["joint", "separate"] = "joint",
) -> Credit:
    """Aₜ = r̃ₜ + γAₜ₊₁, with rₜ = p(bₜ₊₁) − p(bₜ) of all steps but the last, and r_T = Rᵢ.

    p is the `belief`. r̃ = (r − mean) / (√(var + 1e-8) + 1e-6), population variance, over all rewards of the group, or
    with `normalise=separate` over its gains and its outcomes apart. A group with one reward gets 0; a lone member with
    more steps is compared with itself.

    Source: IGPO, arXiv 2510.14967, and its code of February 2026 (mirrored in debajoycs98/IGPO). Deviates where that
    code places rewards by searching the text, takes a gain of 0 for no reward, and misses the last token of a response
    whose mask has holes. The code of October 2025 (GuoqingWang1/IGPO) centres returns by token position instead.
    """
    value, last = _belief(batch, belief), _last_step(batch)
    gain = jnp.where(last, 0, shift_left(value) - value)
    outcome = jnp.where(last, broadcast_to_steps(batch, batch.returns), 0)
    kind = last.astype(jnp.int32) if normalise == "separate" else jnp.zeros_like(last, jnp.int32)
    group = jnp.where(batch.real_step, group_ids(batch.step_group, kind)[1], batch.steps)
    centred, mean, std = _standardise(gain + outcome, group, batch.steps)
    decay = gamma * has_successor(batch.step_trajectory)
    advantage = backward_recurrence(centred / std, decay)
    own = Term(
        {"belief after": jnp.where(last, 0, shift_left(value)), "return": outcome},
        {"belief before": jnp.where(last, 0, value), "group mean": mean},
        std=std,
    )
    later = Term({"discounted later advantages": decay * shift_left(advantage)})
    return Credit(broadcast_to_tokens(batch, advantage), terms={"gain or outcome in its group": own, "later": later})


@register("a2tgpo", needs_belief=True, needs_samples=True)
def a2tgpo(
    batch: TokenBatch, *, gamma: Fraction = 1.0, belief: Belief = "probability", step_weight: NonNegative = 0.3
) -> Credit:
    """Aₜ = α·(Σᵤ₌ₜ^(T−1) γ^(u−t)·r̃ᵤ) / √(T − t) + R̃ᵢ of all steps but the last, and A_T = R̃ᵢ.

    rₜ = p(bₜ₊₁) − p(bₜ) is normalised among the steps of equal index t in the group, R_i among the trajectories of the
    group, both as in `igpo`; α is `step_weight`. A step that is alone at its index has r̃ = 0. BIASED where the policy
    decides when to stop, as `turn_grpo`: the steps at index t are then those of the samples that chose to go on.

    The published loss also widens and narrows the range of the clip by r̃ₜ; that is left out here.

    Source: A²TGPO, arXiv 2605.06200; the formula from descriptions of its code (CuSO4-Chen/A-TGPO, mode
    `turn-group-v1d`) by others, and γ and α as its recipe sets them: the code itself was not read.
    """
    value, last = _belief(batch, belief), _last_step(batch)
    goes_on = batch.real_step & ~last
    gain = jnp.where(goes_on, shift_left(value) - value, 0)
    cell = jnp.where(goes_on, group_ids(batch.step_group, batch.step_index)[1], batch.steps)
    centred, _, std = _standardise(gain, cell, batch.steps)
    to_come = backward_recurrence(centred / std, gamma * has_successor(batch.step_trajectory))
    root = jnp.sqrt(jnp.maximum(_steps_after(batch), 1).astype(gain.dtype))
    progress = Term({"normalised gains from here on": to_come}, weight=step_weight, std=root)
    _, mean, outcome_std = _standardise(batch.returns, batch.group, batch.trajectories)
    outcome = _outcome_term(batch, mean, outcome_std)
    return Credit(
        broadcast_to_tokens(batch, progress.total + outcome.total),
        terms={"among equal step indices": progress, OUTCOME: outcome},
    )


@register("trace", needs_belief=True)
def trace(
    batch: TokenBatch,
    *,
    gap: Positive = 0.1,
    horizon: Count = 3,
    decay: Fraction = 0.8,
    step_weight: NonNegative = 0.2,
    terminal_weight: NonNegative = 2.0,
    frozen: bool = True,
) -> Credit:
    """Aₜ = R̃ᵢ + w·(Cₜ + Fₜ) of all steps but the last, and A_T = R̃ᵢ.

    The value of a state is how much of the gap to a certain answer is closed since the first prompt, in logarithms:
    Vₜ = log((ε − b₁) / (ε − bₜ)), with δₜ = Vₜ₊₁ − Vₜ. Cₜ = Σⱼ dʲ·δₜ₊ⱼ / Σⱼ dʲ over the K steps from t on, as far as
    they lead to a prompt. Where these reach the last of them, Fₜ = c·d^(T−t)·R̃ᵢ. R̃ = (R − mean) / (std + 1e-6) in the
    group, population std. ε is `gap`, K `horizon`, d `decay`, w `step_weight`, c `terminal_weight`.

    Progress is not compared with that of other samples. It is measured by the frozen reference: `credit.probe=policy`
    is refused, unless `frozen=False` asks for it.

    Source: TRACE, arXiv 2607.13988, Algorithm 1 and its constants as two independent implementations state them; the
    1e-6 of the std is ours, and so is that a truncated trajectory's last step has R̃ alone.
    """
    del frozen  # For whoever chooses the parameters that probe.
    assert batch.belief is not None
    goes_on = batch.real_step & ~_last_step(batch)
    value = -jnp.log(jnp.where(batch.real_step, gap - jnp.minimum(batch.belief, 0), 1))
    change = jnp.where(goes_on, shift_left(value) - value, 0)
    total, count = jnp.zeros_like(change), jnp.zeros_like(change)
    for _ in range(horizon):
        total = jnp.where(goes_on, change + decay * shift_left(total), 0)
        count = jnp.where(goes_on, 1 + decay * shift_left(count), 0)
    progress = Term({"closed per step": total / jnp.maximum(count, 1)}, weight=step_weight)
    _, mean, variance, _ = center_by_group(batch.returns, batch.group, batch.trajectories)
    outcome = _outcome_term(batch, mean, jnp.sqrt(variance) + 1e-6)
    left = _steps_after(batch)
    reaches = goes_on & (left <= horizon)
    share = jnp.where(reaches, decay ** jnp.where(reaches, left, 1).astype(change.dtype), 0)
    near_end = outcome._replace(weight=step_weight * terminal_weight * share)
    return Credit(
        broadcast_to_tokens(batch, outcome.total + progress.total + near_end.total),
        terms={OUTCOME: outcome, "gap to the gold answer": progress, "outcome near the end": near_end},
    )


def _belief(batch: TokenBatch, kind: Belief) -> Float[Array, "steps"]:
    assert batch.belief is not None
    known = jnp.where(batch.real_step, batch.belief, 0)
    return jnp.exp(known) if kind == "probability" else known


def _last_step(batch: TokenBatch) -> Bool[Array, "steps"]:
    """Return True at the last step of each trajectory."""
    return batch.real_step & ~has_successor(batch.step_trajectory)


def _steps_after(batch: TokenBatch) -> Int[Array, "steps"]:
    """Return the number of steps of the trajectory that follow each step; 0 for padding."""
    count = jnp.append(batch.trajectory_steps, 0)[batch.step_trajectory]
    return jnp.where(batch.real_step, count - 1 - batch.step_index, 0)


def _standardise(
    x: Float[Array, "n"], group: Int[Array, "n"], groups: int
) -> tuple[Float[Array, "n"], Float[Array, "n"], Float[Array, "n"]]:
    """Return x − mean of its group, the mean, and √(var + 1e-8) + 1e-6 with the population's variance."""
    centred, mean, variance, _ = center_by_group(x, group, groups)
    return centred, mean, jnp.sqrt(variance + 1e-8) + 1e-6


def _outcome_term(batch: TokenBatch, mean: Float[Array, "n"], std: Float[Array, "n"]) -> Term:
    """Return the term of R_i, compared with the mean of its group, for the steps of its trajectory."""
    returns, mean, std = (broadcast_to_steps(batch, x) for x in (batch.returns, mean, std))
    return Term({"return": returns}, {"group mean": mean}, std=jnp.where(batch.real_step, std, 1))

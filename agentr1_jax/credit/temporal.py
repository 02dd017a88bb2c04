"""Schemes that follow time: returns and generalised advantage estimation, over tokens, steps or both."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.credit.primitives import (
    Whitening,
    backward_recurrence,
    broadcast_to_steps,
    broadcast_to_tokens,
    gae_over_steps,
    gae_over_tokens,
    length_lambda,
    mean_of_tokens,
    next_value,
    shift_left,
    step_returns,
    sum_to_steps,
    td_term,
    token_returns,
    whiten_steps,
    whiten_term,
    whiten_tokens,
)
from agentr1_jax.credit.scheme import register
from agentr1_jax.trajectory import Term
from agentr1_jax.validation import Fraction, NonNegative

LAMBDAS = ("lam", "lam_length")
"""Arguments that set λ: itself, or α of λ = 1 − 1/(α·L), L the length of the trajectory (see `length_lambda`)."""


@register("reinforce")
def reinforce(batch: TokenBatch, *, gamma: Fraction = 1.0, whiten: Whitening = "step") -> Credit:
    """Gₜ = rₜ + γGₜ₊₁ over steps, whitened over steps, broadcast to the step's tokens.

    What the tables of Agent-R1 v2 call REINFORCE++.

    Source: Williams 1992; Agent-R1, arXiv 2511.14460.
    """
    returns = step_returns(batch, gamma)
    advantage, mean, std = whiten_steps(batch, returns, whiten)
    return Credit(
        advantages=broadcast_to_tokens(batch, advantage),
        terms={"return to go": Term({"return to go": returns}, mean, std=std)},
    )


@register("reinforce_pp", discount_unit="token")
def reinforce_pp(batch: TokenBatch, *, gamma: Fraction = 1.0, whiten: Whitening = "token") -> Credit:
    """Gₖ = rₖ + γGₖ₊₁ over the sampled tokens of the whole trajectory, whitened over tokens.

    The return runs on across observations: later rewards are credited to the calls before them.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    returns = token_returns(batch, gamma)
    advantages, mean, std = whiten_tokens(batch, returns, whiten)
    term = mean_of_tokens(batch, Term({"return to go": returns}, mean, std=std))
    return Credit(advantages, terms={"mean over tokens": term})


@register("token_gae", needs_critic=True, discount_unit="token", exclusive=LAMBDAS)
def token_gae(
    batch: TokenBatch,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 1.0,
    lam_length: NonNegative = 0.0,
    whiten: Whitening = "token",
) -> Credit:
    """GAE whose time is the sampled token, over the whole trajectory.

    δₖ = rₖ + γVₖ₊₁ − Vₖ,  Aₖ = δₖ + γλAₖ₊₁. Tokens that were not sampled are skipped: the last token of step t
    bootstraps from the first token of step t + 1 (the "advantage mask" of Agent-R1). A step's reward falls on its last
    token. Advantages are whitened over tokens; the critic's target is Rₖ = Aₖ + Vₖ (A before whitening). With
    `lam_length` α > 0, λ = 1 − 1/(α·L), L the trajectory's sampled tokens; VAPO and SAO, from which it is, train the
    critic with λ = 1 instead.

    Source: PPO, arXiv 1707.06347; Agent-R1, arXiv 2511.14460.
    """
    assert batch.values is not None
    length = broadcast_to_steps(batch, batch.trajectory_tokens.astype(batch.values.dtype))
    lam_of_token = length_lambda(lam, lam_length, broadcast_to_tokens(batch, length))
    advantage, term = gae_over_tokens(batch, batch.values, gamma, lam_of_token)
    whitened, mean, std = whiten_tokens(batch, advantage, whiten)
    return Credit(
        advantages=whitened,
        value_targets=jnp.where(batch.real_token, advantage + batch.values, 0),
        value_mask=batch.real_token,
        terms={"mean over tokens": mean_of_tokens(batch, whiten_term(term, mean, std))},
    )


@register("step_gae", needs_critic=True, exclusive=LAMBDAS)
def step_gae(
    batch: TokenBatch,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 1.0,
    lam_length: NonNegative = 0.0,
    anchor: Literal["prompt", "last_token"] = "prompt",
    whiten: Whitening = "step",
) -> Credit:
    """GAE whose time is the step: one value before each response, one advantage for all its tokens.

    δₜ = rₜ + γVₜ₊₁ − Vₜ,  Aₜ = δₜ + γλAₜ₊₁, with V_t the critic at the last prompt token of step t and V after the last
    step the bootstrap value. Advantages are whitened over steps and broadcast to the step's tokens. The critic's target
    is Rₜ = Aₜ + Vₜ (A before whitening), at that one position only. rₜ includes the rewards of the step's tokens. With
    `lam_length` α > 0, λ = 1 − 1/(α·L), L the trajectory's steps.

    With `anchor=last_token`, V_t is the critic before the step's last token, as in the turn level of VAGEN (arXiv
    2510.16907). BIASED: that V has seen the tokens of the step before it, and takes from them what they earned.

    Source: StepPO, arXiv 2604.18401.
    """
    assert batch.values is not None
    first = batch.first_token if anchor == "prompt" else batch.last_token
    value = sum_to_steps(batch, jnp.where(first, batch.values, 0))
    length = broadcast_to_steps(batch, batch.trajectory_steps.astype(value.dtype))
    advantage, term = gae_over_steps(batch, value, gamma, length_lambda(lam, lam_length, length))
    whitened, mean, std = whiten_steps(batch, advantage, whiten)
    return Credit(
        advantages=broadcast_to_tokens(batch, whitened),
        value_targets=jnp.where(first, broadcast_to_tokens(batch, advantage + value), 0),
        value_mask=first,
        terms={"advantage estimate": whiten_term(term, mean, std)},
    )


@register("bilevel_gae", needs_critic=True, exclusive=LAMBDAS)
def bilevel_gae(
    batch: TokenBatch,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 1.0,
    lam_length: NonNegative = 0.0,
    gamma_high: Fraction = 0.95,
    whiten: Whitening = "token",
) -> Credit:
    """GAE over steps, then over the tokens inside each step.

    High level: with V_t the value at the last token of step t (before it is sampled) and r_t with that token's own
    reward, δₜ = rₜ + γ_high·Vₜ₊₁ − Vₜ,  Aₜ = δₜ + γ_high·λ·Aₜ₊₁. Low level: the last token of the step has advantage
    A_t; before it δₖ = rₖ + γVₖ₊₁ − Vₖ,  Aₖ = δₖ + γλAₖ₊₁. Whitened over tokens; the critic's target is Aₖ + Vₖ at
    every sampled token (A before whitening). With `lam_length` α > 0, λ = 1 − 1/(α·L): L is the length of the timeline
    that λ runs on, the steps of the trajectory above, the sampled tokens of the step below (our reading).

    Source: VAGEN, arXiv 2510.16907; RAGEN, arXiv 2504.20073.
    """
    assert batch.values is not None
    trained, last = batch.real_token, batch.last_token
    at_last = dataclasses.replace(batch, token_rewards=jnp.where(last, batch.token_rewards, 0))
    value = sum_to_steps(batch, jnp.where(last, batch.values, 0))
    lengths = [x.astype(value.dtype) for x in (batch.trajectory_steps, batch.step_tokens)]
    lam_high = length_lambda(lam, lam_length, broadcast_to_steps(batch, lengths[0]))
    lam_low = length_lambda(lam, lam_length, broadcast_to_tokens(batch, lengths[1]))
    high, high_term = gae_over_steps(at_last, value, gamma_high, lam_high)
    inside = trained & ~last
    after = gamma * next_value(batch, batch.values)
    delta = jnp.where(inside, batch.token_rewards + after - batch.values, 0)
    decay = jnp.where(last, 0.0, jnp.where(inside, gamma * lam_low, 1.0))
    advantage = backward_recurrence(jnp.where(last, broadcast_to_tokens(batch, high), delta), decay)
    whitened, mean, std = whiten_tokens(batch, advantage, whiten)
    low_term = td_term(batch.token_rewards, after, decay * shift_left(advantage), batch.values)
    plus = {k: jnp.where(last, broadcast_to_tokens(batch, high_term.plus[k]), x) for k, x in low_term.plus.items()}
    return Credit(
        advantages=whitened,
        value_targets=jnp.where(trained, advantage + batch.values, 0),
        value_mask=trained,
        terms={"mean over tokens": mean_of_tokens(batch, whiten_term(low_term._replace(plus=plus), mean, std))},
    )

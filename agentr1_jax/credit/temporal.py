"""Schemes that follow time: returns and generalised advantage estimation, over tokens, steps or both."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.credit.primitives import (
    Whitening,
    backward_recurrence,
    broadcast_to_tokens,
    gae_over_steps,
    gae_over_tokens,
    next_value,
    step_returns,
    sum_to_steps,
    token_returns,
    whiten_steps,
    whiten_tokens,
)
from agentr1_jax.credit.scheme import register
from agentr1_jax.validation import Fraction


@register("reinforce")
def reinforce(batch: TokenBatch, *, gamma: Fraction = 1.0, whiten: Whitening = "step") -> Credit:
    """Gₜ = rₜ + γGₜ₊₁ over steps, whitened over steps, broadcast to the step's tokens.

    What the tables of Agent-R1 v2 call REINFORCE++.

    Source: Williams 1992; Agent-R1, arXiv 2511.14460.
    """
    return Credit(broadcast_to_tokens(batch, whiten_steps(batch, step_returns(batch, gamma), whiten)))


@register("reinforce_pp", discount_unit="token")
def reinforce_pp(batch: TokenBatch, *, gamma: Fraction = 1.0, whiten: Whitening = "token") -> Credit:
    """Gₖ = rₖ + γGₖ₊₁ over the sampled tokens of the whole trajectory, whitened over tokens.

    The return runs on across observations: later rewards are credited to the calls before them.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    return Credit(whiten_tokens(batch, token_returns(batch, gamma), whiten))


@register("token_gae", needs_critic=True, discount_unit="token")
def token_gae(batch: TokenBatch, *, gamma: Fraction = 1.0, lam: Fraction = 1.0, whiten: Whitening = "token") -> Credit:
    """GAE whose time is the sampled token, over the whole trajectory.

    δₖ = rₖ + γVₖ₊₁ − Vₖ,  Aₖ = δₖ + γλAₖ₊₁. Tokens that were not sampled are skipped: the last token of step t
    bootstraps from the first token of step t + 1 (the "advantage mask" of Agent-R1). A step's reward falls on its last
    token. Advantages are whitened over tokens; the critic's target is Rₖ = Aₖ + Vₖ (A before whitening).

    Source: PPO, arXiv 1707.06347; Agent-R1, arXiv 2511.14460.
    """
    assert batch.values is not None
    advantage = gae_over_tokens(batch, batch.values, gamma, lam)
    return Credit(
        advantages=whiten_tokens(batch, advantage, whiten),
        value_targets=jnp.where(batch.real_token, advantage + batch.values, 0),
        value_mask=batch.real_token,
    )


@register("step_gae", needs_critic=True)
def step_gae(batch: TokenBatch, *, gamma: Fraction = 1.0, lam: Fraction = 1.0, whiten: Whitening = "step") -> Credit:
    """GAE whose time is the step: one value before each response, one advantage for all its tokens.

    δₜ = rₜ + γVₜ₊₁ − Vₜ,  Aₜ = δₜ + γλAₜ₊₁, with V_t the critic at the last prompt token of step t and V after the last
    step the bootstrap value. Advantages are whitened over steps and broadcast to the step's tokens. The critic's target
    is Rₜ = Aₜ + Vₜ (A before whitening), at that one position only. rₜ includes the rewards of the step's tokens.

    Source: StepPO, arXiv 2604.18401.
    """
    assert batch.values is not None
    first = batch.first_token
    value = sum_to_steps(batch, jnp.where(first, batch.values, 0))
    advantage = gae_over_steps(batch, value, gamma, lam)
    return Credit(
        advantages=broadcast_to_tokens(batch, whiten_steps(batch, advantage, whiten)),
        value_targets=jnp.where(first, broadcast_to_tokens(batch, advantage + value), 0),
        value_mask=first,
    )


@register("bilevel_gae", needs_critic=True)
def bilevel_gae(
    batch: TokenBatch,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 1.0,
    gamma_high: Fraction = 0.95,
    whiten: Whitening = "token",
) -> Credit:
    """GAE over steps, then over the tokens inside each step.

    High level: with V_t the value at the last token of step t (before it is sampled) and r_t with that token's own
    reward, δₜ = rₜ + γ_high·Vₜ₊₁ − Vₜ,  Aₜ = δₜ + γ_high·λ·Aₜ₊₁. Low level: the last token of the step has advantage
    A_t; before it δₖ = rₖ + γVₖ₊₁ − Vₖ,  Aₖ = δₖ + γλAₖ₊₁. Whitened over tokens; the critic's target is Aₖ + Vₖ at
    every sampled token (A before whitening).

    Source: VAGEN, arXiv 2510.16907; RAGEN, arXiv 2504.20073.
    """
    assert batch.values is not None
    trained, last = batch.real_token, batch.last_token
    at_last = dataclasses.replace(batch, token_rewards=jnp.where(last, batch.token_rewards, 0))
    value = sum_to_steps(batch, jnp.where(last, batch.values, 0))
    high = gae_over_steps(at_last, value, gamma_high, lam)
    inside = trained & ~last
    delta = jnp.where(inside, batch.token_rewards + gamma * next_value(batch, batch.values) - batch.values, 0)
    decay = jnp.where(last, 0.0, jnp.where(inside, gamma * lam, 1.0))
    advantage = backward_recurrence(jnp.where(last, broadcast_to_tokens(batch, high), delta), decay)
    return Credit(
        advantages=whiten_tokens(batch, advantage, whiten),
        value_targets=jnp.where(trained, advantage + batch.values, 0),
        value_mask=trained,
    )

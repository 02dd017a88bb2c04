"""Losses, their slopes and their aggregates against published numbers and slow references."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from builders import golden
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentr1_jax.learner.batch import LossTokens
from agentr1_jax.learner.config import AGGREGATES, CLIPS, RATIOS, LossConfig
from agentr1_jax.learner.loss_weights import TokenUnits, loss_weights
from agentr1_jax.learner.losses import MINIBATCH_RATIOS, minibatch_log_ratio, policy_loss, value_loss

CONFIG = LossConfig(clip_high=0.28)
quick = settings(max_examples=40, deadline=None)
ROWS, LOSS_TOKENS = 2, 10


def make_loss_tokens(old, advantage, mask, step, trajectory=None):
    """Loss tokens of given numbers [rows, tokens]; a row is a group, and a trajectory unless those are given."""
    old, advantage = jnp.asarray(old), jnp.asarray(advantage)
    mask, step = np.asarray(mask, bool), np.asarray(step)
    row = np.where(mask, np.arange(len(mask))[:, None], -1)
    return LossTokens(
        logit_index=np.zeros(mask.shape, int),
        target=np.zeros(mask.shape, int),
        step=jnp.asarray(np.where(mask, step, -1)),
        trajectory=jnp.asarray(row if trajectory is None else trajectory),
        group=row,
        is_action=jnp.asarray(mask),
        old_logprob=old,
        advantage=advantage,
        weight=jnp.zeros_like(old),
    )


@functools.cache
def losses_and_slopes(config):
    """(log π, loss tokens of a minibatch) -> losses, log ρ, clip activity, and the slope of the weighted loss."""

    def total(new, loss_tokens):
        out = policy_loss(config, new, loss_tokens)
        return jnp.sum(jnp.where(loss_tokens.is_action, out[0] * loss_tokens.weight, 0)), out

    def both(new, loss_tokens):
        if config.ratio in MINIBATCH_RATIOS and config.clip != "none":
            loss_tokens = loss_tokens.replace(log_ratio=minibatch_log_ratio(config.ratio, new, loss_tokens))
        slope, out = jax.grad(total, has_aux=True)(new, loss_tokens)
        return *out, slope

    return jax.jit(both)


@pytest.mark.parametrize(
    ("name", "changes", "aggregate"),
    [
        ("vanilla", {"clip": "dual"}, "token"),
        ("gspo", {"clip": "asymmetric", "ratio": "step", "clip_low": 3e-4, "clip_high": 4e-4}, "step"),
        ("gspo", {"clip": "asymmetric", "ratio": "trajectory", "clip_low": 3e-4, "clip_high": 4e-4}, "trajectory"),
        ("cispo", {"clip": "cispo"}, "token"),
    ],
)
def test_losses_give_the_published_numbers(name, changes, aggregate):
    entry = golden(f"verl.loss.{name}")
    x, out = entry["inputs"], entry["outputs"]
    config = dataclasses.replace(CONFIG, **changes)
    assert (config.clip_low, config.clip_high, config.dual_c) == (x["clip_low"], x["clip_high"], x["clip_c"])
    mask, row = x["mask"] > 0, np.arange(2).repeat(4)
    weights = loss_weights(aggregate, TokenUnits(row, row, row), mask.ravel()).reshape(mask.shape)
    with jax.enable_x64(True):
        loss_tokens = make_loss_tokens(x["old"], x["adv"], mask, row.reshape(mask.shape)).replace(
            weight=jnp.asarray(weights)
        )
        loss, log_rho, active, slope = losses_and_slopes(config)(jnp.asarray(x["new"]), loss_tokens)
        np.testing.assert_allclose((loss * weights)[mask].sum(), out["loss"], rtol=1e-6)
        np.testing.assert_allclose(slope, out["grad_new"], atol=1e-7)
        np.testing.assert_allclose(np.mean(np.asarray(active)[mask]), out["actor/pg_clipfrac"], rtol=1e-6)
        if config.ratio == "token":
            np.testing.assert_allclose(-np.mean(np.asarray(log_rho)[mask]), out["actor/ppo_kl"], rtol=1e-6)


@st.composite
def tokens(draw):
    """Rows of loss tokens: log-probs, advantages, steps of 1 to 4 tokens, then padding; three trajectories."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    step, number = np.full((ROWS, LOSS_TOKENS), -1), 0
    for row in range(ROWS):
        column = 0
        for length in draw(st.lists(st.integers(1, 4), max_size=4)):
            step[row, column : column + length] = number
            column, number = column + length, number + 1
    trajectory = np.where(step >= 0, rng.integers(0, 3, step.size)[step], -1)
    old = rng.uniform(-3, -0.1, step.shape)
    advantage = rng.normal(size=step.shape)
    return old + rng.uniform(-1.5, 1.5, step.shape), old, advantage, step, trajectory


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("clip", CLIPS)
@quick
@given(cells=tokens())
def test_losses_and_slopes_equal_the_loops(ratio, clip, cells):
    new, old, advantage, step, trajectory = cells
    config, mask = dataclasses.replace(CONFIG, ratio=ratio, clip=clip), step >= 0
    flat = [x[mask] for x in cells]
    units = flat[3], flat[4]
    log_rho = np.array(reference.log_ratios(ratio, *flat[:2], *units))
    assume(np.all(np.abs(np.exp(log_rho)[:, None] - [0.8, 1.28, 3.0]) > 1e-3))
    with jax.enable_x64(True):
        loss_tokens = make_loss_tokens(old, advantage, mask, step, trajectory).replace(weight=jnp.ones(step.shape))
        loss, got, active, slope = (np.asarray(x) for x in losses_and_slopes(config)(jnp.asarray(new), loss_tokens))
    expected, slopes = reference.policy_loss(ratio, clip, *flat[:3], *units, low=0.2, high=0.28, c=3.0, tau=(1.0, 1.05))
    np.testing.assert_allclose(loss[mask], expected, atol=1e-9)
    np.testing.assert_allclose(slope[mask], slopes, atol=1e-9)
    assert not slope[~mask].any()
    if clip == "none":
        assert not got.any()
    else:
        np.testing.assert_allclose(got[mask], log_rho, atol=1e-9)
    clipped = np.where(flat[2] > 0, log_rho > np.log(1.28), log_rho < np.log(0.8)) & (clip not in ("none", "sapo"))
    np.testing.assert_array_equal(active[mask], clipped)


def test_clip_none_ignores_the_old_logprob():
    with jax.enable_x64(True):
        loss_tokens = make_loss_tokens([[-800.0, 0.0]], [[2.0, -1.0]], [[1, 1]], [[0, 0]]).replace(
            weight=jnp.ones((1, 2))
        )
        config = dataclasses.replace(CONFIG, clip="none")
        loss, _, active, slope = losses_and_slopes(config)(jnp.asarray([[-1.5, -0.5]]), loss_tokens)
    np.testing.assert_allclose(loss, [[3.0, -0.5]])
    np.testing.assert_allclose(slope, [[-2.0, 1.0]])
    assert not np.any(active)


def test_sapo_takes_its_temperature_from_the_sign_of_the_advantage():
    """−(4/τ)·σ(τ(ρ − 1))·A at ρ = 1 is −2A/τ with the slope of −ρA; at ρ = 2 the gate has its say."""
    advantage = [[2.0, -1.0, 0.0, 1.0]]
    loss_tokens = make_loss_tokens([[-1.0, -1.0, -1.0, -1.0 - np.log(2)]], advantage, np.ones((1, 4)), [[0, 0, 0, 0]])
    config = dataclasses.replace(CONFIG, clip="sapo", sapo_positive=2.0, sapo_negative=4.0)
    loss, _, active, slope = losses_and_slopes(config)(
        jnp.full((1, 4), -1.0), loss_tokens.replace(weight=jnp.ones((1, 4)))
    )
    gate = 1 / (1 + np.exp(-2.0))
    np.testing.assert_allclose(loss, [[-2.0, 0.5, 0.0, -2 * gate]], rtol=1e-6)
    np.testing.assert_allclose(slope, [[-2.0, 1.0, 0.0, -8 * gate * (1 - gate)]], rtol=1e-5)
    assert not np.any(active)


def test_sapo_is_finite_where_the_ratio_is_not():
    loss_tokens = make_loss_tokens([[-500.0, 0.0]], [[1.0, 1.0]], np.ones((1, 2)), [[0, 1]]).replace(
        weight=jnp.ones((1, 2))
    )
    config = dataclasses.replace(CONFIG, clip="sapo")
    loss, _, _, slope = losses_and_slopes(config)(jnp.array([[0.0, -500.0]]), loss_tokens)
    np.testing.assert_allclose(loss, [[-4.0, -4 / (1 + np.e)]], rtol=1e-6)
    np.testing.assert_array_equal(slope, [[0.0, 0.0]])


def test_the_value_loss_is_clipped_about_the_old_value():
    loss_tokens = make_loss_tokens(np.zeros((1, 4)), np.zeros((1, 4)), np.ones((1, 4)), [[0, 0, 0, 0]])
    loss_tokens = loss_tokens.replace(old_value=jnp.zeros((1, 4)), value_target=jnp.array([[1.0, 2.0, 0.4, -1.0]]))
    value = jnp.array([[0.4, 1.0, 0.9, -0.9]])
    np.testing.assert_allclose(value_loss(CONFIG, value, loss_tokens), [[0.18, 1.125, 0.125, 0.125]], rtol=1e-5)
    slope = jax.grad(lambda v: value_loss(CONFIG, v, loss_tokens).sum())(value)
    # Beyond the clip the loss stops to fall (second, fourth) but not to rise (third).
    np.testing.assert_allclose(slope, [[-0.6, 0.0, 0.5, 0.0]], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "aggregate", "constant"),
    [("token-mean", "token", 1), ("seq-mean-token-sum", "fixed", 2), ("seq-mean-token-mean", "step", 1)],
)
def test_aggregates_give_the_published_numbers(name, aggregate, constant):
    entry = golden(f"agg_loss.{name}")
    mask, row = entry["inputs"]["mask"] > 0, np.arange(3).repeat(4)
    weights = loss_weights(aggregate, TokenUnits(row, row, row), mask.ravel(), fixed_denominator=constant)
    np.testing.assert_allclose((weights * entry["inputs"]["mat"].ravel()).sum(), entry["outputs"]["verl"], rtol=1e-6)


@st.composite
def units(draw):
    """Unit of each token (steps within trajectories within groups), which are trained, and a loss each."""
    step, trajectory, group, number = [], [], [], 0
    for i in range(draw(st.integers(1, 5))):
        of = draw(st.integers(0, 2))
        for length in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)):
            step += [number] * length
            trajectory += [i] * length
            group += [of] * length
            number += 1
    size = len(step)
    trained = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    losses = draw(st.lists(st.floats(-4, 4), min_size=size, max_size=size))
    return step, trajectory, group, trained, losses


@pytest.mark.parametrize("aggregate", AGGREGATES)
@quick
@given(cells=units(), constant=st.sampled_from((1.0, 7.0)))
def test_weights_make_the_mean_that_they_are_named_after(aggregate, cells, constant):
    step, trajectory, group, trained, losses = cells
    columns = [np.array(x) for x in (step, trajectory, group, trained)]
    weights = loss_weights(aggregate, TokenUnits(*columns[:3]), columns[3], fixed_denominator=constant)
    expected = reference.aggregate(aggregate, losses, step, trajectory, group, trained, constant)
    np.testing.assert_allclose((weights * losses).sum(), expected, atol=1e-5)
    assert not weights[~columns[3]].any()
    if aggregate != "fixed" and any(trained):
        np.testing.assert_allclose(weights.sum(), 1, rtol=1e-6)


def test_an_unknown_aggregate_is_an_error():
    index = np.zeros(1, int)
    with pytest.raises(ValueError, match="unknown aggregate 'mean'; choose one of token, step, trajectory, group"):
        loss_weights("mean", TokenUnits(index, index, index), np.ones(1, bool))

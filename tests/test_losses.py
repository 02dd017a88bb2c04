"""Losses, their slopes and their aggregates against published numbers and slow references."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from builders import golden
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentr1_jax.learner.batch import Reads
from agentr1_jax.learner.fill import AGGREGATES, aggregate_weights
from agentr1_jax.learner.losses import CLIPS, LossConfig, policy_loss, value_loss
from agentr1_jax.learner.ratios import MINIBATCH_RATIOS, RATIOS, minibatch_log_ratio

CONFIG = LossConfig(
    ratio="token",
    clip="ppo",
    clip_low=0.2,
    clip_high=0.28,
    dual_c=3.0,
    value_coef=0.5,
    value_clip=0.5,
    entropy_coef=0.0,
    temperature=1.0,
    chunk=16,
)
quick = settings(max_examples=40, deadline=None)
ROWS, READS = 2, 10


def make_reads(old, advantage, mask, step, trajectory=None):
    """Reads of given numbers [rows, reads]; a row is a group, and a trajectory unless those are given."""
    old, advantage = jnp.asarray(old), jnp.asarray(advantage)
    mask, step = np.asarray(mask, bool), np.asarray(step)
    row = np.where(mask, np.arange(len(mask))[:, None], -1)
    return Reads(
        src=np.zeros(mask.shape, int),
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
    """(log π, reads of a minibatch) -> losses, log ρ, clip activity, and the slope of the weighted loss; compiled."""

    def total(new, reads):
        out = policy_loss(config, new, reads)
        return jnp.sum(jnp.where(reads.is_action, out[0] * reads.weight, 0)), out

    def both(new, reads):
        if config.ratio in MINIBATCH_RATIOS and config.clip != "none":
            reads = reads.replace(log_ratio=minibatch_log_ratio(config.ratio, new, reads))
        slope, out = jax.grad(total, has_aux=True)(new, reads)
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
    weights = aggregate_weights(aggregate, row, row, row, mask.ravel()).reshape(mask.shape)
    with jax.enable_x64(True):
        reads = make_reads(x["old"], x["adv"], mask, row.reshape(mask.shape)).replace(weight=jnp.asarray(weights))
        loss, log_rho, active, slope = losses_and_slopes(config)(jnp.asarray(x["new"]), reads)
        np.testing.assert_allclose((loss * weights)[mask].sum(), out["loss"], rtol=1e-6)
        np.testing.assert_allclose(slope, out["grad_new"], atol=1e-7)
        np.testing.assert_allclose(np.mean(np.asarray(active)[mask]), out["actor/pg_clipfrac"], rtol=1e-6)
        if config.ratio == "token":
            np.testing.assert_allclose(-np.mean(np.asarray(log_rho)[mask]), out["actor/ppo_kl"], rtol=1e-6)


@st.composite
def tokens(draw):
    """Rows of reads: log-probs, advantages, steps of 1 to 4 tokens followed by padding, and three trajectories."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    step, number = np.full((ROWS, READS), -1), 0
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
        reads = make_reads(old, advantage, mask, step, trajectory).replace(weight=jnp.ones(step.shape))
        loss, got, active, slope = (np.asarray(x) for x in losses_and_slopes(config)(jnp.asarray(new), reads))
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
        reads = make_reads([[-800.0, 0.0]], [[2.0, -1.0]], [[1, 1]], [[0, 0]]).replace(weight=jnp.ones((1, 2)))
        config = dataclasses.replace(CONFIG, clip="none")
        loss, _, active, slope = losses_and_slopes(config)(jnp.asarray([[-1.5, -0.5]]), reads)
    np.testing.assert_allclose(loss, [[3.0, -0.5]])
    np.testing.assert_allclose(slope, [[-2.0, 1.0]])
    assert not np.any(active)


def test_sapo_takes_its_temperature_from_the_sign_of_the_advantage():
    """−(4/τ)·σ(τ(ρ − 1))·A at ρ = 1 is −2A/τ with the slope of −ρA; at ρ = 2 the gate has its say."""
    advantage = [[2.0, -1.0, 0.0, 1.0]]
    reads = make_reads([[-1.0, -1.0, -1.0, -1.0 - np.log(2)]], advantage, np.ones((1, 4)), [[0, 0, 0, 0]])
    config = dataclasses.replace(CONFIG, clip="sapo", sapo_positive=2.0, sapo_negative=4.0)
    loss, _, active, slope = losses_and_slopes(config)(jnp.full((1, 4), -1.0), reads.replace(weight=jnp.ones((1, 4))))
    gate = 1 / (1 + np.exp(-2.0))
    np.testing.assert_allclose(loss, [[-2.0, 0.5, 0.0, -2 * gate]], rtol=1e-6)
    np.testing.assert_allclose(slope, [[-2.0, 1.0, 0.0, -8 * gate * (1 - gate)]], rtol=1e-5)
    assert not np.any(active)


def test_sapo_is_finite_where_the_ratio_is_not():
    reads = make_reads([[-500.0, 0.0]], [[1.0, 1.0]], np.ones((1, 2)), [[0, 1]]).replace(weight=jnp.ones((1, 2)))
    config = dataclasses.replace(CONFIG, clip="sapo")
    loss, _, _, slope = losses_and_slopes(config)(jnp.array([[0.0, -500.0]]), reads)
    np.testing.assert_allclose(loss, [[-4.0, -4 / (1 + np.e)]], rtol=1e-6)
    np.testing.assert_array_equal(slope, [[0.0, 0.0]])


def test_the_value_loss_is_clipped_about_the_old_value():
    reads = make_reads(np.zeros((1, 4)), np.zeros((1, 4)), np.ones((1, 4)), [[0, 0, 0, 0]])
    reads = reads.replace(old_value=jnp.zeros((1, 4)), value_target=jnp.array([[1.0, 2.0, 0.4, -1.0]]))
    value = jnp.array([[0.4, 1.0, 0.9, -0.9]])
    np.testing.assert_allclose(value_loss(CONFIG, value, reads), [[0.18, 1.125, 0.125, 0.125]], rtol=1e-5)
    slope = jax.grad(lambda v: value_loss(CONFIG, v, reads).sum())(value)
    # Beyond the clip the loss stops to fall (second, fourth) but not to rise (third).
    np.testing.assert_allclose(slope, [[-0.6, 0.0, 0.5, 0.0]], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "aggregate", "constant"),
    [("token-mean", "token", 1), ("seq-mean-token-sum", "fixed", 2), ("seq-mean-token-mean", "step", 1)],
)
def test_aggregates_give_the_published_numbers(name, aggregate, constant):
    entry = golden(f"agg_loss.{name}")
    mask, row = entry["inputs"]["mask"] > 0, np.arange(3).repeat(4)
    weights = aggregate_weights(aggregate, row, row, row, mask.ravel(), fixed_denominator=constant)
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
    weights = aggregate_weights(aggregate, *columns, fixed_denominator=constant)
    expected = reference.aggregate(aggregate, losses, step, trajectory, group, trained, constant)
    np.testing.assert_allclose((weights * losses).sum(), expected, atol=1e-5)
    assert not weights[~columns[3]].any()
    if aggregate != "fixed" and any(trained):
        np.testing.assert_allclose(weights.sum(), 1, rtol=1e-6)


def test_an_unknown_aggregate_is_an_error():
    index = np.zeros(1, int)
    with pytest.raises(ValueError, match="unknown aggregate 'mean'; choose one of token, step, trajectory, group"):
        aggregate_weights("mean", index, index, index, np.ones(1, bool))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": "turn"}, "unknown loss.ratio 'turn'; choose one of token, step, trajectory, capo"),
        ({"clip": "hard"}, "unknown loss.clip 'hard'; choose one of ppo, asymmetric, dual, cispo, sapo, none"),
        ({"kl": "k4"}, "unknown loss.kl 'k4'; choose one of none, k1, k2, k3"),
        ({"temperature": 0.0}, "rollout.temperature is 0.0; training needs a positive temperature"),
    ],
)
def test_unknown_names_and_a_temperature_of_0_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("names", "wrong", "wanted"),
    [
        (("clip_low",), (1.0, -0.1, float("nan")), "at least 0 and below 1"),
        (("clip_high", "value_coef", "entropy_coef", "kl_coef"), (-0.1, float("nan")), "at least 0"),
        (("value_clip", "sapo_positive", "sapo_negative"), (0.0, float("nan")), "above 0"),
        (("dual_c",), (1.0,), "above 1"),
        (("chunk",), (0,), "at least 1"),
    ],
)
def test_numbers_out_of_range_are_errors(names, wrong, wanted):
    for name, value in itertools.product(names, wrong):
        with pytest.raises(ValueError, match=f"loss.{name} is {value}; it must be {wanted}$"):
            dataclasses.replace(CONFIG, **{name: value})
    dataclasses.replace(CONFIG, clip_low=0.0, clip_high=0.0, value_coef=0.0, entropy_coef=0.0, kl_coef=0.0, chunk=1)

"""KL to the reference policy: published numbers, slopes, rewards and the adaptive coefficient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import golden

from agentr1_jax.learner.kl import KL_ESTIMATES, kl_estimate, kl_rewards, next_kl_coef


def slope(kind, logprob, ref):
    return jax.grad(lambda x: kl_estimate(kind, x, jnp.asarray(ref)).sum())(jnp.asarray(logprob))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_estimates_give_the_published_numbers(kind):
    """The published code also bounds x to ±20 and k3 to ±10, which these numbers do not reach; here nothing is."""
    entry = golden(f"verl.kl.{kind}")
    logprob, ref = entry["inputs"]["logp"], entry["inputs"]["ref"]
    np.testing.assert_allclose(kl_estimate(kind, logprob, ref), entry["outputs"]["kl"], atol=1e-6)
    with jax.enable_x64(True):
        np.testing.assert_allclose(slope(kind, logprob, ref), entry["outputs"]["grad"], atol=1e-6)


def test_k2_is_half_the_square():
    logprob, ref = np.array([-1.0, -2.0, -0.5]), np.array([-1.5, -1.0, -0.5])
    np.testing.assert_allclose(kl_estimate("k2", logprob, ref), [0.125, 0.5, 0.0])
    np.testing.assert_allclose(slope("k2", logprob, ref), [0.5, -1.0, 0.0])


@pytest.mark.parametrize("kind", KL_ESTIMATES)
def test_numpy_and_jax_give_the_same(kind):
    logprob, ref = np.random.default_rng(0).uniform(-3, 0, (2, 50)).astype(np.float32)
    plain = kl_estimate(kind, logprob, ref)
    traced = jax.jit(lambda x, y: kl_estimate(kind, x, y))(logprob, ref)
    assert isinstance(plain, np.ndarray) and plain.dtype == traced.dtype == np.float32
    np.testing.assert_allclose(plain, traced, rtol=1e-5, atol=1e-6)


def test_k3_keeps_its_digits_where_the_policies_nearly_agree():
    x = np.float32(1e-3) * np.arange(1, 5, dtype=np.float32)
    wide = x.astype(np.float64)
    expected = np.exp(-wide) + wide - 1
    np.testing.assert_allclose(kl_estimate("k3", x, np.zeros_like(x)), expected, rtol=1e-3)


@pytest.mark.parametrize(("kind", "share"), [("k1", 0.0), ("k2", 1.0)])
def test_the_gradient_of_the_kl_is_in_the_loss_of_k2_and_not_of_k1(kind, share):
    """Expectations over the policy itself, by enumeration of five tokens."""
    rng = np.random.default_rng(0)
    logits, ref = rng.normal(size=5), jax.nn.log_softmax(rng.normal(size=5))
    p = jax.nn.softmax(logits)

    def loss(logits):
        return jnp.sum(p * kl_estimate(kind, jax.nn.log_softmax(logits), ref))

    def kl(logits):
        logprob = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logprob) * (logprob - ref))

    np.testing.assert_allclose(jax.grad(loss)(logits), share * jax.grad(kl)(logits), atol=1e-6)


def test_rewards_are_the_estimate_times_minus_the_coefficient():
    old, ref = np.float32([-1.0, -2.0, -0.5]), np.float32([-1.5, -1.0, -0.5])
    for kind, expected in (("k1", [0.5, -1.0, 0.0]), ("k2", [0.125, 0.5, 0.0]), ("k3", [0.10653066, 0.71828183, 0.0])):
        got = kl_rewards(kind, old, ref, 0.1)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, -0.1 * np.array(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.5),  # On target.
        (0.105, 0.5 * (1 + 0.05 * 0.256)),
        (0.09, 0.5 * (1 - 0.1 * 0.256)),
        (5.0, 0.5 * (1 + 0.2 * 0.256)),  # The error counts up to 20 % either way.
        (float("inf"), 0.5 * (1 + 0.2 * 0.256)),
        (-1.0, 0.5 * (1 - 0.2 * 0.256)),
        (float("nan"), 0.5),
    ],
)
def test_the_coefficient_moves_towards_the_target(kl, expected):
    assert next_kl_coef(0.5, kl, 256, target=0.1, horizon=1000) == pytest.approx(expected, rel=1e-9)


def test_what_cannot_be_is_an_error():
    one = np.zeros(1, np.float32)
    for kind in ("none", "k4"):
        with pytest.raises(ValueError, match=f"unknown KL estimate '{kind}'; choose one of k1, k2, k3"):
            kl_estimate(kind, one, one)
        with pytest.raises(ValueError, match=f"unknown KL estimate '{kind}'"):
            kl_rewards(kind, one, one, 0.1)
    with pytest.raises(ValueError, match="the target of the adaptive KL is 0.0; it must be above 0"):
        next_kl_coef(0.1, 0.1, 8, target=0.0, horizon=1e4)
    for horizon in (0.0, 100.0):
        with pytest.raises(ValueError, match=f"the horizon of the adaptive KL is {horizon}, with 500 trajectories"):
            next_kl_coef(0.1, 0.1, 500, target=0.1, horizon=horizon)

"""Ratios of every unit against loops and by hand; those of a minibatch for any layout of its loss tokens."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.learner.batch import LossTokens
from agentr1_jax.learner.config import LossConfig
from agentr1_jax.learner.losses import MINIBATCH_RATIOS, log_ratio, minibatch_log_ratio
from agentr1_jax.runtime.mesh import global_batch

SHAPES = ((2, 4, 20), (4, 6, 10), (1, 1, 100))


def make_loss_tokens(old, mask, step, trajectory=-1):
    """Loss tokens [..., tokens] of these numbers; all else is 0."""
    mask = np.asarray(mask, bool)
    zeros = np.zeros(mask.shape)
    return LossTokens(
        logit_index=zeros.astype(int),
        target=zeros.astype(int),
        step=np.broadcast_to(step, mask.shape),
        trajectory=np.broadcast_to(trajectory, mask.shape),
        group=zeros.astype(int),
        is_action=mask,
        old_logprob=np.broadcast_to(old, mask.shape),
        advantage=zeros,
        weight=zeros,
    )


def on_device(loss_tokens):
    return jax.tree.map(jnp.asarray, loss_tokens)


def test_the_step_ratio_is_bounded_and_masked_tokens_have_none():
    loss_tokens = on_device(make_loss_tokens([[-50.0, -50.0, -50.0]], [[1, 1, 0]], [[0, 0, 0]]))
    new = jnp.zeros((1, 3))
    np.testing.assert_allclose(log_ratio(LossConfig("step"), new, loss_tokens), [[10.0, 10.0, 0.0]])
    np.testing.assert_allclose(log_ratio(LossConfig("token"), new, loss_tokens), [[50.0, 50.0, 0.0]])


@pytest.mark.parametrize("kind", MINIBATCH_RATIOS)
def test_the_value_of_a_minibatch_ratio_is_data_and_its_slope_is_each_tokens(kind):
    loss_tokens = on_device(make_loss_tokens(np.full((1, 4), -2.0), [[1, 1, 0, 1]], [[0, 0, 0, 1]]))
    loss_tokens = loss_tokens.replace(log_ratio=jnp.array([[0.5, -0.25, 7.0, 11.0]]))
    new = jnp.array([[-1.0, -9.0, -1.0, -1.0]])
    np.testing.assert_allclose(log_ratio(LossConfig(kind), new, loss_tokens), [[0.5, -0.25, 0.0, 10.0]])
    slope = jax.grad(lambda new: log_ratio(LossConfig(kind), new, loss_tokens).sum())(new)
    np.testing.assert_array_equal(slope, [[1.0, 1.0, 0.0, 0.0]])


@dataclasses.dataclass(frozen=True)
class Stream:
    """Sampled tokens [K]: their units, and log π and log π_old."""

    step: np.ndarray
    trajectory: np.ndarray
    new: np.ndarray
    old: np.ndarray

    def expected(self, kind, mean="token"):
        return reference.log_ratios(kind, self.new, self.old, self.step, self.trajectory, mean)


@st.composite
def streams(draw):
    """Up to five trajectories of up to four steps of up to four tokens."""
    lengths = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    trajectories = draw(st.lists(lengths, min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = [length for own in trajectories for length in own]
    trajectory = np.repeat(np.arange(len(trajectories)), [sum(own) for own in trajectories])
    numbers = rng.uniform(-3, 0, (2, sum(sizes)))
    return Stream(np.repeat(np.arange(len(sizes)), sizes), trajectory, *numbers), rng


def lay_out(stream, rng, shape):
    """Steps in random rows, reads of no action between them: log π, reads, and the token of each read (-1: none)."""
    token = np.full((int(np.prod(shape[:-1])), shape[-1]), -1)
    used = np.zeros(len(token), int)
    for step in rng.permutation(stream.step[-1] + 1):
        own = np.flatnonzero(stream.step == step)
        row = rng.choice(np.flatnonzero(used + len(own) <= shape[-1]))
        token[row, used[row] : used[row] + len(own)] = own
        used[row] += len(own) + rng.integers(0, 2)
    token = token.reshape(shape)
    mask = token >= 0

    def put(x, elsewhere):
        return np.where(mask, x[token], elsewhere)

    # A read that is no action may belong to a step, and its numbers must not be used.
    units = (put(x, rng.integers(-1, 1, shape)) for x in (stream.step, stream.trajectory))
    return put(stream.new, np.nan), make_loss_tokens(put(stream.old, -np.inf), mask, *units), token


KINDS = [("trajectory",), ("centred_step", "token"), ("centred_step", "step")]
"""Ratios of a minibatch, with the unit of the mean."""


@functools.cache
def program(*kind):
    return jax.jit(functools.partial(minibatch_log_ratio, LossConfig(*kind)))


def check(got, stream, token, kind, tolerance):
    got = np.asarray(got)
    np.testing.assert_allclose(got[token >= 0], np.array(stream.expected(*kind))[token[token >= 0]], atol=tolerance)
    assert not got[token < 0].any()


def test_the_ratios_of_a_minibatch_are_those_that_are_tested():
    assert {kind for kind, *_ in KINDS} == set(MINIBATCH_RATIOS)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(drawn=streams())
def test_no_layout_of_a_minibatch_changes_its_ratios(kind, drawn):
    """Number of microbatches, order of rows, padding: each token has the value that a loop over the stream gives."""
    stream, rng = drawn
    for shape in SHAPES:
        new, loss_tokens, token = lay_out(stream, rng, shape)
        with jax.enable_x64(True):
            got = program(*kind)(jnp.asarray(new), on_device(loss_tokens))
        check(got, stream, token, kind, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_a_minibatch_do_not_change_its_ratios(kind):
    rng = np.random.default_rng(0)
    sizes = np.array([3, 1, 4, 2, 2, 4])
    step = np.repeat(np.arange(6), sizes)
    stream = Stream(step, np.array([0, 0, 0, 1, 1, 2])[step], *rng.uniform(-3, 0, (2, len(step))).astype(np.float32))
    new, loss_tokens, token = lay_out(stream, rng, (2, 8, 10))
    got = program(*kind)(*global_batch((new.astype(np.float32), loss_tokens), tiny.mesh(8)))
    check(got, stream, token, kind, 1e-5)


@functools.cache
def steps_of(*sizes):
    """Loss tokens, log π_old 0, of steps of these sizes in one row; and the first token of each step."""
    step = np.repeat(np.arange(len(sizes)), sizes)[None]
    return on_device(make_loss_tokens(0.0, np.ones(step.shape), step)), np.cumsum([0, *sizes[:-1]])


@pytest.mark.parametrize(("mean", "mu"), [("token", 2.0), ("step", 3.0)])
def test_a_centred_step_is_the_mean_and_the_scaled_deviations_from_it(mean, mu):
    """z of steps of one, four and one tokens: 1; 0, 2, 1, 1; 7. Their means are 1, 1 and 7."""
    z = jnp.array([[1.0, 0.0, 2.0, 1.0, 1.0, 7.0]])
    got = program("centred_step", mean)(z, steps_of(1, 4, 1)[0])
    np.testing.assert_allclose(got, [[1.0, *[mu + (4 - 4 * mu) / 2] * 4, 7.0]], rtol=1e-6)


@pytest.mark.parametrize("mean", ["token", "step"])
def test_a_centred_step_of_one_token_is_its_own_and_a_drift_counts_once_at_any_length(mean):
    rng = np.random.default_rng(0)
    loss_tokens, _ = steps_of(*[1] * 20)
    z = rng.normal(size=(1, 20)).astype(np.float32)
    np.testing.assert_allclose(program("centred_step", mean)(z, loss_tokens), z, atol=1e-6)
    loss_tokens, _ = steps_of(1, 4, 64, 2)
    z = rng.normal(size=(1, 71)).astype(np.float32)
    moved = program("centred_step", mean)(z + 0.25, loss_tokens) - program("centred_step", mean)(z, loss_tokens)
    np.testing.assert_allclose(moved, np.full((1, 71), 0.25), atol=1e-5)


def test_noise_moves_a_centred_step_alike_at_any_length():
    loss_tokens, first = steps_of(*[4] * 1000, *[64] * 1000)
    z = 0.1 + np.random.default_rng(0).normal(size=loss_tokens.step.shape).astype(np.float32)
    short, long = np.split(np.asarray(program("centred_step", "token")(z, loss_tokens))[0, first], 2)
    # The std of an estimate of a variance from 1000 normal numbers is 4.5 %.
    assert short.var() == pytest.approx(1, rel=0.15) and long.var() == pytest.approx(1, rel=0.15)

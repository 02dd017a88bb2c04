"""The update: one program for batches of any size, the same on every mesh; its optimizer, its metrics, its caution."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from examples import (
    OBJECTIVE,
    POLICY,
    WIDE,
    check_close,
    check_nonzero,
    example,
    gradient,
    layout,
    objective,
    outputs_of,
    parameters,
)

from agentr1_jax.learner.batch import to_microbatches
from agentr1_jax.learner.optimizer import by_part
from agentr1_jax.learner.update import init_state, make_update
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime.mesh import global_batch

ROWS_OF_STEPS = 4
"""Rows of `example("append")` in mode `per_step`."""
RATES = {"decoder": np.float32(1024), "value": np.float32(512)}
"""So large that the old parameters do not round the gradient away."""


@functools.cache
def updater(shape=(1, 1, 1), objective=OBJECTIVE):
    """(update, fresh state, mesh) in double precision: it subtracts rate times gradient, and keeps the gradient."""
    mesh = tiny.mesh(*shape)
    optimizer, params = by_part(optax.trace(decay=0.0)), jax.tree.map(np.float64, parameters())
    layout = shardings(jax.eval_shape(lambda: init_state(params, optimizer)), mesh)

    def fresh():
        return jax.device_put(init_state(jax.tree.map(jnp.array, params), optimizer), layout)

    return make_update(WIDE, objective, optimizer, layout), fresh, mesh


def one_update(batch, count, *shape, objective=OBJECTIVE):
    """The gradient that an update applied, and its metrics, in double precision."""
    single = parameters()
    with jax.enable_x64(True):
        update, fresh, mesh = updater(*shape, objective=objective)
        state, metrics = update(fresh(), {}, global_batch(batch, mesh), np.int32(count), RATES)
        assert int(state.updates) == 1 and int(state.skipped) == 0
        moved = jax.tree.map(lambda old, new: np.float64(old) - np.asarray(new), single, state.params)
        grads = {part: jax.tree.map(lambda x, rate=RATES[part]: x / rate, tree) for part, tree in moved.items()}
        return grads, jax.device_get(metrics)


def in_rows(case, rows):
    """A batch [2, 8] whose rows lie at the given places of 16; the others are padding."""
    packing = layout(case.trajectories, "per_step")
    assert len(rows) == packing.rows
    content = (packing.packed_tokens, case.loss_tokens(packing))
    empty = to_microbatches(
        jax.tree.map(lambda x: x[:0], packing.packed_tokens),
        jax.tree.map(lambda x: x[:0], content[1]),
        microbatches=2,
        rows=8,
    )

    def scatter(to, x):
        flat = to.reshape(16, *to.shape[2:]).copy()
        flat[np.array(rows)] = x
        return flat.reshape(to.shape)

    return empty.replace(
        packed_tokens=jax.tree.map(scatter, empty.packed_tokens, content[0]),
        loss_tokens=jax.tree.map(scatter, empty.loss_tokens, content[1]),
    )


def test_rows_may_lie_anywhere_in_any_number_of_microbatches_of_one_program():
    case, count = example("append"), ROWS_OF_STEPS
    grads, metrics = one_update(in_rows(case, range(count)), 1)
    check_nonzero(grads)
    order = np.random.default_rng(0).permutation(16)[:count]
    for rows in (range(count)[::-1], range(8, 8 + count), range(0, 2 * count, 2), order):
        other, other_metrics = one_update(in_rows(case, rows), 2)
        check_close(other, grads, 1e-9)
        check_close(other_metrics, metrics, 1e-9)
    assert updater(objective=OBJECTIVE)[0]._cache_size() == 1, "the number of microbatches must be data"


def test_microbatches_beyond_the_count_are_not_read():
    batch = in_rows(example("append"), range(ROWS_OF_STEPS))
    grads, _ = one_update(batch, 1)
    spoilt = jax.tree.map(lambda x: np.concatenate([x[:1], np.full_like(x[1:], 1)]), batch)
    jax.tree.map(np.testing.assert_array_equal, one_update(spoilt, 1)[0], grads)


def test_shards_do_not_change_the_update():
    batch = in_rows(example("append"), range(0, 2 * ROWS_OF_STEPS, 2))
    check_close(one_update(batch, 2, (2, 2, 2)), one_update(batch, 2), 1e-9)


def test_the_update_is_the_gradient_of_the_loss():
    case = example("window")
    (loss, _), grads = gradient(POLICY, OBJECTIVE)(parameters(), case.batch())
    applied, metrics = one_update(case.batch(microbatches=2, rows=8), 2)
    check_close(applied, grads, 1e-5)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    squares = sum(np.sum(np.asarray(g, np.float64) ** 2) for g in jax.tree.leaves(grads))
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(squares), rtol=1e-5)


@pytest.mark.parametrize("size", [1.0, 0.01])
def test_the_gradient_of_the_policy_is_divided_by_the_norm_of_what_the_clip_removed(size):
    """C is the gradient of the loss without bounds over the clipped tokens; below 1 it divides nothing."""
    case = example("mixed")
    case = dataclasses.replace(case, advantages=np.float32(size) * case.advantages)
    batch, normalized = case.batch(microbatches=2, rows=8), objective(clip="ppo", clip_bias_norm=True)
    (logprob, _, _), old = (
        outputs_of(case.trajectories),
        np.concatenate([s.logprobs for t in case.trajectories for s in t.steps]),
    )
    ratio = np.exp(logprob - old)
    clipped = np.where(case.advantages > 0, ratio > 1.28, ratio < 0.8)
    alone = dataclasses.replace(case, weights=np.where(clipped, case.weights, 0))
    unbounded = objective(clip="ppo", clip_low=1 - 1e-6, clip_high=1e9, entropy_coef=0.0)
    removed, _ = one_update(alone.batch(critic=False, microbatches=2, rows=8), 2, objective=unbounded)
    norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(removed["decoder"])))
    assert (norm > 2) == (size == 1.0) and (norm < 0.5) == (size < 1)
    plain, _ = one_update(batch, 2, objective=objective(clip="ppo"))
    found, metrics = one_update(batch, 2, objective=normalized)
    np.testing.assert_allclose(metrics["clip_bias_norm"], norm, rtol=1e-6)
    check_close(found["decoder"], jax.tree.map(lambda x: x / max(norm, 1), plain["decoder"]), 1e-9)
    check_close(found["value"], plain["value"], 1e-9)


def test_metrics_say_what_they_are_named_after():
    case = example("mixed")
    metrics = one_update(case.batch(microbatches=2, rows=8), 2)[1]
    logprob, entropy, value = outputs_of(case.trajectories)
    old = np.concatenate([s.logprobs for t in case.trajectories for s in t.steps])
    on, gap = case.weights > 0, logprob - old
    ratio, a = np.exp(gap), case.advantages
    clipped = np.where(a > 0, ratio > 1.28, ratio < 0.8)
    near = np.clip(value, case.old_values - 0.5, case.old_values + 0.5)
    error = 0.5 * np.maximum((value - case.targets) ** 2, (near - case.targets) ** 2)
    loss = np.maximum(-a * ratio, -a * np.clip(ratio, 0.8, 1.28))
    loss = np.where(a < 0, np.minimum(loss, -3 * a), loss)
    expected = {
        "tokens": on.sum(),
        "logprob": logprob[on].mean(),
        "entropy": entropy[on].mean(),
        "ratio": ratio[on].mean(),
        "clip_fraction": clipped[on].mean(),
        "approx_kl": (ratio - 1 - gap)[on].mean(),
        "logprob_gap": np.abs(gap)[on].mean(),
        "max_logprob_gap": np.abs(gap)[on].max(),
        "max_ratio": ratio[on].max(),
        "policy_loss": (case.weights * loss).sum(),
        "entropy_loss": (case.weights * entropy).sum(),
        "value_loss": (case.value_weights * error).sum(),
    }
    total = expected["policy_loss"] - 0.01 * expected["entropy_loss"] + 0.5 * expected["value_loss"]
    for name, x in (expected | {"loss": total}).items():
        np.testing.assert_allclose(metrics[name], x, rtol=1e-4, err_msg=name)
    assert set(metrics) == {*expected, "loss", "grad_norm", "skipped", "skipped_in_a_row"}


def test_an_update_that_is_not_finite_is_skipped_and_counted():
    good = example("append")
    bad = dataclasses.replace(good, advantages=np.where(np.arange(len(good.weights)) == 2, np.nan, good.advantages))
    rates = {"decoder": np.float32(1e-2), "value": np.float32(1e-1)}
    with jax.enable_x64(True):
        update, fresh, mesh = updater()
        good, bad = (global_batch(case.batch(microbatches=2, rows=8), mesh) for case in (good, bad))
        start = fresh()
        before, _ = update(start, {}, good, np.int32(2), rates)
        assert all(x.is_deleted() for x in jax.tree.leaves(start.params)), "the old state is donated"
        kept = jax.device_get((before.params, before.opt_state))
        after, metrics = update(before, {}, bad, np.int32(2), rates)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get((after.params, after.opt_state)), kept)
        assert (int(after.updates), int(after.skipped), int(after.skipped_in_a_row)) == (1, 1, 1)
        assert not np.isfinite(metrics["loss"]) and int(metrics["skipped_in_a_row"]) == 1
        twice, _ = update(after, {}, bad, np.int32(2), rates)
        assert (int(twice.skipped), int(twice.skipped_in_a_row)) == (2, 2)
        again, _ = update(twice, {}, good, np.int32(2), rates)
        assert (int(again.updates), int(again.skipped), int(again.skipped_in_a_row)) == (2, 2, 0)
        assert np.isfinite(jax.tree.leaves(jax.device_get(again.params))[0]).all()


@functools.cache
def spoilt_updater():
    """Like `updater`, but the optimizer makes one number of the decoder's update infinite."""

    def spoil(grads, state, params=None):
        scale = grads.get("decoder", {}).get("final_norm", {}).get("scale")
        return jax.tree.map(lambda x: x.at[3].set(jnp.inf) if x is scale else x, grads), state + 1

    mesh, rule = tiny.mesh(), optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), spoil)
    optimizer, params = by_part(rule), parameters()
    layout = shardings(jax.eval_shape(lambda: init_state(params, optimizer)), mesh)
    state = jax.device_put(init_state(jax.tree.map(jnp.array, params), optimizer), layout)
    return make_update(POLICY, OBJECTIVE, optimizer, layout), state, mesh


@pytest.mark.parametrize("learns", [True, False])
def test_an_update_to_numbers_that_are_not_finite_is_skipped_though_loss_and_gradient_are(learns):
    update, start, mesh = spoilt_updater()
    start = jax.tree.map(jnp.copy, start)
    kept = jax.device_get((start.params, start.opt_state))
    rates = {"decoder": np.float32(learns), "value": np.float32(1)}
    batch = global_batch(example("append").batch(microbatches=2, rows=8), mesh)
    after, metrics = update(start, {}, batch, np.int32(2), rates)
    assert np.isfinite([metrics["loss"], metrics["grad_norm"]]).all()
    assert (int(after.updates), int(after.skipped), int(after.skipped_in_a_row)) == ((0, 1, 1) if learns else (1, 0, 0))
    params, opt_state = jax.device_get((after.params, after.opt_state))
    jax.tree.map(np.testing.assert_array_equal, params["decoder"], kept[0]["decoder"])
    assert opt_state == {"decoder": 0, "value": 0 if learns else 1}
    assert (params["value"]["kernel"] == kept[0]["value"]["kernel"]).all() == learns  # A part that rests is not asked.

"""Training on observation tokens, as an ablation may: packing changes nothing, and without weight they do nothing."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
from builders import CONTEXTS, LONGEST, fixed_batch
from examples import OBJECTIVE, POLICY, ROWS, WIDE, check_close, check_nonzero, objective, parameters, token_outputs
from test_observation_tokens import packed, stream

from agentr1_jax.learner.batch import empty_loss_tokens, to_microbatches
from agentr1_jax.learner.config import PACKING_MODES, RATIOS
from agentr1_jax.learner.losses import MINIBATCH_RATIOS, minibatch_log_ratio
from agentr1_jax.learner.packing import gather, scatter_fields
from agentr1_jax.learner.update import TokenOutputs, forward, loss_from_outputs, make_log_ratio

GRID = (
    *(objective(ratio=ratio) for ratio in RATIOS),
    objective(ratio="step", clip="cispo", kl="k3", kl_coef=0.3),
    objective(clip="sapo"),
    objective(clip="none", entropy_coef=0.0),
)


def actions(trajectories):
    return np.array([token.is_action for token in stream(trajectories)])


def per_token(trajectories, seed=0):
    """What credit would find, and log π_old, for every loss token; of one trajectory nothing is trained."""
    rng, tokens = np.random.default_rng(seed), stream(trajectories)
    count = len(tokens)
    trained = np.array([token.trajectory != 1 for token in tokens])
    return {
        "advantage": rng.normal(size=count),
        "weight": np.where(trained, rng.uniform(0.5, 1.5, count) / count, 0),
        "old_logprob": rng.uniform(-4.5, -2.5, count),
        "ref_logprob": rng.uniform(-4.5, -2.5, count),
        "correction_weight": rng.uniform(0.2, 2.0, count),
        "old_value": rng.normal(size=count),
        "value_target": rng.normal(size=count),
        "value_weight": np.where(trained, rng.uniform(0.5, 1.5, count) / count, 0),
    }


def batch(trajectories, fields, mode="trajectory", observations=True):
    packing = packed(trajectories, mode, observations)
    return to_microbatches(packing.packed_tokens, scatter_fields(packing, fields), microbatches=1, rows=ROWS)


@functools.cache
def compiled():
    """(params, batch of one microbatch, number in `GRID`) -> (loss, gradient), in double precision."""

    def branch(case):
        def loss(outputs, loss_tokens):
            if case.loss.ratio in MINIBATCH_RATIOS:
                trained = loss_tokens.replace(is_action=loss_tokens.weight > 0)
                loss_tokens = loss_tokens.replace(
                    log_ratio=minibatch_log_ratio(case.loss.ratio, jax.lax.stop_gradient(outputs.logprob), trained)
                )
            return loss_from_outputs(case, outputs, loss_tokens)[0]

        return loss

    def total(params, batch, number):
        outputs = forward(WIDE, OBJECTIVE, None, params, batch)
        return jax.lax.switch(number, [branch(case) for case in GRID], outputs, batch.loss_tokens)

    one = jax.value_and_grad(total)
    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(
        lambda params, x, number: one(params, jax.tree.map(lambda x: x[0], x), number), compiler_options=quick
    )


def loss_and_gradient(one, number):
    single = parameters()
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), single)
        return jax.device_get(compiled()(params, one, number))


@pytest.mark.parametrize("context", CONTEXTS)
def test_packing_changes_no_loss_and_no_gradient_of_observation_tokens(context):
    trajectories = fixed_batch(context)
    fields = per_token(trajectories)
    sampled_only = fields | {"weight": np.where(actions(trajectories), fields["weight"], 0)}
    for number in range(len(GRID)):
        steps = loss_and_gradient(batch(trajectories, fields, "per_step"), number)
        assert steps[0].dtype == np.float64
        check_nonzero(steps[1])
        for mode in ("per_step_padded", "trajectory", "prefix_tree"):
            check_close(loss_and_gradient(batch(trajectories, fields, mode), number), steps, 1e-9)
        assert abs(loss_and_gradient(batch(trajectories, sampled_only), number)[0] - steps[0]) > 1e-3


@pytest.mark.parametrize("mode", ["per_step", "trajectory", "prefix_tree"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_observation_tokens_without_weight_change_nothing(context, mode):
    """Whatever stands in their other fields."""
    trajectories = fixed_batch(context)
    on, fields = actions(trajectories), per_token(trajectories)
    without = fields | {name: np.where(on, fields[name], 0) for name in ("weight", "value_weight")}
    without |= {name: np.where(on, fields[name], -np.inf) for name in ("old_logprob", "ref_logprob")}
    sampled = {name: x[on] for name, x in fields.items()}
    for number in range(len(GRID)):
        expected = loss_and_gradient(batch(trajectories, sampled, mode, False), number)
        check_close(loss_and_gradient(batch(trajectories, without, mode), number), expected, 1e-9)


@functools.cache
def expected_logprobs(context):
    """Of every loss token, by a forward pass over each step alone."""
    trajectories = fixed_batch(context)
    sequences = [np.concatenate([s.prompt_ids, s.response_ids]) for t in trajectories for s in t.steps]
    logits = tiny.full_logits(POLICY, parameters()["decoder"], sequences, LONGEST, rows=ROWS)
    own = [tiny.log_softmax(row.astype(np.float64) / OBJECTIVE.temperature) for row in logits]
    return np.array([own[token.step][len(token.before) - 1, token.id] for token in stream(trajectories)])


@pytest.mark.parametrize("mode", PACKING_MODES)
@pytest.mark.parametrize("context", ["append", "rewrite", "mixed"])
def test_token_outputs_of_observation_tokens_are_those_of_each_step_alone(context, mode):
    """They are log π_old of observation tokens."""
    trajectories = fixed_batch(context)
    packing = packed(trajectories, mode)
    whole = to_microbatches(packing.packed_tokens, packing.loss_tokens, microbatches=1, rows=ROWS)
    out = token_outputs()(parameters(), {}, None, whole, np.int32(1))
    got = gather(packing, np.asarray(out.logprob)[0, : packing.rows])
    np.testing.assert_allclose(got, expected_logprobs(context), atol=1e-5)


@pytest.mark.parametrize("kind", MINIBATCH_RATIOS)
def test_a_minibatch_ratio_is_of_all_that_is_trained(kind):
    """The compiled pass against a loop over the trained tokens, observation tokens among them."""
    trajectories, new = fixed_batch("window"), expected_logprobs("window")
    fields, tokens = per_token(trajectories), stream(trajectories)
    packing = packed(trajectories)
    whole = to_microbatches(packing.packed_tokens, scatter_fields(packing, fields), microbatches=1, rows=ROWS)
    program = make_log_ratio(POLICY, objective(ratio=kind))
    out = program(parameters(), {}, whole, np.int32(1))
    got = gather(packing, np.asarray(out)[0, : packing.rows])
    on = np.flatnonzero(fields["weight"] > 0)
    units = ([getattr(tokens[k], name) for k in on] for name in ("step", "trajectory"))
    expected = np.zeros(len(tokens))
    expected[on] = reference.log_ratios(kind, new[on], fields["old_logprob"][on], *units)
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("ratio", "observed", "logs"),
    [
        ("token", True, [1.0, 3.0, 0.5]),
        ("step", True, [2.0, 2.0, 0.5]),
        ("token", False, [3.0, 0.5]),
        ("step", False, [3.0, 0.5]),
    ],
)
def test_a_trained_observation_token_takes_part_in_the_ratio_of_its_step(ratio, observed, logs):
    """log π − log π_old is 1 at the observation, 3 at the action of its step, and 0.5 at the action of another."""
    loss_tokens = dataclasses.replace(
        empty_loss_tokens(1, 4),
        step=np.array([[0, 0, 1, -1]]),
        is_action=np.array([[False, True, True, False]]),
        old_logprob=np.float32([[-2, -4, -1.5, 0]]),
        weight=np.float32([[observed, 1, 1, 0]]),
        advantage=np.ones((1, 4), np.float32),
    )
    logprob = jnp.full((1, 4), -1.0)
    case = objective(ratio=ratio, clip="cispo")
    loss_tokens = jax.tree.map(jnp.asarray, loss_tokens)
    _, metrics = loss_from_outputs(case, TokenOutputs(logprob, jnp.zeros((1, 4))), loss_tokens)
    assert metrics["tokens"] == len(logs)
    np.testing.assert_allclose(metrics["sum/ratio"], np.exp(logs).sum(), rtol=1e-6)
    expected = np.clip(np.exp(logs), 1 - case.loss.clip_low, 1 + case.loss.clip_high).sum()
    np.testing.assert_allclose(metrics["policy_loss"], expected, rtol=1e-6)


def test_training_on_all_tokens_is_cross_entropy_of_all_tokens():
    """Agent-R1 without its loss mask, in the simplest case: advantage 1 and no ratio."""
    trajectories, expected = fixed_batch("append"), expected_logprobs("append")
    ones = np.ones(len(expected))
    fields = dict.fromkeys(per_token(trajectories), ones) | {"weight": ones / len(ones), "value_weight": 0 * ones}
    loss, _ = loss_and_gradient(batch(trajectories, fields), len(GRID) - 1)
    np.testing.assert_allclose(loss, -expected.mean(), rtol=1e-5)

"""Packing changes neither loss nor gradient, and only what has weight is trained: sampled tokens, or all of them."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import tiny
from builders import CONTEXTS, LONGEST, VOCAB, batches, fixed_batch, with_logprobs
from examples import (
    LOSS_TOKENS,
    OBJECTIVE,
    POLICY,
    ROWS,
    WIDE,
    Example,
    check_close,
    check_nonzero,
    example,
    gradient,
    layout,
    objective,
    parameters,
    token_outputs,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_packing import stream

from agentr1_jax.learner.batch import empty_loss_tokens, to_microbatches
from agentr1_jax.learner.config import AGGREGATES, PACKING_MODES, RATIOS, PackingConfig
from agentr1_jax.learner.losses import MINIBATCH_RATIOS, minibatch_log_ratio
from agentr1_jax.learner.packing import gather, pack, scatter_fields
from agentr1_jax.learner.update import TokenOutputs, forward, loss_and_metrics, loss_from_outputs, make_log_ratio
from agentr1_jax.policy.attention import PackedRows
from agentr1_jax.policy.decoder import Decoder
from agentr1_jax.policy.params import values

SHARING = ("per_step_padded", "trajectory", "prefix_tree")
"""Modes that are compared with `per_step`."""
GRID = (
    *(objective(ratio=ratio, clip="dual") for ratio in RATIOS),
    *(objective(ratio="step", clip=clip) for clip in ("ppo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl")),
    objective(ratio="step", kl="k3", kl_coef=0.3),
    objective(clip="none", entropy_coef=0.0),
)
"""Each ratio and each clip; the aggregate is in the weights."""


@functools.cache
def grid_gradient(policy):
    """Compiled (params, batch of one microbatch, number in `GRID`) -> (loss, gradient): one trunk for all losses."""

    def branch(case):
        def loss(outputs, loss_tokens):
            if case.loss.ratio in MINIBATCH_RATIOS:
                trained = loss_tokens.replace(is_action=loss_tokens.weight > 0)
                here = minibatch_log_ratio(case.loss, jax.lax.stop_gradient(outputs.logprob), trained)
                loss_tokens = loss_tokens.replace(log_ratio=here)
            return loss_from_outputs(case, outputs, loss_tokens)[0]

        return loss

    def total(params, batch, number):
        outputs = forward(policy, OBJECTIVE, None, params, batch)
        return jax.lax.switch(number, [branch(case) for case in GRID], outputs, batch.loss_tokens)

    one = jax.value_and_grad(total)
    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(
        lambda params, batch, number: one(params, jax.tree.map(lambda x: x[0], batch), number), compiler_options=quick
    )


def loss_and_gradient(batch, number, critic=True):
    """In double precision."""
    single = parameters(critic)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), single)
        return jax.device_get(grid_gradient(WIDE)(params, batch, number))


@pytest.mark.parametrize(("context", "critic"), [*((context, True) for context in CONTEXTS), ("mixed", False)])
def test_packing_changes_no_loss_and_no_gradient(context, critic):
    """Every ratio and clip in double precision, with KL, correction, bootstrap, and one of the aggregates each."""
    for number in range(len(GRID)):
        case = example(context, AGGREGATES[number % len(AGGREGATES)])
        steps = loss_and_gradient(case.batch("per_step", critic, others=True), number, critic)
        assert steps[0].dtype == np.float64
        check_nonzero(steps[1])
        for mode in SHARING:
            check_close(loss_and_gradient(case.batch(mode, critic, others=True), number, critic), steps, 1e-9)


@pytest.mark.parametrize("context", CONTEXTS)
def test_packing_changes_nothing_in_single_precision(context):
    one = gradient(POLICY, OBJECTIVE)
    (loss, _), grads = one(parameters(), example(context).batch("per_step"))
    for mode in ("trajectory", "prefix_tree"):
        (other_loss, _), other = one(parameters(), example(context).batch(mode))
        np.testing.assert_allclose(other_loss, loss, rtol=1e-5, atol=1e-6)
        check_close(other, grads, 1e-5)


@settings(max_examples=25, deadline=None)
@given(batches(), st.integers(0, len(GRID) - 1))
def test_packing_changes_nothing_for_any_forest(trajectories, number):
    assume(layout(trajectories, "per_step_padded").rows <= ROWS)
    count = sum(len(s.response_ids) for t in trajectories for s in t.steps)
    numbers = np.random.default_rng(count).normal(size=(7, count)).astype(np.float32)
    positive = (1, 4, 6)
    case = Example(trajectories, *(np.abs(x) if i in positive else x for i, x in enumerate(numbers)))
    steps = loss_and_gradient(case.batch("per_step", others=True), number)
    for mode in SHARING:
        check_close(loss_and_gradient(case.batch(mode, others=True), number), steps, 1e-9)


def test_values_are_a_linear_head():
    kernel, hidden = np.arange(3.0), np.array([[1.0, 2.0, 3.0], [0.0, 0.0, -1.0]])
    params = {"value": {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(0.5)}}
    np.testing.assert_allclose(values(params, jnp.asarray(hidden)), [8.5, -1.5])


def probe_gradient(batch):
    """d loss / d (final hidden state of each token) [rows, length, width]: what reaches the logits of each position."""
    one = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)

    def loss(probe):
        def add(call, args, kwargs, context):
            out = call(*args, **kwargs)
            return (out[0] + probe, out[1]) if context.module.name is None else out

        with nn.intercept_methods(add):
            return loss_and_metrics(POLICY, OBJECTIVE, None, parameters(), {}, one)[0]

    return np.asarray(jax.jit(jax.grad(loss))(jnp.zeros((*one.packed_tokens.tokens.shape, POLICY.width))))


def test_fault_11_only_positions_that_predict_trained_tokens_have_a_gradient():
    """Prompt, tool text, padding and untrained trajectories reach the logits with a gradient of exactly zero."""
    case = example("mixed")
    packing = layout(case.trajectories, "trajectory")
    loss_tokens = case.loss_tokens(packing)
    expected = np.zeros((ROWS, LONGEST), bool)
    row, column = np.nonzero((loss_tokens.weight > 0) | (loss_tokens.value_weight > 0))
    expected[row, loss_tokens.logit_index[row, column]] = True
    np.testing.assert_array_equal(np.abs(probe_gradient(case.batch())).max(axis=-1) > 0, expected)


def test_fault_8_what_stands_in_rows_of_no_weight_does_not_matter():
    batch, rng = example("append").batch(), np.random.default_rng(0)
    padding = ~(batch.loss_tokens.weight[0].any(axis=1) | batch.loss_tokens.value_weight[0].any(axis=1))
    assert padding.any()
    noise = {
        "packed_tokens": {"tokens": VOCAB, "position": LONGEST},
        "loss_tokens": {"logit_index": LONGEST, "target": VOCAB, "step": 9, "is_action": 2},
    }
    spoilt = jax.tree.map(np.copy, batch)
    for part, fields in noise.items():
        for name, bound in fields.items():
            x = getattr(getattr(spoilt, part), name)
            x[0, padding] = rng.integers(0, bound, x[0, padding].shape)
    for name in ("old_logprob", "advantage", "old_value", "value_target"):
        x = getattr(spoilt.loss_tokens, name)
        x[0, padding] = rng.normal(size=x[0, padding].shape)
    clean, noisy = (gradient(POLICY, OBJECTIVE)(parameters(), b) for b in (batch, spoilt))
    jax.tree.map(np.testing.assert_array_equal, noisy, clean)


def test_clip_none_with_advantage_one_is_cross_entropy():
    """Supervised training is the same update: demonstrations store no log-probs, and the loss does not ask for them."""
    case = example("append")
    count = len(case.advantages)
    ones = np.ones(count, np.float32)
    case = dataclasses.replace(
        case,
        trajectories=with_logprobs(case.trajectories, np.zeros(count)),
        advantages=ones,
        weights=ones / np.float32(count),
    )
    imitation = objective(clip="none", entropy_coef=0.0, temperature=1.0)
    params = parameters(critic=False)
    (loss, _), grads = gradient(POLICY, imitation)(params, case.batch(critic=False))
    steps = [s for t in case.trajectories for s in t.steps]
    tokens, mask = np.zeros((2, ROWS, LONGEST), np.int32)
    for row, s in enumerate(steps):
        size = len(s.prompt_ids) + len(s.response_ids)
        tokens[row, :size] = np.concatenate([s.prompt_ids, s.response_ids])
        mask[row, len(s.prompt_ids) : size] = 1

    position = jnp.broadcast_to(jnp.arange(LONGEST), tokens.shape)
    causal = PackedRows(subtree_end=jnp.full(tokens.shape, LONGEST))

    def cross_entropy(decoder):
        hidden, _ = Decoder(POLICY).apply({"params": decoder}, jnp.asarray(tokens), position, causal)
        logits = (hidden @ decoder["embed"].T)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.sum(losses * mask[:, 1:]) / count

    expected, expected_grads = jax.jit(jax.value_and_grad(cross_entropy))(params["decoder"])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    check_close(grads["decoder"], expected_grads, 1e-5)


def all_tokens(trajectories, mode="trajectory", observations=True):
    """A packing with as many loss tokens in a row as an `Example` has, so that both share programs."""
    return pack(
        trajectories, PackingConfig(mode, LONGEST, LOSS_TOKENS, ROWS), final_values=True, observations=observations
    )


def per_token(trajectories):
    """What credit would find, and log π_old, for every loss token; of one trajectory nothing is trained."""
    rng, tokens = np.random.default_rng(0), stream(trajectories)
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


def batch_of(packing, fields):
    fields = {name: np.asarray(x, np.float32) for name, x in fields.items()}
    return to_microbatches(packing.packed_tokens, scatter_fields(packing, fields), microbatches=1, rows=ROWS)


@pytest.mark.parametrize("context", CONTEXTS)
def test_packing_changes_no_loss_and_no_gradient_of_observation_tokens(context):
    """As an ablation trains them; without weight they change nothing, whatever stands in their other fields."""
    trajectories = fixed_batch(context)
    on, fields = np.array([token.is_action for token in stream(trajectories)]), per_token(trajectories)
    without = fields | {name: np.where(on, fields[name], 0) for name in ("weight", "value_weight")}
    without |= {name: np.where(on, fields[name], -np.inf) for name in ("old_logprob", "ref_logprob")}
    sampled = {name: x[on] for name, x in fields.items()}
    for number in range(len(GRID)):
        steps = loss_and_gradient(batch_of(all_tokens(trajectories, "per_step"), fields), number)
        check_nonzero(steps[1])
        for mode in SHARING:
            check_close(loss_and_gradient(batch_of(all_tokens(trajectories, mode), fields), number), steps, 1e-9)
        expected = loss_and_gradient(batch_of(all_tokens(trajectories, observations=False), sampled), number)
        assert abs(expected[0] - steps[0]) > 1e-3
        check_close(loss_and_gradient(batch_of(all_tokens(trajectories), without), number), expected, 1e-9)


@functools.cache
def expected_outputs(context):
    """Log-prob and entropy of every loss token, by a forward pass over each step's own prompt and response."""
    trajectories = fixed_batch(context)
    sequences = [np.concatenate([s.prompt_ids, s.response_ids]) for t in trajectories for s in t.steps]
    logits = tiny.full_logits(POLICY, parameters()["decoder"], sequences, LONGEST, rows=ROWS)
    own = [tiny.log_softmax(row.astype(np.float64) / OBJECTIVE.temperature) for row in logits]
    rows = [(own[token.step][len(token.before) - 1], token.id) for token in stream(trajectories)]
    return np.array([row[i] for row, i in rows]), np.array([-(np.exp(row) * row).sum() for row, _ in rows])


@pytest.mark.parametrize("mode", PACKING_MODES)
@pytest.mark.parametrize("context", ["append", "mixed"])
def test_token_outputs_are_those_of_each_step_alone(mode, context):
    packing = all_tokens(fixed_batch(context), mode)
    out = token_outputs()(parameters(), {}, None, batch_of(packing, {}), np.int32(1))
    for x, expected in zip((out.logprob, out.entropy), expected_outputs(context), strict=True):
        np.testing.assert_allclose(gather(packing, np.asarray(x)[0, : packing.rows]), expected, atol=1e-5)


@pytest.mark.parametrize("kind", MINIBATCH_RATIOS)
def test_a_minibatch_ratio_is_of_all_that_is_trained(kind):
    """The compiled pass against a loop over the trained tokens, observation tokens among them."""
    trajectories, new = fixed_batch("mixed"), expected_outputs("mixed")[0]
    fields, tokens, packing = per_token(trajectories), stream(trajectories), all_tokens(trajectories)
    out = make_log_ratio(POLICY, objective(ratio=kind))(parameters(), {}, batch_of(packing, fields), np.int32(1))
    got = gather(packing, np.asarray(out)[0, : packing.rows])
    on = np.flatnonzero(fields["weight"] > 0)
    units = ([getattr(tokens[k], name) for k in on] for name in ("step", "trajectory"))
    expected = np.zeros(len(tokens))
    expected[on] = reference.log_ratios(kind, new[on], fields["old_logprob"][on], *units)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_a_trained_observation_token_takes_part_in_the_ratio_of_its_step():
    """log π − log π_old is 1 at the observation, 3 at the action of its step, and 0.5 at the action of another."""
    for ratio, observed, logs in (("token", 1, [1, 3, 0.5]), ("step", 1, [2, 2, 0.5]), ("step", 0, [3, 0.5])):
        loss_tokens = dataclasses.replace(
            empty_loss_tokens(1, 4),
            step=np.array([[0, 0, 1, -1]]),
            is_action=np.array([[False, True, True, False]]),
            old_logprob=np.float32([[-2, -4, -1.5, 0]]),
            weight=np.float32([[observed, 1, 1, 0]]),
            advantage=np.ones((1, 4), np.float32),
        )
        case = objective(ratio=ratio, clip="cispo")
        outputs = TokenOutputs(jnp.full((1, 4), -1.0), jnp.zeros((1, 4)))
        _, metrics = loss_from_outputs(case, outputs, jax.tree.map(jnp.asarray, loss_tokens))
        assert metrics["tokens"] == len(logs)
        np.testing.assert_allclose(metrics["sum/ratio"], np.exp(logs).sum(), rtol=1e-6)
        clipped = np.clip(np.exp(logs), 1 - case.loss.clip_low, 1 + case.loss.clip_high)
        np.testing.assert_allclose(metrics["policy_loss"], clipped.sum(), rtol=1e-6)


def test_training_on_all_tokens_is_cross_entropy_of_all_tokens():
    """Agent-R1 without its loss mask, in the simplest case: advantage 1 and no ratio."""
    trajectories, expected = fixed_batch("append"), expected_outputs("append")[0]
    ones = np.ones(len(expected))
    fields = dict.fromkeys(per_token(trajectories), ones) | {"weight": ones / len(ones), "value_weight": 0 * ones}
    loss, _ = loss_and_gradient(batch_of(all_tokens(trajectories), fields), len(GRID) - 1)
    np.testing.assert_allclose(loss, -expected.mean(), rtol=1e-5)

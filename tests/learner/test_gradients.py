"""Packing changes neither loss nor gradient, and only sampled tokens are trained."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from builders import LONGEST, VOCAB, batches, fixed_batch, with_logprobs
from examples import (
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
    outputs_of,
    parameters,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentr1_jax.learner.config import AGGREGATES, CLIPS, PACKING_MODES, RATIOS
from agentr1_jax.learner.kl import KL_ESTIMATES
from agentr1_jax.learner.losses import MINIBATCH_RATIOS, minibatch_log_ratio
from agentr1_jax.learner.update import forward, loss_and_metrics, loss_from_outputs
from agentr1_jax.policy.attention import PackedRows
from agentr1_jax.policy.decoder import Decoder
from agentr1_jax.policy.params import init_params, values

CONTEXTS_OF_GRID = ("append", "window", "rewrite", "branch", "mixed")
SHARING = ("per_step_padded", "trajectory", "prefix_tree")
"""Modes that are compared with `per_step`."""
GRID = (
    *(objective(ratio=ratio, clip=clip) for ratio, clip in itertools.product(RATIOS, CLIPS)),
    *(objective(ratio="step", kl=kl, kl_coef=0.3) for kl in KL_ESTIMATES),
)
"""Every loss; the aggregate is in the weights."""


@functools.cache
def grid_gradient(policy):
    """Compiled (params, batch of one microbatch, number in `GRID`) -> (loss, gradient): one trunk for all losses."""

    def branch(case):
        def loss(outputs, loss_tokens):
            if case.loss.ratio in MINIBATCH_RATIOS:
                here = minibatch_log_ratio(case.loss.ratio, jax.lax.stop_gradient(outputs.logprob), loss_tokens)
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


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("context", CONTEXTS_OF_GRID)
def test_packing_changes_no_loss_and_no_gradient(context, critic):
    """Every ratio x clip in double precision, with KL, correction, bootstrap, and one of the aggregates each."""
    cases = [example(context, aggregate) for aggregate in AGGREGATES]
    single = parameters(critic)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), single)
        for number in range(len(GRID)):
            case = cases[number % len(cases)]
            steps = grid_gradient(WIDE)(params, case.batch("per_step", critic, others=True), number)
            assert steps[0].dtype == np.float64
            check_nonzero(steps[1])
            for mode in SHARING:
                check_close(grid_gradient(WIDE)(params, case.batch(mode, critic, others=True), number), steps, 1e-9)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_packing_changes_nothing_for_any_aggregate(aggregate):
    """Every combination of ratio, clip and aggregate, on contexts of all kinds."""
    case, single = example("mixed", aggregate), parameters()
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), single)
        for number in range(len(GRID)):
            steps, chains, tree = (
                grid_gradient(WIDE)(params, case.batch(mode, others=True), number)
                for mode in ("per_step", "trajectory", "prefix_tree")
            )
            check_close(chains, steps, 1e-9)
            check_close(tree, steps, 1e-9)


@pytest.mark.parametrize("context", CONTEXTS_OF_GRID)
def test_packing_changes_nothing_in_single_precision(context):
    case = example(context, "step")
    for number in range(len(GRID)):
        steps, chains, tree = (
            grid_gradient(POLICY)(parameters(), case.batch(mode, others=True), number)
            for mode in ("per_step", "trajectory", "prefix_tree")
        )
        for other in (chains, tree):
            np.testing.assert_allclose(other[0], steps[0], rtol=1e-5, atol=1e-6)
            check_close(other[1], steps[1], 1e-5)


@settings(max_examples=25, deadline=None)
@given(batches(), st.integers(0, len(GRID) - 1))
def test_packing_changes_nothing_for_any_forest(trajectories, number):
    assume(layout(trajectories, "per_step_padded").rows <= ROWS)
    count = sum(len(s.response_ids) for t in trajectories for s in t.steps)
    numbers = np.random.default_rng(count).normal(size=(7, count)).astype(np.float32)
    positive = (1, 4, 6)
    case = Example(trajectories, *(np.abs(x) if i in positive else x for i, x in enumerate(numbers)))
    single = parameters()
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), single)
        steps = grid_gradient(WIDE)(params, case.batch("per_step", others=True), number)
        for mode in SHARING:
            check_close(grid_gradient(WIDE)(params, case.batch(mode, others=True), number), steps, 1e-9)


@pytest.mark.parametrize("mode", PACKING_MODES)
@pytest.mark.parametrize("context", ["append", "mixed"])
def test_token_outputs_are_those_of_each_step_alone(mode, context):
    """Independent of packing: one forward pass for each step's own prompt and response."""
    trajectories = fixed_batch(context)
    steps = [s for t in trajectories for s in t.steps]
    sequences = [np.concatenate([s.prompt_ids, s.response_ids]) for s in steps]
    logits = tiny.full_logits(POLICY, parameters()["decoder"], sequences, LONGEST, rows=ROWS)
    logprob, entropy = [], []
    for s, row in zip(steps, logits, strict=True):
        own = tiny.log_softmax(row[len(s.prompt_ids) - 1 : -1].astype(np.float64) / OBJECTIVE.temperature)
        logprob += own[np.arange(len(s.response_ids)), s.response_ids].tolist()
        entropy += (-(np.exp(own) * own).sum(-1)).tolist()
    got = outputs_of(trajectories, mode)
    np.testing.assert_allclose(got[0], logprob, atol=1e-5)
    np.testing.assert_allclose(got[1], entropy, atol=1e-5)


def test_values_are_a_linear_head():
    kernel, hidden = np.arange(3.0), np.array([[1.0, 2.0, 3.0], [0.0, 0.0, -1.0]])
    params = {"value": {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(0.5)}}
    np.testing.assert_allclose(values(params, jnp.asarray(hidden)), [8.5, -1.5])
    assert not np.any(init_params(POLICY, jax.random.key(0), critic="shared_trunk")["value"]["kernel"])


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

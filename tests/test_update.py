"""The update: packing changes neither loss nor gradient, only sampled tokens are trained, one program serves all."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from builders import LONGEST, VOCAB, batches, fixed_batch, with_logprobs
from hypothesis import assume, given, settings

from agentr1_jax.learner.fill import aggregate_weights, fill_critic, fill_policy, gather_tokens
from agentr1_jax.learner.losses import LossConfig
from agentr1_jax.learner.packing import pack, to_microbatches
from agentr1_jax.learner.update import init_state, loss_and_metrics, make_optimizer, make_score, make_update
from agentr1_jax.policy.attention import PackedRows
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Decoder, init_params, values
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime.mesh import global_batch

POLICY = DecoderConfig(vocab_size=VOCAB, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, hidden=24)
CONFIG = LossConfig(
    ratio="token",
    clip="dual",
    clip_low=0.2,
    clip_high=0.28,
    dual_c=3.0,
    value_coef=0.5,
    value_clip=0.5,
    entropy_coef=0.01,
    temperature=0.8,
    chunk=48,
)
STEP_RATIO = dataclasses.replace(CONFIG, ratio="step", clip="asymmetric")
WIDE = dataclasses.replace(POLICY, dtype="float64", param_dtype="float64")
ROWS, READS, MICROBATCHES = 16, 20, 2
ROWS_OF_STEPS = 6
"""Rows of `example("append")` in mode `steps`."""
RATES = {"decoder": np.float32(1024), "value": np.float32(512)}
"""So large that the old parameters do not round the gradient away."""


@functools.cache
def parameters(critic=True):
    """Random parameters with a value head that is not 0."""
    params = {"decoder": tiny.decoder_params(POLICY)}
    if critic:
        head = init_params(POLICY, jax.random.key(1), critic=True)["value"]
        params["value"] = {
            "kernel": jax.random.normal(jax.random.key(2), head["kernel"].shape) / 4,
            "bias": jnp.ones(()),
        }
    return params


@functools.cache
def score():
    return make_score(POLICY, CONFIG)


def scores(trajectories, mode="chains"):
    """Log-prob, entropy and value of the sampled tokens, in stream order."""
    packing = layout(trajectories, mode)
    batch = to_microbatches(packing.nodes, packing.reads, microbatches=1, rows=ROWS)
    out = score()(parameters(), batch, np.int32(1))
    return [gather_tokens(packing, np.asarray(x)[0, : packing.rows]) for x in (out.logprob, out.entropy, out.value)]


def layout(trajectories, mode):
    return pack(trajectories, mode=mode, row_tokens=LONGEST, row_reads=READS, final_reads=True)


@dataclasses.dataclass(frozen=True)
class Example:
    """A batch and all that credit assignment would have found for it, [K] in stream order."""

    trajectories: list
    advantages: np.ndarray
    weights: np.ndarray
    old_values: np.ndarray
    targets: np.ndarray
    value_weights: np.ndarray

    def reads(self, packing, critic=True):
        reads = fill_policy(packing, advantages=self.advantages, weights=self.weights)
        if not critic:
            return reads
        return fill_critic(reads, packing, values=self.old_values, targets=self.targets, weights=self.value_weights)

    def batch(self, mode="chains", critic=True, microbatches=1, rows=ROWS):
        packing = layout(self.trajectories, mode)
        return to_microbatches(packing.nodes, self.reads(packing, critic), microbatches=microbatches, rows=rows)


def away_from_edges(rng, step, edges):
    """log ρ of each token such that ρ and its step's mean stay 1e-3 from the clip's edges."""
    out = np.zeros(len(step))
    for unit in np.unique(step):
        while True:
            drawn = rng.uniform(-1.5, 1.5, (step == unit).sum())
            ratios = np.exp([*drawn, drawn.mean()])
            if np.abs(ratios[:, None] - edges).min() > 2e-3:
                break
        out[step == unit] = drawn
    return out


@functools.cache
def example(context="append", aggregate="token", seed=0):
    """One untrained trajectory among five; old log-probs and values away from where the losses have corners."""
    rng = np.random.default_rng(seed)
    trajectories = fixed_batch(context, seed)
    logprob, _, value = scores(trajectories)
    steps = [(i, t.group, s) for i, t in enumerate(trajectories) for s in t.steps]
    sizes = [len(s.response_ids) for _, _, s in steps]
    step = np.repeat(np.arange(len(steps)), sizes)
    trajectory, group = (np.repeat([cell[i] for cell in steps], sizes) for i in (0, 1))
    trained = trajectory != 1
    off = rng.uniform(0.1, 1.0, len(step)) * rng.choice([-1, 1], len(step))
    return Example(
        trajectories=with_logprobs(trajectories, logprob - away_from_edges(rng, step, np.array([0.8, 1.28, 3.0]))),
        advantages=rng.normal(size=len(step)).astype(np.float32),
        weights=aggregate_weights(aggregate, step, trajectory, group, trained, fixed_denominator=10.0),
        old_values=(value + np.where(np.abs(np.abs(off) - 0.5) < 0.01, 0.3, off)).astype(np.float32),
        targets=(value + rng.normal(0.5, 1.0, len(step))).astype(np.float32),
        value_weights=aggregate_weights("token", step, trajectory, group, trained & (rng.random(len(step)) < 0.7)),
    )


@functools.cache
def gradient(policy, config):
    """Compiled (params, batch of one microbatch) -> ((loss, metrics), gradient)."""
    inner = jax.value_and_grad(functools.partial(loss_and_metrics, policy, config), has_aux=True)
    # Compiled fast rather than to be fast.
    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(lambda params, batch: inner(params, jax.tree.map(lambda x: x[0], batch)), compiler_options=quick)


def check_close(one, other, relative):
    """Each leaf within `relative` of its largest entry."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=relative * max(np.abs(b).max(), 1e-30))


def check_nonzero(grads):
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


GRID = [
    ("token", "ppo", "token", False),
    ("token", "dual", "trajectory", True),
    ("token", "cispo", "group", False),
    ("token", "none", "fixed", False),
    ("step", "asymmetric", "step", True),
    ("step", "dual", "group", False),
    ("step", "cispo", "trajectory", False),
]


@pytest.mark.parametrize(("ratio", "clip", "aggregate", "critic"), GRID)
def test_chains_have_the_loss_and_gradient_of_steps(ratio, clip, aggregate, critic):
    config = dataclasses.replace(CONFIG, ratio=ratio, clip=clip)
    for context in ("append", "window", "mixed"):
        case = example(context, aggregate)
        with jax.enable_x64(True):
            params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), parameters(critic))
            chains = gradient(WIDE, config)(params, case.batch("chains", critic))
            steps = gradient(WIDE, config)(params, case.batch("steps", critic))
        assert chains[0][0].dtype == np.float64
        check_close(chains, steps, 1e-9)
        check_nonzero(steps[1])


@settings(max_examples=20, deadline=None)
@given(batches())
def test_chains_have_the_loss_and_gradient_of_steps_for_any_batch(trajectories):
    assume(layout(trajectories, "steps").rows <= ROWS)
    count = sum(len(s.response_ids) for t in trajectories for s in t.steps)
    numbers = np.random.default_rng(count).normal(size=(5, count)).astype(np.float32)
    case = Example(trajectories, *(np.abs(x) if i in (1, 4) else x for i, x in enumerate(numbers)))
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), parameters())
        chains, steps = (gradient(WIDE, STEP_RATIO)(params, case.batch(mode)) for mode in ("chains", "steps"))
    check_close(chains, steps, 1e-9)


@pytest.mark.parametrize("config", [CONFIG, STEP_RATIO])
@pytest.mark.parametrize("context", ["append", "window", "mixed"])
def test_chains_have_the_gradient_of_steps_in_single_precision(config, context):
    case = example(context, "step")
    chains, steps = (gradient(POLICY, config)(parameters(), case.batch(mode)) for mode in ("chains", "steps"))
    np.testing.assert_allclose(chains[0][0], steps[0][0], rtol=1e-5)
    check_close(chains[1], steps[1], 1e-5)


@pytest.mark.parametrize("mode", ["chains", "steps"])
@pytest.mark.parametrize("context", ["append", "mixed"])
def test_scores_are_those_of_each_step_alone(mode, context):
    """Independent of packing: one forward pass for each step's own prompt and response."""
    trajectories = fixed_batch(context)
    steps = [s for t in trajectories for s in t.steps]
    sequences = [np.concatenate([s.prompt_ids, s.response_ids]) for s in steps]
    logits = tiny.full_logits(POLICY, parameters()["decoder"], sequences, LONGEST, rows=ROWS)
    logprob, entropy = [], []
    for s, row in zip(steps, logits, strict=True):
        own = tiny.log_softmax(row[len(s.prompt_ids) - 1 : -1].astype(np.float64) / CONFIG.temperature)
        logprob += own[np.arange(len(s.response_ids)), s.response_ids].tolist()
        entropy += (-(np.exp(own) * own).sum(-1)).tolist()
    got = scores(trajectories, mode)
    np.testing.assert_allclose(got[0], logprob, atol=1e-5)
    np.testing.assert_allclose(got[1], entropy, atol=1e-5)


def test_values_are_a_linear_head():
    kernel, hidden = np.arange(3.0), np.array([[1.0, 2.0, 3.0], [0.0, 0.0, -1.0]])
    params = {"value": {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(0.5)}}
    np.testing.assert_allclose(values(params, jnp.asarray(hidden)), [8.5, -1.5])
    assert not np.any(init_params(POLICY, jax.random.key(0), critic=True)["value"]["kernel"])


@functools.cache
def updater(shape, adam=False):
    """(update, fresh state, mesh); without Adam the update subtracts rate times gradient."""
    mesh = tiny.mesh(*shape)
    optimizer = optax.identity()
    if adam:
        optimizer = make_optimizer(max_grad_norm=0.1, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    layout = shardings(init_state(parameters(), optimizer), mesh)

    def fresh():
        return jax.device_put(init_state(jax.tree.map(jnp.array, parameters()), optimizer), layout)

    return make_update(POLICY, CONFIG, optimizer, layout), fresh, mesh


def one_update(batch, count, shape=(1, 1, 1)):
    """The gradient that an update applied, and its metrics."""
    update, fresh, mesh = updater(shape)
    state, metrics = update(fresh(), global_batch(batch, mesh), np.int32(count), RATES)
    assert int(state.updates) == 1 and int(state.skipped) == 0
    moved = jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), parameters(), state.params)
    grads = {part: jax.tree.map(lambda x, rate=RATES[part]: x / rate, tree) for part, tree in moved.items()}
    return grads, jax.device_get(metrics)


def in_rows(case, rows):
    """A batch [2, 8] whose rows lie at the given places of 16; the others are padding."""
    packing = layout(case.trajectories, "steps")
    assert len(rows) == packing.rows
    content = (packing.nodes, case.reads(packing))
    empty = to_microbatches(
        jax.tree.map(lambda x: x[:0], packing.nodes), jax.tree.map(lambda x: x[:0], content[1]), microbatches=2, rows=8
    )

    def scatter(to, x):
        flat = to.reshape(16, *to.shape[2:]).copy()
        flat[np.array(rows)] = x
        return flat.reshape(to.shape)

    return empty.replace(
        nodes=jax.tree.map(scatter, empty.nodes, content[0]), reads=jax.tree.map(scatter, empty.reads, content[1])
    )


def test_rows_may_lie_anywhere_in_any_number_of_microbatches_of_one_program():
    case, count = example("append"), ROWS_OF_STEPS
    grads, metrics = one_update(in_rows(case, range(count)), 1)
    check_nonzero(grads)
    order = np.random.default_rng(0).permutation(16)[:count]
    for rows in (range(count)[::-1], range(8, 8 + count), range(0, 2 * count, 2), order):
        other, other_metrics = one_update(in_rows(case, rows), 2)
        check_close(other, grads, 1e-5)
        check_close(other_metrics, metrics, 1e-5)
    assert updater((1, 1, 1))[0]._cache_size() == 1, "the number of microbatches must be data"


def test_microbatches_beyond_the_count_are_not_read():
    batch = in_rows(example("append"), range(ROWS_OF_STEPS))
    grads, _ = one_update(batch, 1)
    spoilt = jax.tree.map(lambda x: np.concatenate([x[:1], np.full_like(x[1:], 1)]), batch)
    jax.tree.map(np.testing.assert_array_equal, one_update(spoilt, 1)[0], grads)


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_shards_do_not_change_the_update(shape):
    batch = in_rows(example("append"), range(0, 2 * ROWS_OF_STEPS, 2))
    grads, metrics = one_update(batch, 2)
    sharded, sharded_metrics = one_update(batch, 2, shape)
    check_close(sharded, grads, 1e-5)
    check_close(sharded_metrics, metrics, 1e-5)


def test_the_update_is_the_gradient_of_the_loss():
    case = example("window")
    (loss, _), grads = gradient(POLICY, CONFIG)(parameters(), case.batch())
    applied, metrics = one_update(case.batch(microbatches=2, rows=8), 2)
    check_close(applied, grads, 1e-5)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    squares = sum(np.sum(np.asarray(g, np.float64) ** 2) for g in jax.tree.leaves(grads))
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(squares), rtol=1e-5)


def test_metrics_say_what_they_are_named_after():
    case = example("mixed")
    metrics = one_update(case.batch(microbatches=2, rows=8), 2)[1]
    logprob, entropy, value = scores(case.trajectories)
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
        "policy_loss": (case.weights * loss).sum(),
        "entropy_loss": (case.weights * entropy).sum(),
        "value_loss": (case.value_weights * error).sum(),
    }
    total = expected["policy_loss"] - 0.01 * expected["entropy_loss"] + 0.5 * expected["value_loss"]
    for name, x in (expected | {"loss": total}).items():
        np.testing.assert_allclose(metrics[name], x, rtol=1e-4, err_msg=name)
    assert set(metrics) == {*expected, "loss", "grad_norm", "skipped", "skipped_in_a_row"}


def probe_gradient(batch):
    """d loss / d (final hidden state of each node) [rows, length, width]: what reaches the logits of each position."""
    one = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)

    def loss(probe):
        def add(call, args, kwargs, context):
            out = call(*args, **kwargs)
            return (out[0] + probe, out[1]) if context.module.name is None else out

        with nn.intercept_methods(add):
            return loss_and_metrics(POLICY, CONFIG, parameters(), one)[0]

    return np.asarray(jax.jit(jax.grad(loss))(jnp.zeros((*one.nodes.tokens.shape, POLICY.width))))


def test_fault_11_only_positions_that_predict_trained_tokens_have_a_gradient():
    """Prompt, tool text, padding and untrained trajectories reach the logits with a gradient of exactly zero."""
    case = example("mixed")
    packing = layout(case.trajectories, "chains")
    reads = case.reads(packing)
    expected = np.zeros((ROWS, LONGEST), bool)
    row, column = np.nonzero((reads.weight > 0) | (reads.value_weight > 0))
    expected[row, reads.src[row, column]] = True
    np.testing.assert_array_equal(np.abs(probe_gradient(case.batch())).max(axis=-1) > 0, expected)


def test_fault_8_what_stands_in_rows_of_no_weight_does_not_matter():
    batch, rng = example("append").batch(), np.random.default_rng(0)
    padding = ~(batch.reads.weight[0].any(axis=1) | batch.reads.value_weight[0].any(axis=1))
    assert padding.any()
    noise = {
        "nodes": {"tokens": VOCAB, "position": LONGEST},
        "reads": {"src": LONGEST, "target": VOCAB, "step": 9, "is_action": 2},
    }
    spoilt = jax.tree.map(np.copy, batch)
    for part, fields in noise.items():
        for name, bound in fields.items():
            x = getattr(getattr(spoilt, part), name)
            x[0, padding] = rng.integers(0, bound, x[0, padding].shape)
    for name in ("old_logprob", "advantage", "old_value", "value_target"):
        x = getattr(spoilt.reads, name)
        x[0, padding] = rng.normal(size=x[0, padding].shape)
    clean, noisy = (gradient(POLICY, CONFIG)(parameters(), b) for b in (batch, spoilt))
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
    config = dataclasses.replace(CONFIG, clip="none", entropy_coef=0.0, temperature=1.0)
    params = parameters(critic=False)
    (loss, _), grads = gradient(POLICY, config)(params, case.batch(critic=False))
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


def test_the_optimizer_is_adam_on_the_clipped_gradient_and_matrices_alone_decay():
    """Three steps, of which one is not clipped, against the published update rule."""
    rng = np.random.default_rng(0)
    params = {"matrix": rng.normal(size=(2, 3)), "vector": rng.normal(size=3)}
    optimizer = make_optimizer(max_grad_norm=0.5, b1=0.9, b2=0.95, eps=1e-3, weight_decay=0.1)
    moments = dict.fromkeys(params, (0.0, 0.0))
    with jax.enable_x64(True):
        state = optimizer.init(jax.tree.map(jnp.asarray, params))
        for t, scale in enumerate((3.0, 0.01, 1.0), start=1):
            grads = {name: scale * rng.normal(size=p.shape) for name, p in params.items()}
            norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
            updates, state = optimizer.update(*jax.tree.map(jnp.asarray, (grads, state, params)))
            for name, p in params.items():
                g = grads[name] * min(1, 0.5 / norm)
                m, v = (b * old + (1 - b) * x for b, old, x in zip((0.9, 0.95), moments[name], (g, g**2), strict=True))
                moments[name] = m, v
                expected = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3) + (0.1 * p if p.ndim > 1 else 0)
                np.testing.assert_allclose(updates[name], expected, rtol=1e-9)


def test_an_update_that_is_not_finite_is_skipped_and_counted():
    update, fresh, mesh = updater((1, 1, 1), adam=True)
    good = example("append")
    bad = dataclasses.replace(good, advantages=np.where(np.arange(len(good.weights)) == 2, np.nan, good.advantages))
    good, bad = (global_batch(case.batch(microbatches=MICROBATCHES, rows=8), mesh) for case in (good, bad))
    rates = {"decoder": np.float32(1e-2), "value": np.float32(1e-1)}
    before, _ = update(fresh(), good, np.int32(2), rates)
    kept = jax.device_get((before.params, before.opt_state))
    after, metrics = update(before, bad, np.int32(2), rates)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((after.params, after.opt_state)), kept)
    assert (int(after.updates), int(after.skipped), int(after.skipped_in_a_row)) == (1, 1, 1)
    assert not np.isfinite(metrics["loss"]) and int(metrics["skipped_in_a_row"]) == 1
    twice, _ = update(after, bad, np.int32(2), rates)
    assert (int(twice.skipped), int(twice.skipped_in_a_row)) == (2, 2)
    again, _ = update(twice, good, np.int32(2), rates)
    assert (int(again.updates), int(again.skipped), int(again.skipped_in_a_row)) == (2, 2, 0)
    assert np.isfinite(jax.tree.leaves(jax.device_get(again.params))[0]).all()
    assert update._cache_size() == 1


def test_the_old_state_is_donated():
    update, fresh, mesh = updater((1, 1, 1))
    state = fresh()
    batch = global_batch(example("append").batch(microbatches=MICROBATCHES, rows=8), mesh)
    update(state, batch, np.int32(2), RATES)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))

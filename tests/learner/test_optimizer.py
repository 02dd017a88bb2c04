"""Optimizers against optax's own and against published rules; what is refused; schedules of the rate."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import tiny
from examples import check_close

from agentr1_jax.learner.config import OptimizerConfig
from agentr1_jax.learner.optimizer import OPTIMIZERS, learning_rates, make_optimizer, rate_by_progress
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.params import init_params
from agentr1_jax.policy.sharding import shardings

CONFIG = OptimizerConfig(max_grad_norm=0.0, eps=1e-6)
RATE = 0.03


def optimizer_of(name, **changes):
    return make_optimizer(dataclasses.replace(CONFIG, name=name, **changes))


@functools.cache
def tree(seed):
    """Parameters or gradients as the learner has them: kernels of three and four axes, vectors, a scalar."""
    rng = np.random.default_rng(seed)
    shapes = {
        "decoder": {"layers": {"out": {"kernel": (2, 2, 3, 8)}, "norm": {"scale": (2, 8)}}, "embed": (5, 8)},
        "value": {"kernel": (8,), "bias": ()},
    }
    return jax.tree.map(
        lambda shape: np.asarray(rng.normal(size=shape), np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def walk(optimizer, step, steps=3):
    """Where some steps with gradients of their own lead to."""
    params, state = tree(0), optimizer.init(tree(0))
    for t in range(steps):
        updates, state = optimizer.update(tree(t + 1), state, params)
        params = jax.tree.map(step, params, updates)
    return params


@pytest.mark.parametrize("name", ["adafactor", "adamw", "adopt", "lamb", "lion", "sgd", "signum"])
def test_a_named_optimizer_walks_as_optax_does(name):
    """With the rate outside, b1, b2 and eps for what descends from Adam, and no weight decay of its own."""
    alias = vars(optax).get(name) or vars(optax.contrib)[name]
    parameters = inspect.signature(alias).parameters
    settings = {"weight_decay": 0.0} | ({"b1": 0.9, "b2": 0.95, "eps": 1e-6} if "b1" in parameters else {})
    theirs = alias(learning_rate=RATE, **{key: x for key, x in settings.items() if key in parameters})

    # Compiled fast rather than to be fast.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both():
        ours = walk(optimizer_of(name), lambda p, u: p - RATE * u)
        decayed = walk(optimizer_of(name, weight_decay=0.5), lambda p, u: p - RATE * u, steps=1)
        once = walk(optimizer_of(name), lambda p, u: p - RATE * u, steps=1)
        return ours, walk(theirs, lambda p, u: p + u), jax.tree.map(jnp.subtract, once, decayed)

    ours, expected, decay = both()
    check_close(ours, expected, 1e-5)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected, tree(0))
    assert max(jax.tree.leaves(moved)) > 1e-4
    for path, lost in jax.tree_util.tree_leaves_with_path(decay):
        share = 0.5 * RATE if path[-1].key in ("kernel", "embed") else 0
        old = functools.reduce(lambda node, key: node[key.key], path, tree(0))
        np.testing.assert_allclose(lost, share * old, atol=1e-5)


def test_args_reach_the_optimizer_and_come_first():
    momentum = walk(optimizer_of("sgd", args={"momentum": 0.9}), lambda p, u: p - RATE * u)
    theirs = optax.sgd(RATE, momentum=0.9)
    check_close(momentum, walk(theirs, lambda p, u: p + u), 1e-5)
    half = optimizer_of("lion", args={"mu_dtype": "bfloat16", "b1": 0.5}).init(tree(0))
    assert {x.dtype for x in jax.tree.leaves(half) if x.ndim} == {jnp.dtype("bfloat16")}
    other = walk(optimizer_of("lion", args={"b1": 0.5}), lambda p, u: p - RATE * u)
    check_close(other, walk(optax.lion(RATE, 0.5, 0.95, weight_decay=0.0), lambda p, u: p + u), 1e-5)


@pytest.mark.parametrize("bound", [0.5, 1e3, 0.0])
def test_gradients_are_clipped_to_a_norm_where_one_is_given(bound):
    norm = float(optax.tree.norm(tree(1)))
    optimizer = optimizer_of("sgd", max_grad_norm=bound)
    updates, _ = jax.jit(optimizer.update)(tree(1), optimizer.init(tree(0)), tree(0))
    share = min(1, bound / norm) if bound else 1
    check_close(updates, jax.tree.map(lambda g: share * g, tree(1)), 1e-6)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("adamm", {}, "unknown optimizer.name 'adamm'; choose one of .*adamw, .*lion, .*yogi"),
        ("lion", {"beta1": 0.9}, "unknown optimizer.args.beta1; lion takes b1, b2, mu_dtype$"),
        ("adamw", {"weight_decay": 0.1}, "unknown optimizer.args.weight_decay; adamw takes b1, b2, eps"),
        ("sign_sgd", {"learning_rate": 1.0}, "unknown optimizer.args.learning_rate; sign_sgd takes no args"),
        ("sgd", {"momentum": "fast"}, "'sgd' cannot be used with args"),
        ("lion", {"mu_dtype": "banana"}, r"'lion' cannot be used with args \{'mu_dtype': 'banana'\}: .*banana"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(name, args, message):
    with pytest.raises(ValueError, match=message):
        optimizer_of(name, args=args)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_has_a_layout(name):
    """Also Adafactor's moments, which have fewer axes than their parameters and exist for large axes alone."""
    policy = DecoderConfig(vocab_size=512, width=256, layers=2, heads=4, kv_heads=2, head_dim=128, hidden=256)
    params = jax.eval_shape(lambda: init_params(policy, jax.random.key(0), critic="shared_trunk"))
    state = jax.eval_shape(optimizer_of(name, weight_decay=0.1, max_grad_norm=1.0).init, params)
    layout = shardings(state, tiny.mesh(2, 2, 2))
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(layout), strict=True):
        sharding.shard_shape(leaf.shape)
    if name == "adafactor":
        assert {x.ndim for x in jax.tree.leaves(state)} == {0, 1, 2, 3}


def test_adamw_takes_the_clipped_gradient_and_lets_kernels_alone_decay():
    """Three steps, of which one is not clipped, against the published update rule."""
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(2, 3)), "scale": rng.normal(size=3)}
    optimizer = optimizer_of("adamw", max_grad_norm=0.5, eps=1e-3, weight_decay=0.1)
    moments = dict.fromkeys(params, (0.0, 0.0))
    with jax.enable_x64(True):
        state = optimizer.init(jax.tree.map(jnp.asarray, params))
        for t, scale in enumerate((3.0, 0.01, 1.0), start=1):
            grads = {name: scale * rng.normal(size=p.shape) for name, p in params.items()}
            norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
            updates, state = jax.jit(optimizer.update)(*jax.tree.map(jnp.asarray, (grads, state, params)))
            for name, p in params.items():
                g = grads[name] * min(1, 0.5 / norm)
                m, v = (b * old + (1 - b) * x for b, old, x in zip((0.9, 0.95), moments[name], (g, g**2), strict=True))
                moments[name] = m, v
                expected = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3) + (0.1 * p if name == "kernel" else 0)
                np.testing.assert_allclose(updates[name], expected, rtol=1e-9)


def test_muon_steps_along_the_orthogonal_factor_of_each_layer():
    """A layer's kernel gets a step with equal singular values, of AdamW's size; the rest gets AdamW's (Nesterov)."""
    rng = np.random.default_rng(0)
    shapes = {"layers": {"kernel": (2, 8, 4)}, "embed": (5, 3), "scale": (3,)}
    params, grads = (
        jax.tree.map(lambda shape: rng.normal(size=shape), shapes, is_leaf=lambda x: isinstance(x, tuple)) for _ in "pg"
    )
    hyper = {"max_grad_norm": 1e9, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def step(grads):
        optimizer = make_optimizer(OptimizerConfig("muon", **hyper))
        args = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (grads, params))
        update = jax.jit(lambda grads, params: optimizer.update(grads, optimizer.init(params), params)[0])
        return jax.tree.map(np.asarray, update(*args))

    muon = step(grads)
    nadam = optax.scale_by_adam(b1=0.9, b2=0.95, nesterov=True)
    check_close(
        muon["embed"], nadam.update(grads["embed"], nadam.init(grads["embed"]))[0] + 0.1 * params["embed"], 1e-5
    )
    check_close(muon["scale"], nadam.update(grads["scale"], nadam.init(grads["scale"]))[0], 1e-5)
    for layer in range(2):
        update = (muon["layers"]["kernel"] - 0.1 * params["layers"]["kernel"])[layer] / (0.2 * np.sqrt(8))
        u, sizes, v = np.linalg.svd(grads["layers"]["kernel"][layer], full_matrices=False)
        aligned = u.T @ update @ v.T
        assert (np.abs(np.diag(aligned) - 1) < 0.4).all(), "the iteration brings singular values near 1"
        assert np.abs(aligned - np.diag(np.diag(aligned))).max() < 1e-3
        assert sizes.max() / sizes.min() > 1.5
    changed = {**grads, "layers": {"kernel": grads["layers"]["kernel"] * np.array([1, -3])[:, None, None]}}
    np.testing.assert_allclose(step(changed)["layers"]["kernel"][0], muon["layers"]["kernel"][0], atol=1e-6)


def rates_of(updates, **changes):
    """The policy's share of its peak rate in these updates of 100."""
    config = dataclasses.replace(OptimizerConfig(lr=1.0, value_lr=0.5), **changes)
    rates = [learning_rates(config, update, 100, ["decoder", "value"]) for update in updates]
    assert {r["value"] for r in rates} == {0.5}
    return [r["decoder"] for r in rates]


def test_rates_rise_over_the_warmup_and_fall_to_their_final_share():
    assert rates_of(range(6), warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates_of(range(4), warmup=2, critic_warmup=2) == [0, 0, 0.5, 1.0]
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    for schedule, expected in (("constant", [1, 1, 1]), ("linear", [0.8, 0.6, 0.2]), ("cosine", [quarter, 0.6, 0.2])):
        rates = rates_of((25, 50, 100), schedule=schedule, final_share=0.2)
        assert rates == pytest.approx(expected)


def test_progress_gives_the_same_rates_as_counting_updates():
    by_count = rates_of(range(100), schedule="cosine", warmup=5, final_share=0.1)
    by_progress = [rate_by_progress(update / 100) for update in range(100)]
    assert by_progress[5:] == pytest.approx(by_count[5:])
    assert 0 < by_progress[0] < by_progress[1] < by_progress[4] and rate_by_progress(1.3) == pytest.approx(0.1)

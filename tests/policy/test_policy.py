"""The decoder: an independent numpy forward pass, invariances of packing, the table of layouts."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import OptimizerConfig
from agentr1_jax.learner.optimizer import make_optimizer
from agentr1_jax.learner.update import init_state
from agentr1_jax.policy import sharding
from agentr1_jax.policy.attention import PackedRows, grouped_attention
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Decoder, frequencies, head_kernel, rotate
from agentr1_jax.policy.params import init_params, values
from agentr1_jax.validation import from_section

POLICY = tiny.POLICY
UNTIED = dataclasses.replace(POLICY, tied=False, rope_theta=500.0)
LENGTH = 12


def run(policy, params, tokens, position, subtree_end):
    memory = PackedRows(subtree_end=jnp.asarray(subtree_end))
    return Decoder(policy).apply({"params": params}, jnp.asarray(tokens), jnp.asarray(position), memory)[0]


forward = jax.jit(run, static_argnums=0)


def plain(tokens):
    """Positions and subtree ends of rows that are one chain each."""
    rows, length = tokens.shape
    return np.broadcast_to(np.arange(length), (rows, length)), np.full((rows, length), length)


def numpy_logits(policy, params, tokens):
    """Logits [T, vocab] of one sequence: the equations written out in float64, one head at a time, keys repeated."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    length, d = len(tokens), policy.head_dim

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + policy.norm_eps) * scale

    def rotary(x):
        turns = np.arange(length)[:, None] * policy.rope_theta ** (-2 * np.arange(d // 2) / d)
        turned = (x[:, : d // 2] + 1j * x[:, d // 2 :]) * np.exp(1j * turns)
        return np.concatenate([turned.real, turned.imag], -1)

    x = params["embed"][tokens]
    for i in range(policy.layers):
        layer = jax.tree.map(lambda p, i=i: p[i], params["layers"])
        y = norm(x, layer["attention_norm"]["scale"])

        def project(name, head, y=y, layer=layer):
            out = y @ layer[name]["kernel"][:, head] + (layer[name]["bias"][head] if policy.qkv_bias else 0)
            normed = policy.qk_norm and name != "value"
            return norm(out, layer[f"{name}_norm"]["scale"]) if normed else out

        heads = []
        for h in range(policy.heads):
            shared = h // (policy.heads // policy.kv_heads)
            query, key = rotary(project("query", h)), rotary(project("key", shared))
            scores = np.where(np.tri(length, dtype=bool), query @ key.T / np.sqrt(d), -np.inf)
            heads.append(np.exp(tiny.log_softmax(scores)) @ project("value", shared))
        x = x + sum(mixed @ layer["out"]["kernel"][h] for h, mixed in enumerate(heads))
        y = norm(x, layer["mlp_norm"]["scale"])
        gate = y @ layer["gate"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"]["kernel"])) @ layer["down"]["kernel"]
    head = params["embed"].T if policy.tied else params["head"]
    return norm(x, params["final_norm"]["scale"]) @ head


@pytest.mark.parametrize(
    "policy",
    [POLICY, dataclasses.replace(UNTIED, kv_heads=4, qkv_bias=True, qk_norm=True)],
    ids=["tied", "untied, all heads, biases, norms"],
)
def test_it_equals_a_forward_pass_written_out_in_numpy(policy):
    params = tiny.decoder_params(policy)
    # Scales differ from 1, so that a norm which forgets its scale shows.
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    tokens = np.random.default_rng(0).integers(0, policy.vocab_size, (1, LENGTH), np.int32)
    hidden = forward(policy, params, tokens, *plain(tokens))
    np.testing.assert_allclose(
        hidden[0] @ head_kernel(params), numpy_logits(policy, params, tokens[0]), rtol=1e-5, atol=1e-5
    )


def test_a_token_sees_nothing_after_itself():
    params = tiny.decoder_params()
    tokens = np.random.default_rng(1).integers(0, POLICY.vocab_size, (1, LENGTH), np.int32)
    before = forward(POLICY, params, tokens, *plain(tokens))
    for k in (0, 5, LENGTH - 1):
        changed = tokens.copy()
        changed[0, k] = (tokens[0, k] + 1) % POLICY.vocab_size
        after = forward(POLICY, params, changed, *plain(changed))
        differs = np.abs(after - before)[0].max(-1) > 0
        assert not differs[:k].any() and differs[k:].all()


def test_packing_neighbours_and_padding_change_nothing():
    params = tiny.decoder_params()
    rng = np.random.default_rng(2)
    short, long = rng.integers(0, POLICY.vocab_size, 4), rng.integers(0, POLICY.vocab_size, 7)

    def row(*segments):
        tokens, position, end = (np.zeros((1, LENGTH), np.int32) for _ in range(3))
        at = 0
        for segment in segments:
            here = slice(at, at + len(segment))
            tokens[0, here], position[0, here] = segment, np.arange(len(segment))
            at += len(segment)
            end[0, here] = at
        return forward(POLICY, params, tokens, position, end)[0]

    packed = row(long, short)
    np.testing.assert_allclose(packed[:7], row(long)[:7], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(packed[7:11], row(short)[:4], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(packed[7:11], row(rng.integers(0, 64, 7), short)[7:11], rtol=1e-6, atol=1e-6)
    assert np.isfinite(packed).all()


@st.composite
def forests(draw):
    """Parent of each node (-1: a root) in depth-first order: a node hangs on the one before or an ancestor of that."""
    parents = [-1]
    for i in range(1, LENGTH):
        line = [-1]
        j = i - 1
        while j >= 0:
            line.append(j)
            j = parents[j]
        parents.append(draw(st.sampled_from(line)))
    return parents


@settings(max_examples=25, deadline=None)
@given(parents=forests(), seed=st.integers(0, 99))
def test_a_token_sees_its_ancestors(parents, seed):
    ancestor = np.eye(LENGTH, dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            ancestor[i] |= ancestor[parent]
    subtree_end = np.array([[1 + max(i for i in range(LENGTH) if ancestor[i, j]) for j in range(LENGTH)]], np.int32)
    rng = np.random.default_rng(seed)
    query, key, value = (rng.normal(size=(1, LENGTH, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    mixed, state = attend(subtree_end, query, key, value)
    for h in range(4):
        scores = np.where(ancestor, query[0, :, h] @ key[0, :, h // 2].T, -np.inf)
        expected = np.exp(tiny.log_softmax(scores)) @ value[0, :, h // 2]
        np.testing.assert_allclose(mixed[0, :, h], expected, rtol=1e-5, atol=1e-5)


@jax.jit
def attend(subtree_end, query, key, value):
    return PackedRows(subtree_end=subtree_end).attend(query, key, value, jnp.int32(0), None)


def test_scores_of_half_precision_are_summed_in_float32():
    rng = np.random.default_rng(3)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 64, 1, 256)), jnp.bfloat16) for _ in range(3))
    visible = jnp.ones((1, 64, 64), bool)
    mixed = grouped_attention(query, key, value, visible)
    assert mixed.dtype == jnp.bfloat16
    wide = grouped_attention(*(x.astype(jnp.float32) for x in (query, key, value)), visible)
    np.testing.assert_allclose(mixed.astype(jnp.float32), wide, atol=0.02)


turn = jax.jit(lambda x, position: rotate(x, position, frequencies(x.shape[-1], 10_000.0)))


def test_a_far_position_turns_as_exactly_as_float32_allows():
    x = jnp.ones((1, 1, 1, 4), jnp.float32)
    turns = 100_000 * np.array([1.0, 0.01])
    expected = np.concatenate([np.cos(turns) - np.sin(turns), np.cos(turns) + np.sin(turns)])
    np.testing.assert_allclose(turn(x, np.int32([[100_000]]))[0, 0, 0], expected, atol=0.01)


def test_the_value_head_is_linear_and_starts_at_zero():
    params = init_params(POLICY, jax.random.key(0), critic="shared_trunk")
    hidden = jax.random.normal(jax.random.key(1), (2, 3, POLICY.width))
    assert (values(params, hidden) == np.zeros((2, 3))).all()
    params["value"] = {"kernel": jnp.arange(16.0), "bias": jnp.float32(2)}
    np.testing.assert_allclose(values(params, hidden), np.asarray(hidden) @ np.arange(16.0) + 2, rtol=1e-5, atol=1e-5)
    assert "value" not in init_params(POLICY, jax.random.key(0), critic="none")


def trees():
    """Everything whose layout the table must know: parameters and the learner's whole state, tied and untied."""
    for policy, name in itertools.product((POLICY, UNTIED), ("adamw", "muon")):
        params = jax.eval_shape(lambda key, p=policy: init_params(p, key, critic="shared_trunk"), jax.random.key(0))
        optimizer = make_optimizer(OptimizerConfig(name, weight_decay=0.1))
        yield params
        yield jax.eval_shape(lambda p, o=optimizer: init_state(p, o), params)


def test_every_parameter_and_optimizer_moment_has_a_layout():
    for tree in trees():
        specs = [layout.spec for layout in jax.tree.leaves(sharding.shardings(tree, tiny.mesh(2, 2, 2)))]
        for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(tree), specs, strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            whole = leaf.ndim < 2 or name.endswith("scale")
            assert whole == (tuple(spec) in ((), (None,) * len(spec))), name
            if not whole:
                assert {"fsdp", "tensor"} == set(spec) - {None} and len(spec) == leaf.ndim, name


def test_an_axis_that_does_not_divide_is_replicated():
    odd = {"embed": jax.ShapeDtypeStruct((63, 16), jnp.float32), "head": jax.ShapeDtypeStruct((15, 64), jnp.float32)}
    layout = sharding.shardings(odd, tiny.mesh(2, 2, 2))
    assert layout["embed"].spec == P(None, "fsdp") and layout["head"].spec == P(None, "tensor")


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(KeyError, match="no sharding rule for parameter 'decoder/layers/router/kernel'; add one to"):
        sharding.shardings({"decoder": {"layers": {"router": {"kernel": jnp.ones((2, 2))}}}}, tiny.mesh())


def test_remat_changes_neither_value_nor_gradient():
    params = tiny.decoder_params()
    tokens = np.random.default_rng(6).integers(0, POLICY.vocab_size, (2, LENGTH), np.int32)

    def loss(policy):
        return lambda p: jnp.sum(run(policy, p, tokens, *plain(tokens)) ** 2)

    def result(policy):
        return jax.jit(jax.value_and_grad(loss(policy)))(params)

    dots, full = (dataclasses.replace(POLICY, remat=name) for name in ("dots", "full"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), result(dots), result(POLICY))
    matmuls = [str(jax.make_jaxpr(jax.grad(loss(p)))(params)).count("dot_general") for p in (POLICY, dots, full)]
    assert matmuls[0] < matmuls[1] < matmuls[2], "scores are computed again by `dots`, all matmuls by `full`"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, r"kv_heads \(3\) must divide heads \(4\)"),
        ({"head_dim": 7}, r"head_dim is 7; rotary embeddings need an even number"),
        (
            {"attention": "flash"},
            r"attention is 'flash'; it must be 'xla', 'dense', 'splash', 'splash_tree' or 'cudnn'",
        ),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UserError, match=rf"policy.*{message}"):
        from_section(DecoderConfig, "policy", {**vars(POLICY), **changes})

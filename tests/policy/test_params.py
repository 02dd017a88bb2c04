"""Parts of the parameters: adapters and what they leave frozen, a critic of its own, dtypes for the engine."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from examples import OBJECTIVE, POLICY, check_close, example

from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import OptimizerConfig
from agentr1_jax.learner.optimizer import make_optimizer
from agentr1_jax.learner.update import init_state, loss_and_metrics, make_token_outputs, make_update
from agentr1_jax.policy import params as parts
from agentr1_jax.policy.attention import PackedRows
from agentr1_jax.policy.config import PROJECTIONS, LoraConfig
from agentr1_jax.policy.decoder import Decoder
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.policy.weights.names import parameter_shapes
from agentr1_jax.validation import from_section

LORA = dataclasses.replace(POLICY, lora=LoraConfig(rank=2, alpha=3.0, targets=("query", "value", "out", "down")))
TOKENS = np.random.default_rng(0).integers(0, POLICY.vocab_size, (2, 9)).astype(np.int32)


def shake(tree, seed=0, size=0.1):
    """The tree with noise on every leaf: zeros of a fresh adapter or value head hide mistakes."""
    leaves, treedef = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return treedef.unflatten([x + jnp.asarray(size * rng.normal(size=x.shape), x.dtype) for x in leaves])


@functools.cache
def whole(policy, critic):
    return shake(jax.jit(parts.init_params, static_argnums=(0, 2))(policy, jax.random.key(0), critic))


def logits(policy, decoder):
    return np.stack(tiny.full_logits(policy, decoder, list(TOKENS), TOKENS.shape[1], rows=2))


def paths(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }


@functools.cache
def gradient(policy):
    inner = jax.value_and_grad(functools.partial(loss_and_metrics, policy, OBJECTIVE, None), has_aux=True)
    return jax.jit(lambda params, frozen, batch: inner(params, frozen, jax.tree.map(lambda x: x[0], batch)))


@pytest.mark.parametrize("critic", ["shared_trunk", "separate"])
def test_split_and_join_are_inverse(critic):
    for policy in (POLICY, LORA):
        trained, frozen = parts.split(policy, whole(policy, critic))
        joined = parts.join(trained, frozen)
        for part, tree in joined.items():
            # Under LoRA, policy and critic share what is frozen.
            kept = whole(policy, critic)[part]
            if part == "critic" and policy is LORA:
                kept = parts._merge(parts.without_adapters(whole(policy, critic)["decoder"]), parts.adapters(kept))
            jax.tree.map(np.testing.assert_array_equal, tree, kept)
        assert set(joined) == {"decoder", "value"} | ({"critic"} if critic == "separate" else set())


def test_only_targets_have_adapters_and_fresh_ones_change_nothing():
    adapted = jax.jit(parts.init_decoder, static_argnums=0)(LORA, jax.random.key(0))
    wanted = {f"layers/{name}/lora_{x}" for name in LORA.lora.targets for x in "ab"}
    assert paths(parts.adapters(adapted)) == wanted
    np.testing.assert_array_equal(logits(LORA, adapted), logits(POLICY, parts.without_adapters(adapted)))
    assert paths(parts.without_adapters(adapted)) == paths(parameter_shapes(POLICY))


def test_merged_adapters_give_the_logits_of_unmerged_ones():
    everywhere = dataclasses.replace(POLICY, lora=LoraConfig(rank=2, alpha=3.0, targets=PROJECTIONS))
    decoder = whole(everywhere, "none")["decoder"]
    merged = parts.merge_adapters(everywhere, decoder)
    assert paths(merged) == paths(parts.without_adapters(decoder))
    np.testing.assert_allclose(logits(POLICY, merged), logits(everywhere, decoder), rtol=1e-5, atol=1e-5)
    assert np.abs(logits(POLICY, merged) - logits(POLICY, parts.without_adapters(decoder))).max() > 0.1
    assert parts.merge_adapters(POLICY, whole(POLICY, "none")["decoder"]) == whole(POLICY, "none")["decoder"]


def test_an_update_trains_and_keeps_adapters_alone():
    mesh = tiny.mesh(2, 2, 2)
    trained, frozen = parts.split(LORA, whole(LORA, "shared_trunk"))
    optimizer = make_optimizer(OptimizerConfig())
    state = init_state(jax.tree.map(jnp.copy, trained), optimizer)
    layout = shardings(state, mesh)
    frozen = jax.device_put(frozen, shardings(frozen, mesh))
    batch = jax.tree.map(jnp.asarray, example("append").batch(rows=8))
    update = make_update(LORA, OBJECTIVE, optimizer, layout)
    rates = dict.fromkeys(trained, np.float32(0.1))
    after, _ = update(jax.device_put(state, layout), frozen, batch, np.int32(1), rates)
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), after.params, trained)
    assert min(jax.tree.leaves(moved)) > 0 and paths(moved) == paths(trained)
    assert not any(x.is_deleted() for x in jax.tree.leaves(frozen)), "what is frozen is not donated"
    stored, everything = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (after, whole(LORA, "shared_trunk")))
    assert stored < 0.6 * everything, "adapters and their moments; of real shapes it is a small fraction"


def test_adapters_have_the_gradient_of_the_whole_model():
    trained, frozen = parts.split(LORA, whole(LORA, "shared_trunk"))
    batch = example("append").batch()
    (loss, _), grads = gradient(LORA)(trained, frozen, batch)
    (same, _), everything = gradient(LORA)(whole(LORA, "shared_trunk"), {}, batch)
    np.testing.assert_allclose(loss, same, rtol=1e-6)
    check_close(grads, parts.split(LORA, everything)[0], 1e-5)


def test_a_critic_of_its_own_shares_no_gradient_with_the_policy():
    params, batch = whole(POLICY, "separate"), example("append").batch()
    assert jax.tree.structure(params["critic"]) == jax.tree.structure(params["decoder"])
    (_, metrics), grads = gradient(POLICY)(params, {}, batch)
    alone = {name: params[name] for name in ("decoder",)}
    (_, _), policy_grads = gradient(POLICY)(alone, {}, batch)
    check_close(grads["decoder"], policy_grads["decoder"], 1e-5)
    trunk = {"decoder": params["critic"], "value": params["value"]}
    values_of = [
        np.asarray(make_token_outputs(POLICY, OBJECTIVE)(p, {}, None, batch, np.int32(1)).value)
        for p in (params, trunk)
    ]
    np.testing.assert_allclose(values_of[0], values_of[1], rtol=1e-5, atol=1e-6)
    assert metrics["value_loss"] > 0 and min(np.abs(g).max() for g in jax.tree.leaves(grads["critic"])) > 0


def test_a_critic_starts_as_a_copy_in_buffers_of_its_own():
    params = parts.init_params(POLICY, jax.random.key(0), "separate")
    jax.tree.map(np.testing.assert_array_equal, params["critic"], params["decoder"])
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)]
    assert len(set(pointers)) == len(pointers)
    assert params["value"]["kernel"].dtype == jnp.float32
    half = dataclasses.replace(POLICY, param_dtype="bfloat16")
    assert parts.init_params(half, jax.random.key(0), "separate")["value"]["kernel"].dtype == jnp.float32


def test_a_cast_for_the_engine_changes_no_result():
    policy = dataclasses.replace(POLICY, dtype="bfloat16")
    decoder = whole(policy, "none")["decoder"]
    cast = parts.cast_for_compute(policy, decoder)
    assert cast["embed"].dtype == jnp.bfloat16 and cast["final_norm"]["scale"].dtype == jnp.float32
    tokens, position = jnp.asarray(TOKENS), jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)

    @jax.jit
    def states(decoder):
        memory = PackedRows(jnp.full(TOKENS.shape, TOKENS.shape[1]))
        return Decoder(policy).apply({"params": decoder}, tokens, position, memory)[0]

    assert states(cast).dtype == jnp.bfloat16
    np.testing.assert_array_equal(states(cast), states(decoder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ("query", "router")}, r"policy\.lora\.targets\.1 is 'router'; it must be 'query', 'key'"),
        ({"rank": 2, "targets": ()}, r"policy\.lora: targets is empty; adapters need at least one projection"),
    ],
)
def test_adapters_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        from_section(LoraConfig, "policy.lora", changes)

"""Every family computes the same on one device and on eight: logits, updates, sampled tokens."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from examples import POLICY, example, objective
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from schedules import MANY, Planned, all_ids, assert_exact

from agentr1_jax.agents.session import Identity
from agentr1_jax.learner.batch import batch_shapes
from agentr1_jax.learner.config import OptimizerConfig
from agentr1_jax.learner.optimizer import by_part, make_optimizer
from agentr1_jax.learner.update import init_state, make_update
from agentr1_jax.policy.attention import PackedRows, check_attention
from agentr1_jax.policy.config import RopeScaling
from agentr1_jax.policy.decoder import Decoder, head_kernel
from agentr1_jax.policy.params import cast_for_compute, init_params, split_layers
from agentr1_jax.policy.sharding import ROWS, gather, over_rows, row_specs, shardings
from agentr1_jax.rollout.cache import cache_shape
from agentr1_jax.rollout.config import EngineConfig, SamplingConfig
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.runner import TaskGroup, run_groups
from agentr1_jax.runtime.mesh import global_batch

STRETCHED = RopeScaling("llama3", factor=8.0, low_frequency=1.0, high_frequency=4.0, original_positions=32)
FAMILIES = {
    "qwen2.5": dataclasses.replace(POLICY, qkv_bias=True),
    "qwen3": dataclasses.replace(POLICY, qk_norm=True, head_dim=8, remat="dots"),
    "llama3": dataclasses.replace(POLICY, rope_scaling=STRETCHED, tied=False, remat="full"),
}
CASES = [(family, (2, 2, 2)) for family in FAMILIES] + [("qwen2.5", (2, 1, 4))]  # of 2 key heads, on 4 devices
LOSS = objective(clip="none")  # The example's ratios are of another policy, near no edge of a clip.
RATE = 1024.0
"""Learning rate: so large that the old parameters do not round the gradient away."""


@functools.cache
def parameters(family):
    """Random, with biases and a value head that are not 0."""
    shapes = jax.eval_shape(lambda: init_params(FAMILIES[family], jax.random.key(0), critic="shared_trunk"))
    rng = np.random.default_rng(0)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.asarray((path[-1].key == "scale") + 0.2 * rng.normal(size=x.shape), x.dtype), shapes
    )


@functools.cache
def logits(family, shape):
    policy, mesh = FAMILIES[family], tiny.mesh(*shape)
    tokens = np.random.default_rng(0).integers(0, policy.vocab_size, (8, 48)).astype(np.int32)

    def forward(params, tokens):
        position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        memory = PackedRows(jnp.full(tokens.shape, tokens.shape[1]), policy.attention, mesh)
        hidden, _ = Decoder(policy, mesh).apply({"params": params}, tokens, position, memory)
        head = head_kernel(params)
        return hidden @ gather(head, (policy.width, policy.vocab_size), head.dtype)

    params = parameters(family)["decoder"]
    by_rows = over_rows(forward, mesh, (row_specs(params, mesh), P(ROWS)), P(ROWS))
    params = jax.device_put(params, shardings(params, mesh))
    return np.asarray(jax.jit(by_rows)(params, jax.device_put(tokens, NamedSharding(mesh, P(ROWS)))))


@functools.cache
def step(family, shape):
    """The change of all parameters by one update, as one vector."""
    mesh = tiny.mesh(*shape)
    optimizer = by_part(optax.identity())
    old = parameters(family)
    state = init_state(jax.tree.map(jnp.copy, old), optimizer)
    layout = shardings(state, mesh)
    update = make_update(FAMILIES[family], LOSS, optimizer, layout)
    batch = global_batch(example().batch(microbatches=2, rows=8), mesh)
    rates = dict.fromkeys(old, np.float32(RATE))
    state, _ = update(jax.device_put(state, layout), {}, batch, np.int32(2), rates)
    change = jax.tree.map(lambda new, old: np.ravel(np.asarray(new, np.float64) - np.asarray(old)), state.params, old)
    return np.concatenate(jax.tree.leaves(change))


@pytest.mark.parametrize(("reduce_dtype", "error"), [(None, 1e-15), ("float32", 1e-6)])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_gradient_of_a_gathered_parameter_is_summed_in_the_dtype_asked_for(reduce_dtype, error, axis):
    """In two stages over eight devices, each of which has weights of its own."""
    mesh, rng = tiny.mesh(1, 8, 1), np.random.default_rng(0)
    shard = P(*(None,) * axis, "fsdp")

    def gradient(x, weights):
        return jax.grad(lambda x: jnp.sum(gather(x, (16, 16), x.dtype, reduce_dtype) * weights[0]))(x)

    with jax.enable_x64(True):
        x, weights = jnp.zeros((16, 16), jnp.float64), jnp.asarray(rng.normal(size=(8, 16, 16)))
        found = jax.jit(over_rows(gradient, mesh, (shard, P(ROWS)), shard))(x, weights)
        off = np.abs(np.asarray(found) - np.asarray(weights).sum(0)).max()
    assert off < 10 * error and (reduce_dtype is None or off > 1e-9)


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_logits_agree_on_one_and_on_eight_devices(family, shape):
    one, eight = logits(family, (1, 1, 1)), logits(family, shape)
    assert np.abs(one).max() > 0.5
    np.testing.assert_allclose(eight, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen2.5", (2, 1, 4)),
        pytest.param("qwen3", (2, 2, 2), marks=pytest.mark.slow),
        pytest.param("llama3", (2, 2, 2), marks=pytest.mark.slow),
    ],
)
def test_one_update_agrees_on_one_and_on_eight_devices(family, shape):
    one, eight = step(family, (1, 1, 1)), step(family, shape)
    assert np.linalg.norm(one) > 0.01
    assert np.linalg.norm(one - eight) <= 1e-5 * np.linalg.norm(one)


@functools.cache
def greedy(policy, shape, cache="slots", *, apart=False):
    """What an engine on such a mesh samples greedily for `MANY`, with layers in one stack or apart."""
    mesh = tiny.mesh(*shape)
    config = EngineConfig(
        slots=8,
        slot_tokens=128,
        swap_slots=8,
        decode_chunk=4,
        prefill_width=16,
        prefill_rows=(2,),
        attention_block=32,
        attention_group=1,
        cache=cache,
        page_tokens=16,
    )
    engine = Engine(policy, config, mesh)
    params = cast_for_compute(policy, tiny.decoder_params(policy))
    params = split_layers(params) if apart else params
    groups = [TaskGroup(row, [Identity(f"t/{i}", i, 0, "planned", 1000 + i)]) for i, row in enumerate(MANY)]
    params = jax.device_put(params, shardings(params, mesh))
    complete = run_groups(engine, params, Planned(), groups, sampling=SamplingConfig(0.0), policy_version=0)
    return sorted((t for group in complete for t in group), key=lambda t: t.group)


THREE_KEY_HEADS = dataclasses.replace(tiny.POLICY, heads=6, kv_heads=3, qk_norm=True, tied=False)


@pytest.mark.parametrize(
    ("policy", "shape", "cached"),
    [(tiny.POLICY, (2, 1, 4), 4), (THREE_KEY_HEADS, (4, 1, 2), 6)],
)
def test_greedy_tokens_agree_whether_heads_are_shared_by_devices_or_not(policy, shape, cached):
    assert cache_shape(policy, 8, 128, shape[2])[2] == cached, "each device holds the key heads of its query heads"
    spread = greedy(policy, shape)
    assert all_ids(spread) == all_ids(greedy(policy, (1, 1, 1)))
    assert all_ids(spread) == all_ids(greedy(policy, shape, cache="pages"))
    assert all_ids(spread) == all_ids(greedy(policy, shape, apart=True))
    assert_exact(spread, temperature=0.0, policy=policy)


@pytest.mark.slow
def test_the_program_of_an_update_does_not_grow_with_depth():
    """Layers are scanned, so 28 take as long to compile as 4."""

    def instructions(layers):
        policy = dataclasses.replace(FAMILIES["qwen2.5"], layers=layers, remat="full")
        optimizer = make_optimizer(OptimizerConfig(weight_decay=0.1))
        state = jax.eval_shape(lambda: init_state(init_params(policy, jax.random.key(0)), optimizer))
        update = make_update(policy, LOSS, optimizer, shardings(state, tiny.mesh()))
        batch = batch_shapes(microbatches=2, rows=4, row_tokens=64, row_loss_tokens=32)
        program = update.lower(state, {}, batch, np.int32(1), {"decoder": np.float32(1)}).compile()
        return program.as_text().count(" = ")

    assert instructions(28) <= 1.05 * instructions(4)


def test_attention_that_the_devices_do_not_have_is_refused():
    told = "attention=splash needs a TPU, and the devices here are of platform 'cpu'.*attention=xla works everywhere"
    with pytest.raises(ValueError, match=told):
        check_attention(dataclasses.replace(POLICY, attention="splash"), tiny.mesh(), 256, "trajectory")
    check_attention(POLICY, tiny.mesh(), 256, "trajectory")

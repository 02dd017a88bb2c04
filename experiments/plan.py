"""Plan of a run: the shapes of all it would hold and the programs it would compile; nothing is allocated."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh, NamedSharding

from agentr1_jax.learner.batch import CRITIC_FIELDS, batch_shapes
from agentr1_jax.learner.ratios import MINIBATCH_RATIOS
from agentr1_jax.learner.update import make_log_ratio, make_token_outputs, make_update
from agentr1_jax.policy.config import DecoderConfig, LoraConfig
from agentr1_jax.policy.params import cast_for_compute, init_decoder
from agentr1_jax.policy.presets import PRESETS
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.rollout.cache import cache_sharding, empty_cache
from agentr1_jax.rollout.device import COPIES_PER_CALL
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.programs import encode_updates, idle_slot_state
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.checkpoint import sharded_shapes
from experiments import build, checks, tasks, topology


@dataclasses.dataclass(frozen=True)
class Plan:
    """Parts of a run; the leaves of every tree are `jax.ShapeDtypeStruct`s with shardings.

    Attributes:
      config: config of the run.
      policy: shape of the decoder.
      learner_mesh: mesh of the learner, over all devices.
      engine: rollout engine of one process, which has allocated nothing.
      rollout_mesh: mesh of the engine.
      optimizer, layout: optimizer of the update, and the shardings of its state.
      state: state of the learner.
      frozen: parameters that LoRA does not train.
      view: parameters of the engine.
      cache: KV cache of the engine.
    """

    config: ml_collections.ConfigDict
    policy: DecoderConfig
    learner_mesh: Mesh
    engine: Engine
    rollout_mesh: Mesh
    optimizer: Any
    layout: Any
    state: Any
    frozen: Any
    view: Any
    cache: Any


@dataclasses.dataclass(frozen=True)
class Program:
    """Program that the run compiles.

    Attributes:
      name: what it computes.
      shape: its shapes, for people.
      lower: function that traces it; None for small programs, which nobody needs to compile ahead of the run.
    """

    name: str
    shape: str
    lower: Callable[[], Any] | None = None


def make_plan(config: ml_collections.ConfigDict, topology_name: str = "") -> Plan:
    """Return the shapes of a run on the devices of this machine, or on those of a TPU slice.

    If the policy's shape leaves the size of the vocabulary open, the tokenizer is trained in a temporary folder;
    otherwise neither tokenizer nor data are read.

    Args:
      config: config of the run.
      topology_name: TPU slice such as `v5e:4x4`; empty for the devices of this machine.

    Raises:
      UserError: the config cannot work, or the slice is unknown.
    """
    devices = topology.devices(topology_name) if topology_name else jax.devices()
    checks.check(config, devices)
    policy = _policy(config)
    learner_mesh = build.learner_mesh(config, devices)
    checks.check_attention(config, policy, learner_mesh, call=False)
    if topology_name:
        host = topology.first_host(topology_name, devices)
        _, rollout_devices = meshes.split_devices(host, config.mesh.rollout_devices)
        rollout_mesh = meshes.rollout_mesh(rollout_devices, config.rollout.tensor)
    else:
        rollout_mesh = build.rollout_mesh(config)
    _, _, (optimizer, state, layout) = build.learner_state(config, policy, learner_mesh)
    frozen = {}
    if policy.lora.rank:
        base = functools.partial(init_decoder, dataclasses.replace(policy, lora=LoraConfig()))
        frozen = _with_shardings({"decoder": jax.eval_shape(base, jax.random.key(0))}, learner_mesh)
    view = jax.eval_shape(functools.partial(build.rollout_params, policy), state.params, frozen)
    engine = build.engine(config, policy, rollout_mesh)
    c, tensor = engine.config, config.rollout.tensor
    cache = jax.eval_shape(
        functools.partial(empty_cache, policy, c.kv_slots(rollout_mesh.shape["data"]), c.slot_tokens, tensor)
    )
    return Plan(
        config=config,
        policy=policy,
        learner_mesh=learner_mesh,
        engine=engine,
        rollout_mesh=rollout_mesh,
        optimizer=optimizer,
        layout=layout,
        state=state,
        frozen=frozen,
        view=_with_shardings(view, rollout_mesh),
        cache=_with_sharding(cache, cache_sharding(policy, rollout_mesh)),
    )


def _policy(config: ml_collections.ConfigDict) -> DecoderConfig:
    """Return the decoder's shape, without downloading weights of a known shape."""
    known = _preset_of(config.policy.weights)
    if known and not config.policy.preset:
        with ml_collections.ConfigDict(config).unlocked() as config:
            config.policy.update(weights="", preset=known)
    preset = PRESETS.get(config.policy.preset)
    if preset is None or preset.vocab_size:
        return build.policy(config, None)
    with tempfile.TemporaryDirectory() as folder, ml_collections.ConfigDict(config).unlocked() as elsewhere:
        elsewhere.run_dir = folder
        task: Any = None if config.tokenizer.path else tasks.make_task(config)  # Only needed to train a tokenizer on.
        return build.policy(config, build.tokenizer(elsewhere, task, resumes=False))


def _preset_of(weights: str) -> str:
    """Return the preset with the shape of weights on the hub, judged by their name; "" if there is none."""
    if not weights or os.path.isdir(os.path.expanduser(weights)):
        return ""
    name = weights.rpartition("/")[2].lower()
    return next((preset for preset in PRESETS if name == preset or name.startswith(f"{preset}-")), "")


def _with_shardings(shapes: Any, mesh: Mesh) -> Any:
    return sharded_shapes(shapes, shardings(shapes, mesh))


def _with_sharding(shapes: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def device_bytes(tree: Any) -> int:
    """Return the bytes that one device holds of a tree of shape structs with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def total_bytes(tree: Any) -> int:
    """Return the bytes of a tree; replicated arrays count once."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def activation_bytes(plan: Plan) -> int:
    """Estimate the bytes per device that the backward pass of one microbatch holds.

    They are the activations of every layer that `remat` saves, all activations of one layer while its gradient is
    computed, one chunk of logits, and the output head with its gradient, both sharded over `tensor` alone.
    """
    p, c, mesh = plan.policy, plan.config.learner, plan.learner_mesh.shape
    tensor, rows = mesh["tensor"], -(-c.rows // (mesh["data"] * mesh["fsdp"]))
    tokens, size = rows * c.row_tokens, jnp.dtype(p.dtype).itemsize
    stream = tokens * p.width * size
    matmuls = tokens * size * ((p.heads + 2 * p.kv_heads) * p.head_dim + 2 * p.hidden) // tensor + 2 * stream
    scores = 2 * 4 * rows * c.row_tokens**2 * p.heads // tensor if p.attention == "dense" else 0
    layer = matmuls + tokens * size * (p.heads * p.head_dim + p.hidden) // tensor + 2 * stream + scores
    saved = {"full": stream, "dots": stream + matmuls, "none": layer}[p.remat]
    logits = 3 * 4 * max(plan.config.loss.chunk // c.rows, 1) * rows * p.vocab_size // tensor
    head = (size + 3 * 4) * p.vocab_size * p.width // tensor
    trunks = 2 if "critic" in plan.state.params else 1
    return trunks * p.layers * saved + layer + logits + head


def programs(plan: Plan) -> Iterator[Program]:
    """Yield every program of the run, in the order in which the run compiles them."""
    config = plan.config
    if plan.frozen and not config.policy.weights:
        yield Program("frozen parameters", "random, on the learner mesh")
    if plan.frozen or not config.policy.weights:
        yield Program("parameters", "random, on the learner mesh")
    yield Program("learner state", "made of them")
    yield Program("rollout view", "parameters from learner mesh to rollout mesh")
    yield from _engine_programs(plan)
    yield from _supervised_programs(plan)
    if not config.control:
        yield from _rl_programs(plan)


def _supervised_programs(plan: Plan) -> Iterator[Program]:
    """Yield the programs of pretraining and warm start."""
    config, p = plan.config, plan.config.pretrain
    if config.pretrain.updates and not config.warm_start.init_from:
        shape = f"{-(-p.batch // p.rows)} x {p.rows} rows x {p.row_tokens} tokens, all of them trained"
        yield Program("update (pretraining)", shape)
        yield Program("learner state, restarted", "a new optimizer for the warm start")
    if (config.warm_start.updates and not config.warm_start.init_from) or config.control:
        yield Program("update (warm start)", _batch(plan, config.warm_start.batch, ())[1])
        yield Program("learner state, restarted", "a new optimizer for RL")


def _rl_programs(plan: Plan) -> Iterator[Program]:
    """Yield the programs of reinforcement learning: reference, token outputs, credit, log ratio, update."""
    config, policy, mesh = plan.config, plan.policy, plan.learner_mesh
    objective, has_kl = build.objective(config), config.kl.kind != "none"
    minibatch = config.rollout.groups * config.rollout.samples // config.learner.minibatches
    params, count = plan.state.params, np.int32(1)
    reference = None
    if has_kl:
        cast = jax.eval_shape(functools.partial(cast_for_compute, policy), params["decoder"])
        reference = _with_shardings(cast, mesh)
        yield Program("reference", "a copy of the policy, on the learner mesh")
    batch, shape = _batch(plan, minibatch, ())
    recomputed = config.learner.old_logprobs == "learner"
    if build.learns_values(config) or has_kl or recomputed or build.learner_config(config).observations:
        token_outputs: Any = make_token_outputs(policy, objective, mesh)
        lower = functools.partial(token_outputs.lower, params, plan.frozen, reference, batch, count)
        yield Program("token outputs", shape, lower)
    room = ", ".join(f"{n} {unit}" for unit, n in build.credit_room(config).items())
    yield Program("credit", f"{config.credit.name}: {room}")
    present = (
        *(CRITIC_FIELDS if build.learns_values(config) else ()),
        *["ref_logprob"] * (objective.kl_in_loss != "none"),
        *["correction_weight"] * (config.correction.kind != "none"),
    )
    batch, shape = _batch(plan, minibatch, present)
    if objective.loss.ratio in MINIBATCH_RATIOS:
        log_ratio: Any = make_log_ratio(policy, objective, mesh)
        yield Program("log ratio", shape, functools.partial(log_ratio.lower, params, plan.frozen, batch, count))
        batch, shape = _batch(plan, minibatch, (*present, "log_ratio"))
    update: Any = make_update(policy, objective, plan.optimizer, plan.layout)
    rates = dict.fromkeys(params, np.float32(0))
    yield Program("update (RL)", shape, functools.partial(update.lower, plan.state, plan.frozen, batch, count, rates))


def _batch(plan: Plan, trajectories: int, present: tuple[str, ...]) -> tuple[Any, str]:
    """Return the batch of an update on the learner's mesh, and its shape for people.

    Args:
      plan: plan of the run.
      trajectories: number of trajectories of the update.
      present: optional fields of the loss tokens that the batch has.
    """
    c, microbatches = plan.config.learner, build.microbatches(plan.config, trajectories)
    shapes = batch_shapes(
        microbatches=microbatches,
        rows=c.rows,
        row_tokens=c.row_tokens,
        row_loss_tokens=c.row_loss_tokens,
        present=present,
    )
    batch = _with_sharding(shapes, NamedSharding(plan.learner_mesh, meshes.ROWS))
    return batch, f"{microbatches} x {c.rows} rows x {c.row_tokens} tokens, {c.row_loss_tokens} loss tokens"


def _engine_programs(plan: Plan) -> Iterator[Program]:
    """Yield the programs of the rollout engine."""
    c, shards = plan.engine.config, plan.rollout_mesh.shape["data"]
    run: Any = plan.engine.device.programs
    slots = idle_slot_state(c)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    yield Program(
        "empty cache", f"{c.kv_slots(shards)} KV slots x {c.slot_tokens} tokens: {c.slots} decode, {c.swap_slots} swap"
    )
    for rows in c.prefill_rows:
        tokens, starts = ints((shards * rows, c.prefill_width)), ints((shards * rows,))
        prefill = functools.partial(run.prefill.lower, plan.view, plan.cache, tokens, starts, starts)
        largest = rows == c.prefill_rows[-1]
        yield Program(
            f"prefill {rows}", f"{shards * rows} rows x {c.prefill_width} tokens", prefill if largest else None
        )
    updates = encode_updates(slots, np.zeros(c.slots, bool))
    decode = functools.partial(run.decode.lower, plan.view, plan.cache, slots, updates, ints((shards,)))
    yield Program("decode", f"{c.slots} slots x {c.decode_chunk} tokens", decode)
    copies = ints((shards * COPIES_PER_CALL,))
    copy = functools.partial(run.copy.lower, plan.cache, copies, copies, ints((shards,)))
    yield Program("copy", f"{shards * COPIES_PER_CALL} KV slots", copy)

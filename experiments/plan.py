"""A run as shapes: what it would hold, and the programs it would compile, without holding or compiling anything."""

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
from agentr1_jax.learner.config import Objective
from agentr1_jax.learner.ratios import MINIBATCH_RATIOS
from agentr1_jax.learner.update import make_log_ratio, make_token_outputs, make_update
from agentr1_jax.policy.config import DecoderConfig, LoraConfig
from agentr1_jax.policy.params import cast_for_compute, init_decoder
from agentr1_jax.policy.presets import PRESETS
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.rollout.cache import cache_sharding, empty_cache
from agentr1_jax.rollout.device import MOVES
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.slots import idle_slots, to_words
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.checkpoint import sharded_shapes
from experiments import build, checks, tasks, topology


@dataclasses.dataclass(frozen=True)
class Plan:
    """The parts of a run: every tree holds `jax.ShapeDtypeStruct`s with shardings.

    Attributes:
      config: of the run.
      policy: its decoder.
      learner_mesh: over all devices.
      engine: that of one process, or of those that share it; it has allocated nothing.
      rollout_mesh: the engine's.
      optimizer, layout: of the update.
      state: the learner's.
      frozen: parameters that LoRA does not train.
      view: the engine's parameters.
      cache: the engine's.
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
    """A program that the run compiles; `lower` traces it, None for those too small to look at."""

    name: str
    shape: str
    lower: Callable[[], Any] | None = None


def make_plan(config: ml_collections.ConfigDict, topology_name: str = "") -> Plan:
    """The shapes of a run on the devices here, or on those of a TPU slice.

    A vocabulary that the shape of the policy leaves open is learnt by training the tokenizer in a temporary folder;
    otherwise no tokenizer and no data are looked at.
    """
    devices = topology.devices(topology_name) if topology_name else jax.devices()
    checks.check(config, devices)
    policy = _policy(config)
    learner_mesh = build.learner_mesh(config, devices)
    checks.check_attention(config, policy, learner_mesh, call=False)
    if topology_name:
        host = topology.first_host(topology_name, devices)
        _, rolling = meshes.split_devices(host, config.mesh.rollout_devices)
        rollout_mesh = meshes.rollout_mesh(rolling, config.rollout.tensor)
    else:
        rollout_mesh = build.rollout_mesh(config)
    _, _, (optimizer, state, layout) = build.learner_state(config, policy, learner_mesh)
    frozen = {}
    if policy.lora.rank:
        base = functools.partial(init_decoder, dataclasses.replace(policy, lora=LoraConfig()))
        frozen = _laid_out({"decoder": jax.eval_shape(base, jax.random.key(0))}, learner_mesh)
    view = jax.eval_shape(functools.partial(build.rollout_params, policy), state.params, frozen)
    engine = build.engine(config, policy, rollout_mesh)
    c, tensor = engine.config, config.rollout.tensor
    cache = jax.eval_shape(
        functools.partial(empty_cache, policy, c.lines(rollout_mesh.shape["data"]), c.length, tensor)
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
        view=_laid_out(view, rollout_mesh),
        cache=_all_as(cache, cache_sharding(policy, rollout_mesh)),
    )


def _policy(config: ml_collections.ConfigDict) -> DecoderConfig:
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
    """The preset by which weights of the hub are called, so that nobody has to ask for them; "" where there is none."""
    if not weights or os.path.isdir(os.path.expanduser(weights)):
        return ""
    name = weights.rpartition("/")[2].lower()
    return next((preset for preset in PRESETS if name == preset or name.startswith(f"{preset}-")), "")


def _laid_out(shapes: Any, mesh: Mesh) -> Any:
    return sharded_shapes(shapes, shardings(shapes, mesh))


def _all_as(shapes: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def device_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of shape structs with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def total_bytes(tree: Any) -> int:
    """Bytes of a tree, each array counted once."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def activation_bytes(plan: Plan) -> int:
    """Estimate of what the backward pass of one microbatch keeps, per device.

    What `remat` keeps of every layer, all of one layer while its gradient is taken, one chunk of logits, and the output
    head with its gradient, both whole but for `tensor`.
    """
    p, c, mesh = plan.policy, plan.config.learner, plan.learner_mesh.shape
    tensor, rows = mesh["tensor"], -(-c.rows // (mesh["data"] * mesh["fsdp"]))
    tokens, size = rows * c.row_tokens, jnp.dtype(p.dtype).itemsize
    stream = tokens * p.width * size
    matmuls = tokens * size * ((p.heads + 2 * p.kv_heads) * p.head_dim + 2 * p.hidden) // tensor + 2 * stream
    scores = 2 * 4 * rows * c.row_tokens**2 * p.heads // tensor if p.attention == "dense" else 0
    layer = matmuls + tokens * size * (p.heads * p.head_dim + p.hidden) // tensor + 2 * stream + scores
    kept = {"full": stream, "dots": stream + matmuls, "none": layer}[p.remat]
    logits = 3 * 4 * max(plan.config.loss.chunk // c.rows, 1) * rows * p.vocab_size // tensor
    head = (size + 3 * 4) * p.vocab_size * p.width // tensor
    trunks = 2 if "critic" in plan.state.params else 1
    return trunks * p.layers * kept + layer + logits + head


def programs(plan: Plan) -> Iterator[Program]:
    """Every program of the run, in the order in which it compiles them."""
    config, policy, mesh = plan.config, plan.policy, plan.learner_mesh
    if plan.frozen and not config.policy.weights:
        yield Program("frozen parameters", "random, on the learner mesh")
    if plan.frozen or not config.policy.weights:
        yield Program("parameters", "random, on the learner mesh")
    yield Program("learner state", "made of them")
    yield Program("rollout view", "parameters from learner mesh to rollout mesh")
    yield from _engine_programs(plan)
    rates = dict.fromkeys(plan.state.params, np.float32(0))
    objective, has_kl = build.objective(config), config.kl.kind != "none"
    recomputed, needs_pass = config.learner.old_logprobs == "learner", objective.loss.ratio in MINIBATCH_RATIOS
    c, per_minibatch = config.learner, config.rollout.groups * config.rollout.samples // config.learner.minibatches
    present: tuple[str, ...] = CRITIC_FIELDS if build.learns_values(config) else ()
    present += (
        *["ref_logprob"] * (objective.kl_in_loss != "none"),
        *["correction_weight"] * (config.correction.kind != "none"),
    )

    def pretraining() -> str:
        p = config.pretrain
        return f"{-(-p.batch // p.rows)} x {p.rows} rows x {p.row_tokens} tokens, all of them trained"

    def phase(trajectories: int, present: tuple[str, ...]) -> tuple[Any, str]:
        """The batch of a phase, on the mesh, and its shape in words."""
        n = build.microbatches(config, trajectories)
        shapes = batch_shapes(
            microbatches=n, rows=c.rows, row_tokens=c.row_tokens, row_loss_tokens=c.row_loss_tokens, present=present
        )
        batch = _all_as(shapes, NamedSharding(mesh, meshes.ROWS))
        return batch, f"{n} x {c.rows} rows x {c.row_tokens} tokens, {c.row_loss_tokens} loss tokens"

    def update(objective: Objective, trajectories: int, present: tuple[str, ...]) -> tuple[str, Callable[[], Any]]:
        program: Any = make_update(policy, objective, plan.optimizer, plan.layout)
        batch, shape = phase(trajectories, present)
        return shape, lambda: program.lower(plan.state, plan.frozen, batch, np.int32(1), rates)

    if config.pretrain.updates and not config.warm_start.run:
        yield Program("update (pretraining)", pretraining())
        yield Program("learner state, restarted", "a new optimizer for the warm start")
    if (config.warm_start_updates and not config.warm_start.run) or config.control:
        yield Program("update (warm start)", update(objective.imitation(), config.warm_start.batch, ())[0])
        yield Program("learner state, restarted", "a new optimizer for RL")
    if config.control:
        return
    reference = None
    if has_kl:
        cast = jax.eval_shape(functools.partial(cast_for_compute, policy), plan.state.params["decoder"])
        reference = _laid_out(cast, mesh)
        yield Program("reference", "a copy of the policy, on the learner mesh")
    batch, shape = phase(per_minibatch, ())
    if build.learns_values(config) or has_kl or recomputed or build.learner_config(config).observations:
        token_outputs: Any = make_token_outputs(policy, objective, mesh)
        arguments = (plan.state.params, plan.frozen, reference, batch, np.int32(1))
        yield Program("token outputs", shape, lambda: token_outputs.lower(*arguments))
    room = ", ".join(f"{n} {what}" for what, n in build.credit_room(config).items())
    yield Program("credit", f"{config.credit.name}: {room}")
    if needs_pass:
        log_ratio: Any = make_log_ratio(policy, objective, mesh)
        filled, _ = phase(per_minibatch, present)
        once = (plan.state.params, plan.frozen, filled, np.int32(1))
        yield Program("log ratio", shape, lambda: log_ratio.lower(*once))
        present += ("log_ratio",)
    yield Program("update (RL)", *update(objective, per_minibatch, present))


def _engine_programs(plan: Plan) -> Iterator[Program]:
    c, shards = plan.engine.config, plan.rollout_mesh.shape["data"]
    run: Any = plan.engine.device.executor.programs
    slots = idle_slots(c)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    yield Program("empty cache", f"{c.lines(shards)} lines x {c.length} tokens: {c.slots} slots, {c.parking} parked")
    for rows in c.prefill_rows:
        tokens, lines = ints((shards * rows, c.prefill_width)), ints((shards * rows,))
        prefill = functools.partial(run.prefill.lower, plan.view, plan.cache, tokens, lines, lines)
        largest = rows == c.prefill_rows[-1]
        yield Program(
            f"prefill {rows}", f"{shards * rows} rows x {c.prefill_width} tokens", prefill if largest else None
        )
    words = to_words(slots, np.zeros(c.slots, bool))
    decode = functools.partial(run.decode.lower, plan.view, plan.cache, slots, words, ints((shards,)))
    yield Program("decode", f"{c.slots} slots x {c.decode_chunk} tokens", decode)
    moves = ints((shards * MOVES,))
    copy = functools.partial(run.copy.lower, plan.cache, moves, moves, ints((shards,)))
    yield Program("copy", f"{shards * MOVES} lines", copy)

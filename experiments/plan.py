"""Plan of a run: the shapes of all it would hold and the programs it would compile; nothing is allocated."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from agentr1_jax.errors import UserError
from agentr1_jax.learner.batch import CRITIC_FIELDS, batch_shapes
from agentr1_jax.learner.config import PackingConfig
from agentr1_jax.policy.config import DecoderConfig, LoraConfig
from agentr1_jax.policy.params import cast_for_compute, init_decoder
from agentr1_jax.policy.presets import PRESETS
from agentr1_jax.policy.sharding import engine_formats, shardings
from agentr1_jax.rollout.device import COPIES_PER_CALL
from agentr1_jax.rollout.programs import cache_maker, encode_updates, idle_slot_state
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.checkpoint import sharded_shapes
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build, phases
from agentr1_jax.train.build import Setup
from agentr1_jax.train.phases import Phase
from agentr1_jax.train.settings import Settings
from experiments import topology
from experiments.checks import check_attention, check_placement
from experiments.setup import make_task


@dataclasses.dataclass(frozen=True)
class Plan:
    """Parts of a run; the leaves of every tree are `jax.ShapeDtypeStruct`s with shardings.

    Attributes:
      setup: what the phases are made from: without task, tokenizer and agent; its engine has allocated nothing.
      rollout_mesh: mesh of the engine.
      phases: phases of the run, in order.
      state: state of the learner.
      rollout_params: parameters of the engine.
      cache: KV cache of the engine.
    """

    setup: Setup
    rollout_mesh: Mesh
    phases: list[Phase]
    state: Any
    rollout_params: Any
    cache: Any


@dataclasses.dataclass(frozen=True)
class Program:
    """Program that the run compiles: its name, its shapes for people, and the function that traces it.

    None stands for a program that nobody needs to compile ahead of the run.
    """

    name: str
    shape: str
    lower: Callable[[], Any] | None = None


def make_plan(settings: Settings, topology_name: str = "") -> Plan:
    """Return the shapes of a run on the devices of this machine, or on those of a TPU slice.

    If the policy's shape leaves the size of the vocabulary open, the tokenizer is trained in a temporary folder;
    otherwise neither tokenizer nor data are read.

    Args:
      settings: settings of the run.
      topology_name: TPU slice such as `v5e:4x4`; empty for the devices of this machine.

    Raises:
      UserError: the settings do not fit the devices, or the slice is unknown.
    """
    devices = topology.devices(topology_name) if topology_name else jax.devices()
    check_placement(settings, devices)
    policy = _make_policy(settings)
    learner_mesh = build.make_learner_mesh(settings, devices)
    check_attention(settings, policy, learner_mesh, run=False)
    if topology_name:
        host = topology.first_host(topology_name, devices)
        _, rollout_devices = meshes.split_devices(host, settings.mesh.rollout_devices)
        rollout_mesh = meshes.rollout_mesh(rollout_devices, settings.rollout.tensor)
    else:
        rollout_mesh = build.make_rollout_mesh(settings)
    builder = build.make_state_builder(settings, policy, learner_mesh)
    frozen = {}
    if policy.lora.rank:
        base = functools.partial(init_decoder, dataclasses.replace(policy, lora=LoraConfig()))
        frozen = _with_shardings({"decoder": jax.eval_shape(base, jax.random.key(0))}, learner_mesh)
    of_engine = functools.partial(build.rollout_params, policy, rollout_mesh.devices.flat[0].platform)
    rollout_params = jax.eval_shape(of_engine, builder.shapes.params, frozen)
    empty_cache, cache_shardings = cache_maker(policy, settings.engine, rollout_mesh)
    nothing: Any = None
    setup = Setup(
        settings=settings,
        task=nothing,
        tokenizer=nothing,
        agent=nothing,
        policy=policy,
        frozen=frozen,
        learner_mesh=learner_mesh,
        engine=build.make_engine(settings, policy, rollout_mesh),
        rollout_params=nothing,
        tool_metrics=ToolMetrics(),
    )
    return Plan(
        setup=setup,
        rollout_mesh=rollout_mesh,
        phases=_make_phases(setup, builder),
        state=builder.shapes,
        rollout_params=sharded_shapes(rollout_params, engine_formats(rollout_params, rollout_mesh)),
        cache=jax.tree.map(_with_sharding, jax.eval_shape(empty_cache), cache_shardings),
    )


def _make_phases(setup: Setup, builder: build.StateBuilder) -> list[Phase]:
    """Return the phases of a run that take updates, in order."""
    settings, made = setup.settings, []
    if settings.pretrain.updates and not settings.warm_start.init_from:
        made.append(phases.pretraining(setup, builder.optimizer, builder.layout))
    if settings.imitates:
        made.append(phases.warm_start(setup, builder.optimizer, builder.layout))
    if settings.run.updates and not settings.warm_start.control_seconds:
        reference = None
        if settings.needs_reference:
            cast = functools.partial(cast_for_compute, setup.policy)
            reference = _with_shardings(jax.eval_shape(cast, builder.shapes.params["decoder"]), setup.learner_mesh)
        made.append(phases.reinforcement(setup, builder.optimizer, builder.layout, reference))
    return made


def describe_cost(settings: Settings, devices: int, speeds: Sequence[float] = ()) -> str:
    """Return how long RL takes at most, and the devices x hours of it, as text.

    Args:
      settings: settings of the run.
      devices: number of devices.
      speeds: tokens decoded and learned per second, as the progress line of a run gives them; empty if unknown.
    """
    budget, c, n = settings.budget, settings.learner, settings.batch_trajectories
    decoded = n * min(budget.trajectory_tokens, settings.most_steps * settings.most_response_tokens)
    learned = settings.microbatches(n // c.minibatches) * c.rows * c.row_tokens * c.minibatches * c.epochs
    tokens = f"at most {settings.run.updates} updates of {decoded:,} tokens decoded and {learned:,} learned"
    if not speeds:
        return f"{tokens}; no speed is known: --tokens_per_second=DECODED,LEARNED, off the progress line of a short run"
    hours = settings.run.updates * (decoded / speeds[0] + learned / speeds[1]) / 3600
    return f"{tokens}: {hours:,.1f} hours x {devices} devices = {hours * devices:,.0f} device hours, evaluations aside"


def parse_speeds(texts: Sequence[str]) -> list[float]:
    """Parse the two numbers of `--tokens_per_second`. Raises UserError if there are not two positive ones, or none."""
    try:
        speeds = [float(text) for text in texts]
    except ValueError:
        speeds = [math.nan]
    if texts and not (len(speeds) == 2 and all(0 < speed < math.inf for speed in speeds)):
        raise UserError(f"--tokens_per_second={','.join(texts)}: write DECODED,LEARNED, two positive numbers")
    return speeds


def _make_policy(settings: Settings) -> DecoderConfig:
    """Return the decoder's shape, without downloading weights of a known shape."""
    known = preset_of_weights(settings.policy.weights)
    if known and not settings.policy.preset:
        settings = dataclasses.replace(settings, policy=dataclasses.replace(settings.policy, weights="", preset=known))
    preset = PRESETS.get(settings.policy.preset)
    if preset is None or preset.vocab_size:
        return build.make_policy(settings, None)
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = dataclasses.replace(settings, run=dataclasses.replace(settings.run, run_dir=folder))
        task = None if settings.tokenizer.path else make_task(settings, ToolMetrics())  # Source of its texts.
        return build.make_policy(settings, build.make_tokenizer(elsewhere, task, resumes=False))


def preset_of_weights(weights: str) -> str:
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
    p, c, mesh = plan.setup.policy, plan.setup.settings.learner, plan.setup.learner_mesh.shape
    tensor, rows = mesh["tensor"], -(-c.rows // (mesh["data"] * mesh["fsdp"]))
    tokens, size = rows * c.row_tokens, jnp.dtype(p.dtype).itemsize
    stream = tokens * p.width * size
    matmuls = tokens * size * ((p.heads + 2 * p.kv_heads) * p.head_dim + 2 * p.hidden) // tensor + 2 * stream
    scores = 2 * 4 * rows * c.row_tokens**2 * p.heads // tensor if p.attention == "dense" else 0
    layer = matmuls + tokens * size * (p.heads * p.head_dim + p.hidden) // tensor + 2 * stream + scores
    saved = {"full": stream, "dots": stream + matmuls, "none": layer}[p.remat]
    logits = 3 * 4 * min(plan.setup.settings.loss.chunk, rows * c.row_loss_tokens) * p.vocab_size // tensor
    head = (size + 3 * 4) * p.vocab_size * p.width // tensor
    trunks = 2 if "critic" in plan.state.params else 1
    return trunks * p.layers * saved + layer + logits + head


def programs(plan: Plan) -> Iterator[Program]:
    """Yield every program of the run, in the order in which the run compiles them."""
    weights = plan.setup.settings.policy.weights
    if plan.setup.frozen and not weights:
        yield Program("frozen parameters", "random, on the learner mesh")
    if plan.setup.frozen or not weights:
        yield Program("parameters", "random, on the learner mesh")
    yield Program("learner state", "made of them")
    yield Program("rollout parameters", "from learner mesh to rollout mesh, in compute dtype")
    yield from _engine_programs(plan)
    by_name = {phase.name: phase for phase in plan.phases}
    if phase := by_name.get("pretraining"):
        yield Program("update (pretraining)", _rows(phase))
    yield Program("learner state, restarted", "a new optimizer for the next phase")
    if phase := by_name.get("warm_start"):
        yield Program("update (warm start)", _rows(phase))
    if phase := by_name.get("rl"):
        yield from _rl_programs(plan, phase)


def _rl_programs(plan: Plan, phase: Phase) -> Iterator[Program]:
    """Yield the programs of reinforcement learning: reference, token outputs, credit, log ratio, update."""
    settings, params, used = plan.setup.settings, plan.state.params, np.int32(1)
    update: Any = phase.update
    token_outputs: Any = phase.token_outputs
    log_ratio: Any = phase.log_ratio
    if phase.reference is not None:
        yield Program("reference", "a copy of the policy, on the learner mesh")
    if token_outputs is not None:
        rows = phase.outputs_packing or phase.packing
        trained, reference = (params, phase.reference) if phase.reads_policy else ({"decoder": phase.reference}, None)
        arguments = (trained, plan.setup.frozen, reference, _batch(plan, phase, (), rows), used)
        yield Program("token outputs", _rows(phase, rows), functools.partial(token_outputs.lower, *arguments))
    sizes = ", ".join(f"{n} {unit}" for unit, n in settings.batch_capacity.items())
    yield Program("credit", f"{settings.credit.name}: {sizes}")
    optional = (
        *(CRITIC_FIELDS if phase.critic else ()),
        *["ref_logprob"] * (settings.objective.kl_in_loss != "none"),
        *["correction_weight"] * (settings.correction.kind != "none"),
    )
    batch = _batch(plan, phase, optional)
    if log_ratio is not None:
        lower = functools.partial(log_ratio.lower, params, plan.setup.frozen, batch, used)
        yield Program("log ratio", _rows(phase), lower)
        batch = _batch(plan, phase, (*optional, "log_ratio"))
    rates = dict.fromkeys(params, np.float32(0))
    lower = functools.partial(update.lower, plan.state, plan.setup.frozen, batch, used, rates)
    yield Program("update (RL)", _rows(phase), lower)


def _batch(plan: Plan, phase: Phase, optional: tuple[str, ...], packing: PackingConfig | None = None) -> Any:
    """Return the batch of an update, or of another layout, on the learner's mesh, with these optional fields."""
    c = packing or phase.packing
    shapes = batch_shapes(
        microbatches=phase.microbatches,
        rows=c.rows,
        row_tokens=c.row_tokens,
        row_loss_tokens=c.row_loss_tokens,
        present=optional,
    )
    return _with_sharding(shapes, NamedSharding(plan.setup.learner_mesh, meshes.ROWS))


def _rows(phase: Phase, packing: PackingConfig | None = None) -> str:
    """Return the shape of a phase's batches, for people."""
    c = packing or phase.packing
    return f"{phase.microbatches} x {c.rows} rows x {c.row_tokens} tokens, {c.row_loss_tokens} loss tokens"


def _engine_programs(plan: Plan) -> Iterator[Program]:
    """Yield the programs of the rollout engine."""
    c, shards = plan.setup.settings.engine, plan.rollout_mesh.shape["data"]
    run: Any = plan.setup.engine.device.programs
    slots = idle_slot_state(c)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    shape = f"{c.kv_slots(shards)} KV slots x {c.slot_tokens} tokens: {c.slots} decode, {c.swap_slots} swap"
    if c.cache == "pages":
        shape = f"{c.page_count(shards)} pages x {c.page_tokens} tokens"
    yield Program("empty cache", shape)
    for rows in c.prefill_rows:
        tokens, starts = ints((shards * rows, c.prefill_width)), ints((shards * rows,))
        prefill = functools.partial(run.prefill.lower, plan.rollout_params, plan.cache, tokens, starts, starts)
        largest = rows == c.prefill_rows[-1]
        yield Program(
            f"prefill {rows}", f"{shards * rows} rows x {c.prefill_width} tokens", prefill if largest else None
        )
    updates = encode_updates(slots, np.zeros(c.slots, bool))
    decode = functools.partial(run.decode.lower, plan.rollout_params, plan.cache, slots, updates, ints((shards,)))
    yield Program("decode", f"{c.slots} slots x {c.decode_chunk} tokens", decode)
    if c.cache == "pages":
        return
    copies = ints((shards * COPIES_PER_CALL,))
    copy = functools.partial(run.copy.lower, plan.cache, copies, copies, ints((shards,)))
    yield Program("copy", f"{shards * COPIES_PER_CALL} KV slots", copy)

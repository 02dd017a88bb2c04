"""From config to the parts of a run: tokenizer, agent, policy, engine, learner; shared by all experiments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from jax.sharding import Mesh

from agentr1_jax import files
from agentr1_jax.agents.context import context_rule
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Identity
from agentr1_jax.credit import CreditConfig, Scheme, ShapingConfig
from agentr1_jax.envs.base import Task
from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import KLConfig, LearnerConfig, LossConfig, Objective, OptimizerConfig
from agentr1_jax.learner.optimizer import learning_rates, make_optimizer
from agentr1_jax.learner.update import LearnerState, init_state
from agentr1_jax.policy import weights
from agentr1_jax.policy.config import DecoderConfig, LoraConfig, PolicyConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.params import (
    adapters,
    cast_for_compute,
    init_decoder,
    init_params,
    join,
    split,
    with_critic,
)
from agentr1_jax.policy.presets import decoder_config
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.rollout.config import AttemptLimits, EngineConfig, RolloutConfig, SamplingConfig
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.runtime import checkpoint, compile_cache, processes
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.compile_cache import cached_jit
from agentr1_jax.runtime.seeds import seed_of
from agentr1_jax.text.call_formats import CALL_FORMATS, make_call_format
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.sentencepiece import train_sentencepiece
from agentr1_jax.text.tokenizer import Tokenizer, load_tokenizer
from agentr1_jax.trajectory import Budget
from agentr1_jax.validation import from_section
from experiments import inherited, tasks

T = TypeVar("T")


def keep_programs(config: ml_collections.ConfigDict) -> None:
    """Keeps compiled programs from one start to the next in `config.compilation_cache`, where that is set.

    JAX's own variable `JAX_COMPILATION_CACHE_DIR` goes before it.
    """
    if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR") or config.compilation_cache:
        compile_cache.enable(compile_cache.cache_folder(folder, config.run_dir))


def learner_mesh(config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The learner's mesh over all devices of all processes, or over those given, without those for rollouts alone."""
    learning, _ = meshes.split_devices(jax.devices() if devices is None else devices, config.mesh.rollout_devices)
    return meshes.learner_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, learning)


def rollout_mesh(config: ml_collections.ConfigDict) -> Mesh:
    """The mesh of this process's engine."""
    _, rolling = meshes.split_devices(jax.devices(), config.mesh.rollout_devices)
    return meshes.rollout_mesh(rolling, config.rollout.tensor)


def tokenizer(config: ml_collections.ConfigDict, task: Task, *, resumes: bool) -> Tokenizer:
    """The tokenizer at `config.tokenizer.path`, or one trained on the task's texts and kept in the run folder.

    A run that `resumes` has its own already; one that starts from another run gets a copy of that run's.
    """
    path = os.path.expanduser(config.tokenizer.path)
    if "{data}" in path:
        path = path.replace("{data}", str(tasks.data_folder_of(config)))
    if not path:
        path = os.path.join(config.run_dir, "tokenizer.model")
        if processes.process_index() == 0 and not resumes:
            if config.warm_start.init_from:
                files.copy(os.path.join(config.warm_start.init_from, "tokenizer.model"), path)
            else:
                train_sentencepiece(task.texts(config.tokenizer.texts), path, config.tokenizer.vocab_size)
        processes.barrier()
    try:
        return load_tokenizer(path)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"tokenizer.path: {error}") from error


def discard_tokenizer(config: ml_collections.ConfigDict) -> None:
    """Takes back what `tokenizer` left in the folder of a run that cannot start."""
    with contextlib.suppress(OSError):
        files.remove(os.path.join(config.run_dir, "tokenizer.model"))
        files.remove_if_empty(config.run_dir)


def budget(config: ml_collections.ConfigDict) -> Budget:
    """The length limits."""
    return from_section(Budget, "budget", config.budget.to_dict())


def agent(config: ml_collections.ConfigDict, task: Task, tokenizer: Tokenizer) -> EnvLoop:
    """The default agent on a task's environments."""
    if config.agent.call_format not in CALL_FORMATS:
        raise UserError(
            f"unknown agent.call_format {config.agent.call_format!r}; choose one of {', '.join(CALL_FORMATS)}"
        )
    try:
        call_format = make_call_format(config.agent.call_format, tokenizer)
        chat = chat_format(tokenizer, call_format)
    except ValueError as error:
        raise UserError(f"tokenizer.path: {error}") from error
    if len(tokenizer.stop_ids) > EngineConfig.stop_sequences:
        raise UserError(
            f"tokenizer.path: {tokenizer.name} has {len(tokenizer.stop_ids)} stop ids, the engine knows at most "
            f"{EngineConfig.stop_sequences}; shorten eos_token_id in its generation_config.json"
        )
    return EnvLoop(
        task.env,
        tokenizer,
        chat,
        context_rule(config.context.rule),
        budget(config),
        call_format,
        lenient=config.tools.lenient,
        tell_tools=config.agent.tell_tools,
        summary_tokens=config.context.summary_tokens,
        train_summaries=config.context.train_summary,
    )


def policy(config: ml_collections.ConfigDict, tokenizer: Tokenizer | None) -> DecoderConfig:
    """The decoder's shape: that of its weights or of a preset, with the changes that the config names.

    A preset without a vocabulary gets the tokenizer's, padded to a multiple of 128, which every mesh divides. Others
    need no tokenizer here, and without one (a dry run) it is not compared with theirs.

    Raises:
      UserError: no shape is named, or it does not fit tokenizer or budget.
    """
    c = config.policy
    settings = from_section(PolicyConfig, "policy", c.to_dict())
    shape = decoder_config(settings, -(-tokenizer.vocab_size // 128) * 128 if tokenizer else 0)
    if tokenizer and tokenizer.vocab_size > shape.vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, but the policy's embedding has "
            f"{shape.vocab_size} rows ({c.weights or c.preset}): they do not belong together; set tokenizer.path to "
            "the tokenizer of the weights"
        )
    if 0 < shape.max_positions < config.budget.context_tokens:
        raise UserError(
            f"budget.context_tokens ({config.budget.context_tokens}) exceeds the {shape.max_positions} positions that "
            f"{c.weights or c.preset} was made for"
        )
    for key, tensor in (("mesh.tensor", config.mesh.tensor), ("rollout.tensor", config.rollout.tensor)):
        if tensor > 0 and shape.heads % tensor:
            fitting = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
            raise UserError(
                f"{key} is {tensor}, which does not divide {shape.heads} query heads; choose among {fitting}"
            )
    return shape


def rollout_params(policy: DecoderConfig, trained: Params, frozen: Params) -> Params:
    """The policy's parameters as the engine wants them: whole, in their compute dtype."""
    return cast_for_compute(policy, join({"decoder": trained["decoder"]}, frozen)["decoder"])


def rollout_view(
    policy: DecoderConfig, learner: Mesh, rollout: Mesh, *, copied: bool = False
) -> Callable[[Params, Params], Params]:
    """(trained, frozen parameters) -> the policy's on the rollout mesh, in its compute dtype.

    Where dtype and layout allow they are the learner's own arrays, unless they are to be `copied`, so that they outlive
    an update.
    """

    def prepare(trained: Params, frozen: Params) -> Params:
        params = rollout_params(policy, trained, frozen)
        return jax.tree.map(jnp.copy, params) if copied else params

    return meshes.make_rollout_view(learner, rollout, shardings, prepare)


def engine_config(config: ml_collections.ConfigDict) -> EngineConfig:
    """Shapes and scheduling of the rollout engine."""
    return _rollout_section(EngineConfig, config)


def sampling(config: ml_collections.ConfigDict) -> SamplingConfig:
    """Distribution that training samples from."""
    return _rollout_section(SamplingConfig, config)


def rollout_config(config: ml_collections.ConfigDict) -> RolloutConfig:
    """Groups of a training batch."""
    return _rollout_section(RolloutConfig, config)


def _rollout_section(cls: type[T], config: ml_collections.ConfigDict) -> T:
    """Make one of the dataclasses that share the section `rollout`."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return from_section(cls, "rollout", {k: v for k, v in config.rollout.items() if k in names})


def limits(config: ml_collections.ConfigDict) -> AttemptLimits:
    """AttemptLimits of the runner on a trajectory: twice the seconds that an agent which keeps to its budget takes."""
    seconds = config.budget.trajectory_seconds
    return AttemptLimits(config.rollout.attempts, None if seconds is None else 2 * seconds)


def engine(config: ml_collections.ConfigDict, policy: DecoderConfig, mesh: Mesh) -> Engine:
    """The rollout engine of this process."""
    try:
        return Engine(policy, engine_config(config), mesh)
    except ValueError as error:
        raise UserError(str(error)) from error


def objective(config: ml_collections.ConfigDict) -> Objective:
    """What an update of RL minimises."""
    loss = from_section(LossConfig, "loss", config.loss.to_dict())
    kl = from_section(KLConfig, "kl", config.kl.to_dict())
    return from_section(Objective, "rollout", {"loss": loss, "kl": kl, "temperature": config.rollout.temperature})


def learner_config(config: ml_collections.ConfigDict) -> LearnerConfig:
    """Rows, and passes over a batch."""
    return from_section(LearnerConfig, "learner", config.learner.to_dict())


def credit_scheme(config: ml_collections.ConfigDict) -> Scheme:
    """The credit scheme of a config, with its arguments."""
    return from_section(CreditConfig, "credit", config.credit.to_dict()).bind()


def credit_room(config: ml_collections.ConfigDict) -> dict[str, int]:
    """Capacities of a `TokenBatch`: the most trajectories, steps and tokens of a batch."""
    trajectories = config.rollout.groups * config.rollout.samples
    steps = trajectories * most_steps(config)
    of_step = config.budget.context_tokens if learner_config(config).observations else most_sampled(config)
    return {"trajectories": trajectories, "steps": steps, "tokens": steps * of_step}


def most_steps(config: ml_collections.ConfigDict) -> int:
    """The most steps of a trajectory, summaries among them; none of these follows the last step."""
    steps = config.budget.max_steps + config.budget.final_answer_step
    return context_rule(config.context.rule).most_steps(steps)


def most_sampled(config: ml_collections.ConfigDict) -> int:
    """The most tokens that one step samples."""
    makes_summaries = context_rule(config.context.rule).makes_summaries
    return max(config.budget.response_tokens, config.context.summary_tokens if makes_summaries else 0)


def learns_values(config: ml_collections.ConfigDict) -> bool:
    """Whether RL asks and trains a critic: the config has one, and the scheme uses it."""
    return credit_scheme(config).uses_critic and config.critic != "none"


def shaping(config: ml_collections.ConfigDict) -> ShapingConfig:
    """What is done to rewards before credit is assigned."""
    return from_section(ShapingConfig, "shaping", config.shaping.to_dict())


def frozen(config: ml_collections.ConfigDict, policy: DecoderConfig, mesh: Mesh) -> Params:
    """What LoRA leaves as it is, on the learner's mesh; empty without it."""
    if not policy.lora.rank:
        return {}
    return {"decoder": decoder(config, dataclasses.replace(policy, lora=LoraConfig()), mesh)}


def decoder(config: ml_collections.ConfigDict, policy: DecoderConfig, mesh: Mesh) -> Params:
    """The decoder that training starts from, made in place on the mesh: published weights, or random ones.

    Raises:
      UserError: the weights cannot be read, or are not of this shape.
    """
    if config.policy.weights:
        return published(config.policy.weights, policy, mesh, "policy.weights: ")
    return _made(lambda key: init_decoder(policy, key), config, mesh)


def published(source: str, policy: DecoderConfig, mesh: Mesh, prefix: str = "") -> Params:
    """The decoder of published weights. Raises UserError, its message after `prefix`, if they are not of this shape."""
    try:
        return weights.load(source, policy, functools.partial(shardings, mesh=mesh))
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{prefix}{error}") from error


def _made(make: Callable[[jax.Array], Params], config: ml_collections.ConfigDict, mesh: Mesh) -> Params:
    layout = shardings(jax.eval_shape(make, jax.random.key(0)), mesh)
    seed = np.uint32(seed_of(config.seed, "parameters") % 2**32)
    return cached_jit(lambda seed: make(jax.random.key(seed)), mesh, out_shardings=layout)(seed)


def optimizer_config(config: ml_collections.ConfigDict) -> OptimizerConfig:
    """Optimizer and learning rates."""
    return from_section(OptimizerConfig, "optimizer", config.optimizer.to_dict())


def optimizer_of(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
    """The optimizer, without its learning rate."""
    return make_optimizer(optimizer_config(config))


def rates(config: ml_collections.ConfigDict, update: int, parts: Iterable[str]) -> dict[str, float]:
    """Learning rate of each part of the parameters in an update of RL; 0 for the policy while the critic warms up."""
    return learning_rates(optimizer_config(config), update, config.updates, parts)


def reference(
    config: ml_collections.ConfigDict, policy: DecoderConfig, mesh: Mesh, params: Params, *, fresh: bool
) -> Params | None:
    """The reference policy of the KL: what is trained of the decoder, as RL starts; kept beside the checkpoints.

    Args:
      config, policy, mesh: of the run.
      params: of the learner.
      fresh: RL starts now; else it is the one that was kept.

    Returns:
      in the compute dtype, on the learner's mesh; None without a KL term.

    Raises:
      UserError: a resumed run has lost it.
    """
    if config.kl.kind == "none":
        return None
    cast = functools.partial(cast_for_compute, policy)
    layout = shardings(jax.eval_shape(cast, params["decoder"]), mesh)
    with contextlib.closing(checkpoint.Checkpoints(config.run_dir, keep=1, name="reference")) as saved:
        restored = saved.restore(checkpoint.sharded_shapes(jax.eval_shape(cast, params["decoder"]), layout))
        if restored is not None:
            return restored[0]
        if not fresh:
            raise UserError(f"{config.run_dir}/reference is gone, to which the KL of this run is measured; restore it")
        copy = cached_jit(lambda decoder: jax.tree.map(jnp.copy, cast(decoder)), mesh, out_shardings=layout)
        made = copy(params["decoder"])
        saved.save(0, made, {})
    return made


def learner_state(config: ml_collections.ConfigDict, policy: DecoderConfig, mesh: Mesh) -> tuple[Any, Any, Any]:
    """How the learner's state comes to be.

    Returns:
      fresh: () -> LearnerState with the parameters that training starts from, made in place on the mesh; those of
        the decoder come from `warm_start.init_from` where that is set.
      restart: params -> LearnerState that keeps the parameters and starts the optimizer anew.
      the optimizer, the state's shape structs with shardings, and its shardings.
    """
    optimizer = optimizer_of(config)

    def trained(key: jax.Array) -> Params:
        return split(policy, init_params(policy, key, config.critic))[0]

    shapes = jax.eval_shape(lambda key: init_state(trained(key), optimizer), jax.random.key(0))
    layout = shardings(shapes, mesh)

    @functools.partial(cached_jit, mesh=mesh, out_shardings=layout)
    def start(begun: Params) -> LearnerState:
        return init_state(with_critic(policy, begun, config.critic), optimizer)

    def fresh() -> LearnerState:
        if config.warm_start.init_from:
            like = checkpoint.sharded_shapes(shapes.params["decoder"], layout.params["decoder"])
            return start(inherited.decoder(config.warm_start.init_from, like, inherited.KEY))
        if policy.lora.rank:
            return start(_made(lambda key: adapters(init_decoder(policy, key)), config, mesh))
        return start(decoder(config, policy, mesh))

    restart = cached_jit(lambda params: init_state(params, optimizer), mesh, out_shardings=layout)
    return fresh, restart, (optimizer, checkpoint.sharded_shapes(shapes, layout), layout)


def microbatches(config: ml_collections.ConfigDict, trajectories: int) -> int:
    """Microbatches that the worst packing of so many trajectories fills; the update loops over those that hold data."""
    segments = 1
    steps = most_steps(config)
    branches = config.context.rule != "append" or config.learner.packing in ("per_step", "per_step_padded")
    # Loss tokens beyond a row cut a chain, too.
    if branches or steps * most_sampled(config) >= config.learner.row_loss_tokens:
        segments = steps + 1
    return -(-trajectories * segments // config.learner.rows)


def identities(
    task: Task, run_seed: int, phase: str, groups: Sequence[int], visits: Sequence[int], samples: int
) -> list[list[Identity]]:
    """Names and seeds of the trajectories of some groups, keyed by the visit (running index) of each group."""
    return [
        [
            Identity(
                uid=f"{phase}/{visit:06d}/{sample}",
                group=group,
                sample=sample,
                task=task.name,
                seed=seed_of(run_seed, phase, visit, sample),
            )
            for sample in range(samples)
        ]
        for group, visit in zip(groups, visits, strict=True)
    ]


def dealt(count: int) -> list[int]:
    """Indices of this process's share of `count` things: every n-th of them."""
    return list(range(processes.process_index(), count, processes.process_count()))

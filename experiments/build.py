"""From config to the parts of a run: task, tokenizer, policy, engine, learner; shared by all experiments."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
from jax.sharding import Mesh

from agentr1_jax.agents.context import context_rule
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Identity
from agentr1_jax.credit import get_scheme
from agentr1_jax.envs.base import Row, Task
from agentr1_jax.envs.hopworld.task import HopWorldTask
from agentr1_jax.envs.multihop import MultihopTask, data_folder
from agentr1_jax.learner.fill import AGGREGATES
from agentr1_jax.learner.losses import LossConfig
from agentr1_jax.learner.packing import MODES
from agentr1_jax.learner.update import OPTIMIZERS, LearnerState, init_state, make_optimizer
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import init_params
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.rollout.engine import Engine, EngineConfig
from agentr1_jax.runtime import checkpoint, processes
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.errors import UserError
from agentr1_jax.runtime.seeds import seed_of
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.sentencepiece import train_sentencepiece
from agentr1_jax.text.tokenizer import Tokenizer, load_tokenizer
from agentr1_jax.trajectory import Budget

OPENINGS_CHECKED = 8
CRITICS = ("none", "shared_trunk")


def check(config: ml_collections.ConfigDict) -> None:
    """Refuses what cannot work before anything is made or written.

    Raises:
      UserError: with the keys at fault and what to do.
    """
    try:
        budget(config)
        context_rule(config.context)
        scheme, _ = get_scheme(config.credit.name, credit_args(config))
        loss_config(config)
        engine_config(config)
    except ValueError as error:
        raise UserError(str(error)) from error
    choices: dict[str, tuple[str, Sequence[str]]] = {
        "critic": (config.critic, CRITICS),
        "learner.packing": (config.learner.packing, MODES),
        "loss.aggregate": (config.loss.aggregate, AGGREGATES),
        "optimizer.name": (config.optimizer.name, OPTIMIZERS),
    }
    for key, (value, known) in choices.items():
        if value not in known:
            raise UserError(f"unknown {key} {value!r}; choose one of {', '.join(known)}")
    if scheme.needs_critic and config.critic == "none":
        raise UserError(f"credit scheme {scheme.name!r} needs a critic; set config.critic=shared_trunk")
    if config.learner.row_tokens < config.budget.context_tokens:
        raise UserError(
            f"learner.row_tokens ({config.learner.row_tokens}) is less than budget.context_tokens "
            f"({config.budget.context_tokens}): a step would not fit a row"
        )
    if config.rollout.live_lengths[-1] < config.budget.context_tokens:
        raise UserError(
            f"the last of rollout.live_lengths ({config.rollout.live_lengths[-1]}) is less than "
            f"budget.context_tokens ({config.budget.context_tokens}): a step would not fit the cache"
        )
    steps = config.budget.max_steps + config.budget.final_answer_step
    reads = min(config.budget.context_tokens, steps * config.budget.response_tokens) + 1
    if config.learner.row_reads < reads:
        raise UserError(
            f"learner.row_reads is {config.learner.row_reads}; a trajectory can have {reads} (budget.max_steps x "
            "budget.response_tokens, and one for the critic)"
        )
    processes_, minibatches = processes.process_count(), config.learner.minibatches
    if config.rollout.groups % (processes_ * minibatches):
        raise UserError(
            f"rollout.groups ({config.rollout.groups}) must be a multiple of processes x learner.minibatches "
            f"({processes_} x {minibatches})"
        )
    if config.control and processes_ > 1:
        raise UserError("a control run is timed, and clocks of several processes differ; run it in one process")
    shards = max(jax.device_count() // config.mesh.tensor, 1)
    if config.learner.rows % shards:
        raise UserError(f"learner.rows ({config.learner.rows}) must be a multiple of the {shards} shards of a batch")


def learner_mesh(config: ml_collections.ConfigDict) -> Mesh:
    """The learner's mesh over all devices of all processes."""
    return meshes.learner_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)


def task(config: ml_collections.ConfigDict) -> Task:
    """The task that `config.task` names."""
    c = config.task
    try:
        if c.name == "hopworld":
            return HopWorldTask(
                top_k=c.top_k,
                questions_per_world=c.questions_per_world,
                flaws=c.flaws.to_dict(),
                reward_weights=c.rewards.to_dict(),
            )
        if c.name == "multihop":
            return MultihopTask(
                data_dir=c.data_dir,
                datasets=c.datasets,
                corpus=c.corpus,
                top_k=c.top_k,
                reward_weights=c.rewards.to_dict(),
                seed=config.seed,
            )
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error
    raise UserError(f"unknown task.name {c.name!r}; choose 'hopworld' or 'multihop'")


def tokenizer(config: ml_collections.ConfigDict, task: Task, *, resumes: bool) -> Tokenizer:
    """The tokenizer at `config.tokenizer.path`, or one trained on the task's texts and kept in the run folder.

    A run that `resumes` has trained its own already.
    """
    path = os.path.expanduser(config.tokenizer.path)
    if "{data}" in path:
        path = path.replace("{data}", str(_data_folder(config)))
    if not path:
        path = os.path.join(config.run_dir, "tokenizer.model")
        if processes.process_index() == 0 and not resumes:
            train_sentencepiece(task.texts(config.tokenizer.texts), path, config.tokenizer.vocab_size)
        processes.barrier("tokenizer")
    try:
        return load_tokenizer(path)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"tokenizer.path: {error}") from error


def discard_tokenizer(config: ml_collections.ConfigDict) -> None:
    """Takes back what `tokenizer` left in the folder of a run that cannot start."""
    with contextlib.suppress(OSError):
        os.remove(os.path.join(config.run_dir, "tokenizer.model"))
        os.rmdir(config.run_dir)


def _data_folder(config: ml_collections.ConfigDict) -> os.PathLike[str]:
    try:
        return data_folder(config.task.data_dir)
    except FileNotFoundError as error:
        raise UserError(str(error)) from error


def budget(config: ml_collections.ConfigDict) -> Budget:
    """The length limits."""
    return Budget(**config.budget.to_dict())


def agent(config: ml_collections.ConfigDict, task: Task, tokenizer: Tokenizer) -> EnvLoop:
    """The default agent on a task's environments."""
    try:
        chat = chat_format(tokenizer)
    except ValueError as error:
        raise UserError(f"tokenizer.path: {error}") from error
    rule = context_rule(config.context)
    return EnvLoop(task.env, tokenizer, chat, rule, config.context, budget(config))


def check_openings(config: ml_collections.ConfigDict, task: Task, agent: EnvLoop) -> None:
    """Refuses a split that the task lacks, and a budget that the task's first prompts already exceed.

    Raises:
      UserError: names the splits there are, or the row, its length and the keys to change.
    """

    async def opening_tokens(row: Row) -> int:
        observation = await task.env().reset(row, seed=0)
        return len(agent.opening(observation))

    room = config.budget.context_tokens - config.budget.response_tokens
    for split in ("train", config.eval.split):
        try:
            rows = [task.row(split, index) for index in range(OPENINGS_CHECKED)]
        except ValueError as error:
            raise UserError(f"eval.split: {error}") from error
        for row in rows:
            tokens = asyncio.run(opening_tokens(row))
            if tokens > room:
                raise UserError(
                    f"the prompt of row {row['id']} has {tokens} tokens; budget.context_tokens "
                    f"({config.budget.context_tokens}) less budget.response_tokens ({config.budget.response_tokens}) "
                    f"leaves {room}: raise budget.context_tokens"
                )


def policy(config: ml_collections.ConfigDict, tokenizer: Tokenizer) -> DecoderConfig:
    """The decoder's shape; the embedding is padded to a multiple of 128 rows, which every mesh divides."""
    return DecoderConfig(vocab_size=-(-tokenizer.vocab_size // 128) * 128, **config.policy.to_dict())


def engine_config(config: ml_collections.ConfigDict) -> EngineConfig:
    """Shapes of the rollout engine."""
    c = config.rollout
    return EngineConfig(
        slots=c.slots,
        length=c.live_lengths[-1],
        decode_chunk=c.decode_chunk,
        prefill_rows=c.prefill_rows,
        prefill_lengths=tuple(c.prefill_lengths),
        live_lengths=tuple(c.live_lengths),
    )


def engine(config: ml_collections.ConfigDict, policy: DecoderConfig, mesh: Mesh) -> Engine:
    """The rollout engine on this process's devices."""
    try:
        return Engine(policy, engine_config(config), mesh)
    except ValueError as error:
        raise UserError(str(error)) from error


def loss_config(config: ml_collections.ConfigDict, **changes: Any) -> LossConfig:
    """The loss, with changes (the warm start has clip `none`)."""
    fields = {k: v for k, v in config.loss.to_dict().items() if k not in ("aggregate", "fixed_denominator")}
    return LossConfig(**(fields | {"temperature": config.rollout.temperature} | changes))


def credit_args(config: ml_collections.ConfigDict) -> dict[str, float]:
    """Hyper-parameters of the credit scheme that the config sets."""
    return {key: value for key, value in config.credit.args.to_dict().items() if value is not None}


def learner_state(config: ml_collections.ConfigDict, policy: DecoderConfig, mesh: Mesh) -> tuple[Any, Any, Any]:
    """How to make the learner's state and how it lies.

    Returns:
      fresh: () -> LearnerState with random parameters, made in place on the mesh.
      restart: params -> LearnerState that keeps the parameters and starts the optimizer anew.
      like: its shape structs with shardings.
    """
    c = config.optimizer
    optimizer = make_optimizer(
        name=c.name, max_grad_norm=c.max_grad_norm, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay
    )
    init = functools.partial(init_params, policy, critic=config.critic == "shared_trunk")

    def make(key: jax.Array) -> LearnerState:
        return init_state(init(key), optimizer)

    seed = seed_of(config.seed, "parameters") % 2**32
    shapes = jax.eval_shape(make, jax.random.key(0))
    layout = shardings(shapes, mesh)
    fresh = jax.jit(lambda seed: make(jax.random.key(seed)), out_shardings=layout)
    restart = jax.jit(lambda params: init_state(params, optimizer), out_shardings=layout)
    return functools.partial(fresh, np.uint32(seed)), restart, (optimizer, checkpoint.abstract(shapes, layout), layout)


def microbatches(config: ml_collections.ConfigDict, trajectories: int) -> int:
    """Microbatches that the worst packing of so many trajectories fills; the update loops over those that hold data."""
    segments = 1
    if config.context != "append" or config.learner.packing == "steps":
        segments = config.budget.max_steps + config.budget.final_answer_step + 1
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
    """Which of `count` things are this process's."""
    return list(range(processes.process_index(), count, processes.process_count()))

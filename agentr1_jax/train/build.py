"""The parts of a run, and how they are made from its settings: tokenizer, agent, policy, meshes, engine, parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from agentr1_jax import files
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.envs.base import Task
from agentr1_jax.envs.datasets import data_folder
from agentr1_jax.errors import UserError, user_error
from agentr1_jax.learner.optimizer import make_optimizer
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
    split_layers,
    with_critic,
)
from agentr1_jax.policy.presets import decoder_config
from agentr1_jax.policy.sharding import engine_formats, shardings
from agentr1_jax.rollout.config import MOST_STOP_SEQUENCES
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.runtime import checkpoint, processes
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.compile_cache import cached_jit
from agentr1_jax.runtime.processes import Dispatcher
from agentr1_jax.runtime.seeds import seed_of
from agentr1_jax.text.call_formats import make_call_format
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.sentencepiece import train_sentencepiece
from agentr1_jax.text.tokenizer import TOKENIZER_FILES, Tokenizer, has_tokenizer, load_tokenizer, read_vocabulary
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train.restore import restore_decoder
from agentr1_jax.train.settings import Settings

HALF = ("bfloat16", "float16")
"""Dtypes whose sums over CPU devices abort XLA's compiler."""
SHOWN_IDS = 24
"""Ids that the log shows of a prompt, at its beginning and at its end."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of a run that do not change while it runs.

    Attributes:
      agent: the workflow of one trajectory.
      policy: shape of the decoder.
      frozen: parameters that LoRA does not train; empty without LoRA.
      rollout_params: (trained, frozen parameters) -> the decoder's on the engine's mesh, in compute dtype.
      tool_metrics: counts of what the tools do.
      dispatch: calls a compiled program of the learner: (program, *arguments) -> its result. Where the engine samples
        at the same time on the same devices, it does so on the engine's dispatch thread: a program over several devices
        waits for all of them, so that two threads which dispatch in different orders could wait for ever.
    """

    settings: Settings
    task: Task
    tokenizer: Tokenizer
    agent: EnvLoop
    policy: DecoderConfig
    frozen: Params
    learner_mesh: Mesh
    engine: Engine
    rollout_params: Callable[[Params, Params], Params]
    tool_metrics: ToolMetrics
    dispatch: Callable[..., Any] = processes.call


def make_learner_mesh(settings: Settings, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make the learner's mesh over all devices (None: those there are) but those for rollouts alone.

    Raises:
      UserError: gradients are to be summed over CPU devices in half precision.
    """
    c = settings.mesh
    learner_devices, _ = meshes.split_devices(jax.devices() if devices is None else devices, c.rollout_devices)
    mesh = meshes.learner_mesh(c.data, c.fsdp, c.tensor, learner_devices)
    dtype = settings.learner.reduce_dtype
    on_cpus = mesh.devices.flat[0].platform == "cpu"
    if dtype in HALF and on_cpus and mesh.shape["fsdp"] > 1:
        raise UserError(f"learner.reduce_dtype is {dtype}: sums over CPU devices need float32; leave it unset")
    dtype = settings.policy.param_dtype
    if dtype in HALF and on_cpus and mesh.shape["data"] * mesh.shape["fsdp"] > 1:
        raise UserError(f"policy.param_dtype is {dtype}: sums of its gradients over CPU devices need float32")
    return mesh


def make_rollout_mesh(settings: Settings) -> Mesh:
    """Make the mesh of this process's engine."""
    _, rollout_devices = meshes.split_devices(jax.devices(), settings.mesh.rollout_devices)
    return meshes.rollout_mesh(rollout_devices, settings.rollout.tensor)


def fit_devices(settings: Settings) -> Settings:
    """Return settings whose meshes and slots fit the devices that there are, for rollouts without a learner."""
    devices = jax.local_device_count()
    tensor = math.gcd(settings.rollout.tensor, devices)
    shards = devices // tensor
    engine = settings.engine
    pages = engine.pages and max(-(-engine.pages // shards), engine.slot_tokens // engine.page_tokens + 1) * shards
    return dataclasses.replace(
        settings,
        mesh=dataclasses.replace(settings.mesh, tensor=1),
        rollout=dataclasses.replace(settings.rollout, tensor=tensor),
        engine=dataclasses.replace(
            engine,
            slots=-(-engine.slots // shards) * shards,
            swap_slots=-(-engine.swap_slots // shards) * shards,
            pages=pages,
        ),
    )


def make_tokenizer(settings: Settings, task: Task | None, *, resumes: bool) -> Tokenizer:
    """Load the tokenizer of published weights, or the one at `tokenizer.path`; else train one, kept in the run folder.

    Args:
      settings: of the run.
      task: source of texts; None where a tokenizer exists already.
      resumes: True if the run folder has its tokenizer already.

    Raises:
      UserError: it cannot be read, or is another one than that of the published weights.
    """
    weights_of_policy = settings.policy.weights
    if weights_of_policy and settings.tokenizer.path == weights_of_policy:
        folder = os.path.expanduser(weights_of_policy)
        if not has_tokenizer(folder):
            raise UserError(
                f"policy.weights: {weights_of_policy} has no tokenizer ({', '.join(TOKENIZER_FILES)}); put its files "
                "there, or name the tokenizer that the weights were trained with in tokenizer.path"
            )
        with user_error("policy.weights: "):
            return load_tokenizer(folder)
    path = os.path.expanduser(settings.tokenizer.path)
    if "{data}" in path:
        with user_error():
            path = path.replace("{data}", str(data_folder(settings.task.data_dir)))
    if not path:
        path = os.path.join(settings.run.run_dir, "tokenizer.model")
        if processes.process_index() == 0 and not resumes:
            if settings.warm_start.init_from:
                files.copy(os.path.join(settings.warm_start.init_from, "tokenizer.model"), path)
            elif task is not None:
                with user_error("tokenizer: "):
                    train_sentencepiece(task.texts(settings.tokenizer.texts), path, settings.tokenizer.vocab_size)
        processes.barrier()
    with user_error("tokenizer.path: "):
        tokenizer = load_tokenizer(path)
    if weights_of_policy:
        _check_tokenizer_of_weights(path, weights_of_policy)
    return tokenizer


def _check_tokenizer_of_weights(path: str, source: str) -> None:
    """Raise UserError where a tokenizer is another one than that of published weights, if they bring any."""
    folder = os.path.expanduser(source)
    if not has_tokenizer(folder):
        return  # `make_policy` compares the sizes.
    try:
        own = read_vocabulary(folder)
    except (ValueError, FileNotFoundError) as error:
        logging.warning("tokenizer.path: %s cannot be compared with the tokenizer of %s (%s)", path, source, error)
        return
    if difference := read_vocabulary(path).difference(own):
        raise UserError(
            f"tokenizer.path: {path} is not the tokenizer of policy.weights ({source}): {difference}, so that its ids "
            "would mean other words to the policy; set tokenizer.path='' for the tokenizer that the weights bring"
        )


def remove_tokenizer(run_dir: str) -> None:
    """Remove a trained tokenizer from the folder of a run that cannot start."""
    with contextlib.suppress(OSError):
        files.remove(os.path.join(run_dir, "tokenizer.model"))
        files.remove_if_empty(run_dir)


def make_agent(settings: Settings, task: Task, tokenizer: Tokenizer) -> EnvLoop:
    """Make the default agent on a task's environments."""
    with user_error("tokenizer.path: "):
        call_format = make_call_format(settings.agent.call_format, tokenizer)
        chat = chat_format(tokenizer, call_format)
    if len(tokenizer.stop_ids) > MOST_STOP_SEQUENCES:
        raise UserError(
            f"tokenizer.path: {tokenizer.name} has {len(tokenizer.stop_ids)} stop ids, the engine knows at most "
            f"{MOST_STOP_SEQUENCES}; shorten eos_token_id in its generation_config.json"
        )
    return EnvLoop(
        task.env,
        tokenizer,
        chat,
        settings.context_rule,
        settings.budget,
        call_format,
        lenient=settings.tools.lenient,
        tell_tools=settings.agent.tell_tools,
        summary_tokens=settings.context.summary_tokens,
        train_summaries=settings.context.train_summary,
    )


def make_policy(settings: Settings, tokenizer: Tokenizer | None) -> DecoderConfig:
    """Return the decoder's shape: that of its weights or of a preset, with the changes that the settings name.

    A preset without a vocabulary gets the tokenizer's, padded to a multiple of 128, which every mesh divides; without a
    tokenizer (in a dry run) the vocabulary is not checked.

    Raises:
      UserError: no shape is named, or it does not fit tokenizer, budget or mesh.
    """
    c = settings.policy
    source = c.weights or c.preset
    shape = decoder_config(c, -(-tokenizer.vocab_size // 128) * 128 if tokenizer else 0)
    shape = dataclasses.replace(shape, reduce_dtype=settings.learner.reduce_dtype)
    if tokenizer:
        check_vocabulary(tokenizer, shape, c)
    if 0 < shape.max_positions < settings.budget.context_tokens:
        raise UserError(
            f"budget.context_tokens ({settings.budget.context_tokens}) exceeds the {shape.max_positions} positions "
            f"that {source} was made for{'' if shape.rope_scaling else '; policy.yarn.factor makes them longer'}"
        )
    for key, tensor in (("mesh.tensor", settings.mesh.tensor), ("rollout.tensor", settings.rollout.tensor)):
        if shape.heads % tensor:
            divisors = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
            raise UserError(
                f"{key} is {tensor}, which does not divide {shape.heads} query heads; choose among {divisors}"
            )
    return shape


def check_vocabulary(tokenizer: Tokenizer, shape: DecoderConfig, c: PolicyConfig) -> None:
    """Refuse a tokenizer with more ids than the embedding has rows, or with far fewer than published weights have."""
    source = c.weights or c.preset
    if tokenizer.vocab_size > shape.vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, but the policy's embedding has "
            f"{shape.vocab_size} rows ({source}): they do not belong together; set tokenizer.path to the tokenizer of "
            "the weights"
        )
    if c.weights and 2 * tokenizer.vocab_size < shape.vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} ids, and the embedding {shape.vocab_size:,} rows "
            f"({source}): they do not belong together; set tokenizer.path to the tokenizer of the weights"
        )


def describe_policy(settings: Settings, policy: DecoderConfig, agent: EnvLoop, source: str = "") -> str:
    """Return one line that says what is trained or sampled: policy, tokenizer and template, and where they are from.

    Args:
      settings: of the run.
      policy: shape of the decoder.
      agent: agent of the task, with its tokenizer and call format.
      source: source of the parameters; "" for that of a new run.
    """
    tokenizer, init_from = agent.tokenizer, settings.warm_start.init_from
    shapes = jax.eval_shape(lambda key: init_decoder(policy, key), jax.random.key(0))
    count = sum(x.size for x in jax.tree.leaves(shapes))
    family = weights.find_family(policy) or "llama with biases and normalised heads"
    source = source or init_from or settings.policy.weights or f"random parameters of preset {settings.policy.preset}"
    if settings.tokenizer.path:
        own = settings.tokenizer.path == settings.policy.weights
        origin = f"{tokenizer.name} ({'that of the weights' if own else 'tokenizer.path'})"
    else:
        origin = f"that of {init_from}" if init_from else "trained on the task's texts"
    told = "in the system message" if agent.chat.instructions else "by the template"
    return (
        f"policy: {family}, {count:,} parameters in {policy.param_dtype}, computes in {policy.dtype}, from {source}; "
        f"tokenizer: {origin}, {tokenizer.vocab_size:,} ids; template: that of the tokenizer, "
        f"calls as {agent.call_format.name}, tools told {told if agent.tell_tools else 'nowhere (agent.tell_tools)'}"
    )


def describe_prompt(row_id: str, prompt_ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return a prompt, decoded and as ids, of which many are shortened in the middle."""
    ids = [str(i) for i in prompt_ids.tolist()]
    if len(ids) > 2 * SHOWN_IDS:
        ids = [*ids[:SHOWN_IDS], "...", *ids[-SHOWN_IDS:]]
    text = tokenizer.decode(prompt_ids)
    return f"first prompt, of row {row_id}, {len(prompt_ids)} tokens:\n{text}\nas ids: {' '.join(ids)}"


def make_engine(settings: Settings, policy: DecoderConfig, mesh: Mesh, dispatcher: Dispatcher | None = None) -> Engine:
    """Make the rollout engine of this process. Raises UserError if its shapes do not fit the mesh."""
    with user_error():
        return Engine(policy, settings.engine, mesh, dispatcher)


def rollout_params(policy: DecoderConfig, platform: str, trained: Params, frozen: Params) -> Params:
    """Return the decoder's parameters as the engine wants them: whole, in compute dtype; on GPUs layer by layer."""
    params = cast_for_compute(policy, join({"decoder": trained["decoder"]}, frozen)["decoder"])
    return split_layers(params) if platform == "gpu" else params


def make_rollout_params(
    policy: DecoderConfig, learner: Mesh, rollout: Mesh, *, copy: bool = False
) -> Callable[[Params, Params], Params]:
    """Return a function (trained, frozen parameters) -> the decoder's on the rollout mesh, in compute dtype.

    Where dtype and layout allow they are the learner's own arrays; with `copy` they outlive an update.
    """

    def prepare(trained: Params, frozen: Params) -> Params:
        params = rollout_params(policy, rollout.devices.flat[0].platform, trained, frozen)
        return jax.tree.map(jnp.copy, params) if copy else params

    return meshes.make_rollout_view(learner, rollout, shardings, prepare, engine_formats)


def make_frozen(settings: Settings, policy: DecoderConfig, mesh: Mesh) -> Params:
    """Make the parameters that LoRA leaves as they are, on the learner's mesh; empty without LoRA."""
    if not policy.lora.rank:
        return {}
    return {"decoder": make_decoder(settings, dataclasses.replace(policy, lora=LoraConfig()), mesh)}


def make_decoder(settings: Settings, policy: DecoderConfig, mesh: Mesh) -> Params:
    """Make the decoder that training starts from in place on the mesh: published weights, or random parameters."""
    if settings.policy.weights:
        return load_decoder(settings.policy.weights, policy, mesh, "policy.weights: ")
    return _init(lambda key: init_decoder(policy, key), settings.run.seed, mesh)


def load_decoder(source: str, policy: DecoderConfig, mesh: Mesh, prefix: str = "") -> Params:
    """Load published weights. Raises UserError, its message after `prefix`, if they are not of this shape."""
    with user_error(prefix):
        return weights.load(source, policy, functools.partial(shardings, mesh=mesh))


def _init(init: Callable[[jax.Array], Params], seed: int, mesh: Mesh) -> Params:
    layout = shardings(jax.eval_shape(init, jax.random.key(0)), mesh)
    seed_of_parameters = np.uint32(seed_of(seed, "parameters") % 2**32)
    return cached_jit(lambda seed: init(jax.random.key(seed)), mesh, out_shardings=layout)(seed_of_parameters)


@dataclasses.dataclass(frozen=True)
class StateBuilder:
    """How the learner's state is made on its mesh.

    Attributes:
      init: () -> the state that training starts from.
      restart: parameters -> state with these parameters and a new optimizer state.
      optimizer: optax transformation without its learning rate.
      shapes: shape structs of the state, with shardings.
      layout: shardings of the state.
    """

    init: Callable[[], LearnerState]
    restart: Callable[[Params], LearnerState]
    optimizer: Any
    shapes: Any
    layout: Any


def make_state_builder(settings: Settings, policy: DecoderConfig, mesh: Mesh) -> StateBuilder:
    """Return how the learner's state is made; the decoder of `warm_start.init_from` is its start where that is set."""
    optimizer, critic = make_optimizer(settings.optimizer), settings.run.critic

    def init_parameters(key: jax.Array) -> Params:
        return split(policy, init_params(policy, key, critic))[0]

    shapes = jax.eval_shape(lambda key: init_state(init_parameters(key), optimizer), jax.random.key(0))
    layout = shardings(shapes, mesh)

    @functools.partial(cached_jit, mesh=mesh, out_shardings=layout)
    def start(decoder: Params) -> LearnerState:
        return init_state(with_critic(policy, decoder, critic), optimizer)

    def init() -> LearnerState:
        if settings.warm_start.init_from:
            like = checkpoint.sharded_shapes(shapes.params["decoder"], layout.params["decoder"])
            return start(restore_decoder(settings.warm_start.init_from, like, "warm_start.init_from: "))
        if policy.lora.rank:
            return start(_init(lambda key: adapters(init_decoder(policy, key)), settings.run.seed, mesh))
        return start(make_decoder(settings, policy, mesh))

    restart = cached_jit(lambda params: init_state(params, optimizer), mesh, out_shardings=layout)
    return StateBuilder(init, restart, optimizer, checkpoint.sharded_shapes(shapes, layout), layout)

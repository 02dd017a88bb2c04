"""A policy by its source, a run's folder or published weights: its config, its tokenizer, its decoder."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh

from agentr1_jax import buckets, files
from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.params import join, merge_adapters
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.text.tokenizer import Tokenizer
from configs import base
from experiments import build, inherited


def is_run(source: str) -> bool:
    """Whether a folder is that of a run of `experiments.train` that may have a checkpoint."""
    buckets.check_reachable(source, "RUN")
    parts = (os.path.join(source, "config.json"), os.path.join(source, "checkpoints"))
    return bool(source) and files.is_file(parts[0]) and files.is_folder(parts[1])


def stored_config(run_dir: str) -> ml_collections.ConfigDict:
    """The config of the run in a folder.

    Raises:
      UserError: there is no run, or one of another version of the config.
    """
    buckets.check_reachable(run_dir, "RUN")
    stored = RunFolder(run_dir).read_config()
    try:
        config = base.get_config(*base.task_names(stored["task"]))
        config.update(stored)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{run_dir}/config.json: not a config of this version ({str(error.args[0]).partition('. ')[0]})"
        ) from error
    config.run_dir = run_dir
    return config


def with_weights(config: ml_collections.ConfigDict, source: str) -> ml_collections.ConfigDict:
    """A copy of a config with published weights, whose shape stays as it is, and their tokenizer."""
    config = config.copy_and_resolve_references()
    for key, value in base.get_config().policy.items():
        if value is None:
            config.policy[key] = None
    config.policy.preset, config.policy.weights, config.tokenizer.path = "", source, source
    config.policy.lora.rank = 0
    return config


def fit_devices(config: ml_collections.ConfigDict) -> None:
    """Changes, in place, what a config says of devices and slots to what fits the devices that there are.

    Raises:
      UserError: a step of the budget does not fit a KV slot.
    """
    c, devices = config.rollout, jax.local_device_count()
    config.mesh.tensor = 1
    c.tensor = math.gcd(c.tensor, devices)
    shards = devices // c.tensor
    c.slots, c.swap_slots = -(-c.slots // shards) * shards, -(-c.swap_slots // shards) * shards
    if c.slot_tokens < config.budget.context_tokens:
        raise UserError(
            f"rollout.slot_tokens ({c.slot_tokens}) is less than budget.context_tokens "
            f"({config.budget.context_tokens}): a step would not fit the cache"
        )


def run_tokenizer(config: ml_collections.ConfigDict) -> Tokenizer:
    """The tokenizer of a run, which the task's data need not be here for. Raises UserError if it cannot be read."""
    nothing: Any = None  # Only a tokenizer that has yet to be trained needs a task.
    return build.tokenizer(config, nothing, resumes=True)


def newest_decoder(config: ml_collections.ConfigDict, policy: DecoderConfig, mesh: Mesh) -> Params:
    """The decoder of a run's newest checkpoint, adapters merged; critic and optimizer are not looked at.

    Args:
      config: of the run; its `run_dir` is where it lies.
      policy: its decoder's shape.
      mesh: what the parameters are spread over.

    Raises:
      UserError: there is no checkpoint, or it is not that of this policy.
    """
    return _whole(config, policy, mesh, lambda like: inherited.decoder(config.run_dir, like["decoder"]))


def has_reference(run: str) -> bool:
    """Whether a run has kept the decoder that RL began with; those with a KL term do."""
    return any(name.isdecimal() for name in files.list_names(os.path.join(run, "reference")))


def reference_decoder(config: ml_collections.ConfigDict, policy: DecoderConfig, mesh: Mesh) -> Params:
    """As `newest_decoder`, but the one that RL began with, in the compute dtype; only where `has_reference`."""
    return _whole(config, policy, mesh, lambda like: build.reference(config, policy, mesh, like, fresh=False))


def _whole(
    config: ml_collections.ConfigDict, policy: DecoderConfig, mesh: Mesh, restore: Callable[[Params], Params | None]
) -> Params:
    """All of a run's decoder, from what `restore` makes of the shape structs of what is trained."""
    _, _, (_, like, _) = build.learner_state(config, policy, mesh)
    trained = {"decoder": restore(like.params)}
    return merge_adapters(policy, join(trained, build.frozen(config, policy, mesh))["decoder"])

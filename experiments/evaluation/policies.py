"""Whose parameters are evaluated: a run's newest checkpoint, published weights, or what a run's training began with."""

from __future__ import annotations

import dataclasses
import filecmp
import functools
import hashlib
import math
import os
from collections.abc import Callable

import jax
import ml_collections
import numpy as np
from jax.sharding import Mesh

from agentr1_jax.policy import weights
from agentr1_jax.policy.config import DecoderConfig, Lora
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.params import join, merge_adapters
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.errors import UserError
from agentr1_jax.text.tokenizer import Tokenizer
from configs import base
from experiments import build, inherited
from experiments.export_hf import stored_config


@dataclasses.dataclass(frozen=True)
class Source:
    """Where parameters come from.

    Attributes:
      name: for the record.
      load: (tokenizer, mesh) -> the decoder, adapters merged, on the mesh.
    """

    name: str
    load: Callable[[Tokenizer, Mesh], Params]


def is_run(source: str) -> bool:
    """Whether a folder is that of a run of `experiments.train`."""
    return os.path.isfile(os.path.join(source, "config.json")) and os.path.isdir(os.path.join(source, "checkpoints"))


def evaluated_config(given: ml_collections.ConfigDict | None, source: str) -> ml_collections.ConfigDict:
    """The config of an evaluation: that of the run, or the given one with the policy and tokenizer of the source.

    Args:
      given: of `--config`; None without one.
      source: a run's folder, weights, or "" for the given config alone.

    Raises:
      UserError: weights, or nothing at all, without a config.
    """
    if source and is_run(source):
        stored = stored_config(source)
        if given is None:
            return stored
        kept = {key: given.policy[key] for key in ("attention", "remat", "dtype")}
        given.policy, given.tokenizer, given.run_dir = stored.policy, stored.tokenizer, source
        given.policy.update(kept)
        return given
    if given is None:
        what = f"{source} is no run with a checkpoint; to evaluate weights" if source else "without --checkpoint=RUN"
        raise UserError(f"{what}, name task, tools and budget with --config=FILE")
    if source:
        for key, value in base.get_config().policy.items():
            if value is None:
                given.policy[key] = None
        given.policy.preset, given.policy.weights, given.tokenizer.path = "", source, source
        given.policy.lora.rank = 0
    elif given.warm_start.run and not given.tokenizer.path:
        given.tokenizer.path = os.path.join(given.warm_start.run, "tokenizer.model")
    return given


def fit_devices(config: ml_collections.ConfigDict) -> None:
    """Changes what a config says of devices and slots to what fits the devices that there are."""
    c, devices = config.rollout, jax.local_device_count()
    config.mesh.tensor = 1
    c.tensor = math.gcd(c.tensor, devices)
    shards = devices // c.tensor
    c.slots, c.parking = -(-c.slots // shards) * shards, -(-c.parking // shards) * shards
    if c.length < config.budget.context_tokens:
        raise UserError(
            f"rollout.length ({c.length}) is less than budget.context_tokens ({config.budget.context_tokens}): a step "
            "would not fit the cache"
        )


def checkpoint(config: ml_collections.ConfigDict, source: str) -> Source:
    """The trained policy: the newest checkpoint of a run, or weights.

    Args:
      config: of the evaluation.
      source: a run's folder, or a weights folder or hub id.

    Raises:
      UserError: there is no checkpoint.
    """
    if is_run(source):
        return Source(f"{source}, checkpoint {newest(source)}", functools.partial(_of_run, source, config))
    if os.path.isfile(os.path.join(source, "config.json")) and os.path.isfile(os.path.join(source, "metrics.jsonl")):
        raise UserError(f"{source}: has no checkpoint yet; let the run come to its first one")
    return Source(source, functools.partial(_of_weights, source, config))


def start(config: ml_collections.ConfigDict, other: str = "") -> Source:
    """The policy as training began.

    It is what `other` names; else the checkpoint of `warm_start.run`, published weights, or the initial parameters of a
    run without a warm start.

    Args:
      config: of the run: its stored one where there is one.
      other: a run's folder or weights, instead of what the config says.

    Raises:
      UserError: the run had a warm start of its own, whose result it has not kept.
    """
    if other:
        return checkpoint(config, other)
    if config.warm_start.run:
        if not is_run(config.warm_start.run):
            raise UserError(
                f"warm_start.run is {config.warm_start.run}, which holds no run any more: name the policy that "
                "training began with by --base=RUN (or WEIGHTS), or leave out the modes that need it"
            )
        return checkpoint(config, config.warm_start.run)
    if config.policy.weights:
        return Source(config.policy.weights, functools.partial(_of_weights, config.policy.weights, config))
    if config.warm_start_updates or config.pretrain.updates:
        raise UserError(
            f"{config.run_dir} began with a warm start of its own (warm_start_updates, pretrain.updates), and what "
            "came of it was not kept. Name a policy to compare with by --base=RUN, such as a run of the warm start "
            "alone (--config.updates=0), or choose --baselines=checkpoint, or --modes=agent"
        )
    return Source(f"initial parameters, seed {config.seed}", functools.partial(_initial, config))


def newest(run: str) -> int:
    """Number of the newest checkpoint of a run. Raises UserError if there is none."""
    return int(os.path.basename(os.path.dirname(_newest_folder(run))))


def digest(params: Params) -> str:
    """A hash of all parameters, the same wherever they lie."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        total.update(np.ascontiguousarray(array).view(np.uint8).data)
    return total.hexdigest()[:16]


def merged(policy: DecoderConfig) -> DecoderConfig:
    """The shape of a policy whose adapters are merged."""
    return dataclasses.replace(policy, lora=Lora())


def _of_run(run: str, config: ml_collections.ConfigDict, tokenizer: Tokenizer, mesh: Mesh) -> Params:
    """The decoder of a run's newest checkpoint; its critic and its optimizer are not looked at."""
    stored = stored_config(run)
    _check_same_policy(run, stored, config)
    policy = build.policy(stored, tokenizer)
    _, _, (_, like, _) = build.learner_state(stored, policy, mesh)
    folder = _newest_folder(run)
    try:
        trained = inherited.decoder(run, like.params["decoder"])
    except UserError as error:
        raise UserError(f"{folder}: not the checkpoint of this policy ({_bare(error)})") from error
    return merge_adapters(policy, join({"decoder": trained}, build.frozen(stored, policy, mesh))["decoder"])


def _check_same_policy(run: str, stored: ml_collections.ConfigDict, config: ml_collections.ConfigDict) -> None:
    """Raises UserError where a run's policy or tokenizer is another than the one evaluated."""
    different = inherited.differing(*(dict(configs.flatten(configs.resolve(c))) for c in (config, stored)))
    if different:
        listed = "\n".join(different)
        raise UserError(f"{run} has another policy:\n{listed}\nevaluate it by itself: --checkpoint={run} --modes=agent")
    ours, theirs = (os.path.join(folder, "tokenizer.model") for folder in (config.run_dir, run))
    if os.path.isfile(ours) and os.path.isfile(theirs) and not filecmp.cmp(ours, theirs, shallow=False):
        raise UserError(f"{run} has another tokenizer than {config.run_dir}; evaluate it by itself: --checkpoint={run}")


def _of_weights(source: str, config: ml_collections.ConfigDict, tokenizer: Tokenizer, mesh: Mesh) -> Params:
    try:
        policy = merged(build.policy(config, tokenizer))
        return weights.load(source, policy, functools.partial(shardings, mesh=mesh))
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error


def _initial(config: ml_collections.ConfigDict, tokenizer: Tokenizer, mesh: Mesh) -> Params:
    policy = build.policy(config, tokenizer)
    fresh, _, _ = build.learner_state(config, policy, mesh)
    trained = {"decoder": fresh().params["decoder"]}
    return merge_adapters(policy, join(trained, build.frozen(config, policy, mesh))["decoder"])


def _newest_folder(run: str) -> str:
    try:
        return inherited.newest_checkpoint(run)
    except UserError as error:
        raise UserError(_bare(error)) from error


def _bare(error: UserError) -> str:
    """The message without the key that `experiments.inherited` writes before it."""
    return str(error).removeprefix("warm_start.run: ")

"""Policies of an evaluation: a run's newest checkpoint, published weights, or the policy that training began with."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import DecoderConfig, LoraConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.runtime import config as configs
from agentr1_jax.text.tokenizer import Tokenizer, Vocabulary, read_vocabulary
from agentr1_jax.train import build
from agentr1_jax.train.restore import has_reference, load_run_decoder, newest_checkpoint, reference_decoder
from agentr1_jax.train.settings import Settings
from experiments.setup import (
    Config,
    change_config,
    complete,
    differing_policy_keys,
    is_run,
    read_run,
    read_settings,
    with_policy_of,
    with_weights,
)


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of parameters.

    Attributes:
      name: for the record.
      load: (tokenizer, mesh) -> the decoder, adapters merged, on the mesh.
    """

    name: str
    load: Callable[[Tokenizer, Mesh], Params]


def find_config(config: Config | None, source: str) -> Config:
    """Return the config of an evaluation: that of the run, or `config` with the policy and tokenizer of the source.

    Args:
      config: config of `--config`; None without one.
      source: a run folder, weights, or "" for the config alone.

    Raises:
      UserError: weights, or nothing at all, without a config.
    """
    if is_run(source):
        stored = read_run(source)
        return stored if config is None else with_policy_of(config, stored)
    if config is None:
        what = f"{source} is no run with a checkpoint; to evaluate weights" if source else "without --checkpoint=RUN"
        raise UserError(f"{what}, name task, tools and budget with --config=FILE")
    if source:
        return with_weights(config, source)
    settings = read_settings(config)
    path = settings.tokenizer.path
    if settings.warm_start.init_from and not path:
        path = os.path.join(settings.warm_start.init_from, "tokenizer.model")
    return change_config(config, {"tokenizer.path": path})


def trained_policy(config: Config, source: str) -> Source:
    """Return the trained policy: the newest checkpoint of a run, or weights.

    Args:
      config: config of the evaluation.
      source: a run folder, or a weights folder or hub id.

    Raises:
      UserError: there is no checkpoint.
    """
    if is_run(source):
        number = os.path.basename(newest_checkpoint(source))
        return Source(f"{source}, checkpoint {number}", functools.partial(_load_run, source, config))
    if all(files.is_file(os.path.join(source, name)) for name in ("config.json", "metrics.jsonl")):
        raise UserError(f"{source}: has no checkpoint yet; let the run come to its first one")
    return Source(source, functools.partial(_load_weights, source, read_settings(config)))


def first_policy(config: Config, other: str = "", *, source: str = "") -> Source:
    """Return the policy that training began with.

    It is what `other` names; else the checkpoint of `warm_start.init_from`, published weights, or the initial
    parameters of a run without a warm start. Where the warm start was the run's own, or that of a run that is gone, it
    is the reference of the KL that the run has stored.

    Args:
      config: config of the training: the stored one where there is a run.
      other: a run folder or weights, instead of what the config says.
      source: what is evaluated: a run folder, or weights; "" where nothing has been trained yet.

    Raises:
      UserError: the result of a warm start is needed that is not stored, or nothing says what weights were made from.
    """
    if other:
        return trained_policy(config, other)
    settings = read_settings(config)
    init_from, weights = settings.warm_start.init_from, settings.policy.weights
    if is_run(init_from):
        return trained_policy(config, init_from)
    run = source if is_run(source) else ""
    own = not weights and bool(settings.warm_start.updates or settings.pretrain.updates)
    if run and (own or init_from) and has_reference(run):
        return Source(f"{run}, reference of its KL", functools.partial(_load_reference, run, settings))
    if init_from:
        raise UserError(
            f"warm_start.init_from is {init_from}, which holds no run any more: name the policy that training began "
            "with by --base=RUN (or WEIGHTS), or leave out the modes that need it"
        )
    if source and not run and not weights:
        raise UserError(
            f"nothing says what the training of {source} began with; name it by --base=RUN (or WEIGHTS), or choose "
            "--baselines=checkpoint, or --modes=agent"
        )
    if own:
        began = f"{run} began with a warm start" if run else "training by this config begins with a warm start"
        raise UserError(
            f"{began} of its own (warm_start.updates, pretrain.updates), and what came of it was not kept. Name a "
            "policy to compare with by --base=RUN, such as a run of the warm start alone (--config.updates=0), or "
            "choose --baselines=checkpoint, or --modes=agent"
        )
    name = weights or f"initial parameters, seed {settings.run.seed}"
    return Source(name, functools.partial(_init_decoder, settings))


def hash_params(params: Params) -> str:
    """Return a hash of all parameters, the same wherever they lie."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        total.update(np.ascontiguousarray(array).view(np.uint8).data)
    return total.hexdigest()[:16]


def without_adapters(policy: DecoderConfig) -> DecoderConfig:
    """Return the shape of a policy whose adapters are merged."""
    return dataclasses.replace(policy, lora=LoraConfig())


def _load_run(run: str, config: Config, tokenizer: Tokenizer, mesh: Mesh) -> Params:
    """Load the decoder of a run's newest checkpoint; refuse another policy or tokenizer than that of the evaluation."""
    config, stored = (complete(x, jax.devices()) for x in (config, read_run(run)))
    different = differing_policy_keys(config, configs.resolve(stored))
    if different:
        listed = "\n".join(different)
        raise UserError(f"{run} has another policy:\n{listed}\nevaluate it by itself: --checkpoint={run} --modes=agent")
    settings = read_settings(stored)
    own = build.make_tokenizer(settings, None, resumes=True)
    _check_same_tokenizer(run, read_vocabulary(own.name), tokenizer)
    policy = build.make_policy(settings, tokenizer)
    return load_run_decoder(run, policy, mesh, build.make_frozen(settings, policy, mesh))


def _load_weights(source: str, settings: Settings, tokenizer: Tokenizer, mesh: Mesh) -> Params:
    """Load the decoder of published weights, in the shape of the evaluated policy."""
    try:
        other = read_vocabulary(source)
    except (ValueError, FileNotFoundError) as error:
        logging.warning("%s has no tokenizer to compare with that of the evaluation (%s)", source, error)
    else:
        _check_same_tokenizer(source, other, tokenizer)
    return build.load_decoder(source, without_adapters(build.make_policy(settings, tokenizer)), mesh)


def _check_same_tokenizer(source: str, other: Vocabulary, ours: Tokenizer) -> None:
    """Raise UserError where the ids of a policy mean other texts than those of the evaluation."""
    if difference := other.difference(read_vocabulary(ours.name)):
        raise UserError(
            f"{source} has another tokenizer than {ours.name}: {difference}; evaluate it alone: --checkpoint={source}"
        )


def _init_decoder(settings: Settings, tokenizer: Tokenizer, mesh: Mesh) -> Params:
    """Make the decoder that training starts from: published weights or random parameters; new adapters add 0."""
    return build.make_decoder(settings, without_adapters(build.make_policy(settings, tokenizer)), mesh)


def _load_reference(run: str, settings: Settings, tokenizer: Tokenizer, mesh: Mesh) -> Params:
    """Load the decoder that RL began with."""
    policy = build.make_policy(settings, tokenizer)
    return reference_decoder(run, policy, mesh, build.make_frozen(settings, policy, mesh))

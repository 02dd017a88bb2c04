"""Whose parameters are evaluated: a run's newest checkpoint, published weights, or what a run's training began with."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable

import jax
import ml_collections
import numpy as np
from absl import logging
from jax.sharding import Mesh

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import DecoderConfig, LoraConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.runtime import config as configs
from agentr1_jax.text.tokenizer import Tokenizer, load_tokenizer
from experiments import build, inherited, sources
from experiments.sources import is_run, stored_config


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of parameters.

    Attributes:
      name: for the record.
      load: (tokenizer, mesh) -> the decoder, adapters merged, on the mesh.
    """

    name: str
    load: Callable[[Tokenizer, Mesh], Params]


def evaluated_config(given: ml_collections.ConfigDict | None, source: str) -> ml_collections.ConfigDict:
    """The config of an evaluation: that of the run, or a copy of the given one with policy and tokenizer of the source.

    Args:
      given: of `--config`; None without one.
      source: a run's folder, weights, or "" for the given config alone.

    Raises:
      UserError: weights, or nothing at all, without a config.
    """
    if is_run(source):
        stored = stored_config(source)
        if given is None:
            return stored
        config = given.copy_and_resolve_references()
        config.policy, config.tokenizer, config.run_dir = stored.policy, stored.tokenizer, source
        config.policy.update({key: given.policy[key] for key in ("attention", "remat", "dtype")})
        return config
    if given is None:
        what = f"{source} is no run with a checkpoint; to evaluate weights" if source else "without --checkpoint=RUN"
        raise UserError(f"{what}, name task, tools and budget with --config=FILE")
    if source:
        return sources.with_weights(given, source)
    config = given.copy_and_resolve_references()
    if config.warm_start.init_from and not config.tokenizer.path:
        config.tokenizer.path = os.path.join(config.warm_start.init_from, "tokenizer.model")
    return config


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
    if all(files.is_file(os.path.join(source, name)) for name in ("config.json", "metrics.jsonl")):
        raise UserError(f"{source}: has no checkpoint yet; let the run come to its first one")
    return Source(source, functools.partial(_of_weights, source, config))


def start(config: ml_collections.ConfigDict, other: str = "", *, source: str = "") -> Source:
    """The policy as training began.

    It is what `other` names; else the checkpoint of `warm_start.init_from`, published weights, or the initial
    parameters of a run without a warm start. Where the warm start was the run's own, or that of a run that is gone, it
    is the reference of the KL that the run has kept.

    Args:
      config: of the training: the run's stored one where there is a run.
      other: a run's folder or weights, instead of what the config says.
      source: what is evaluated: a run's folder, or weights; "" where nothing has been trained yet.

    Raises:
      UserError: a warm start's result is needed that nothing has kept, or nothing says what weights were made from.
    """
    if other:
        return checkpoint(config, other)
    if is_run(config.warm_start.init_from):
        return checkpoint(config, config.warm_start.init_from)
    run = source if is_run(source) else ""
    own = not config.policy.weights and bool(config.warm_start.updates or config.pretrain.updates)
    if run and (own or config.warm_start.init_from) and sources.has_reference(run):
        return Source(f"{run}, reference of its KL", functools.partial(_of_reference, config))
    if config.warm_start.init_from:
        raise UserError(
            f"warm_start.init_from is {config.warm_start.init_from}, which holds no run any more: name the policy that "
            "training began with by --base=RUN (or WEIGHTS), or leave out the modes that need it"
        )
    if source and not run and not config.policy.weights:
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
    name = config.policy.weights or f"initial parameters, seed {config.seed}"
    return Source(name, functools.partial(_begun, config))


def newest(run: str) -> int:
    """Number of the newest checkpoint of a run. Raise UserError if there is none."""
    return int(os.path.basename(inherited.newest_checkpoint(run)))


def digest(params: Params) -> str:
    """A hash of all parameters, the same wherever they lie."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        total.update(np.ascontiguousarray(array).view(np.uint8).data)
    return total.hexdigest()[:16]


def merge_adapters(policy: DecoderConfig) -> DecoderConfig:
    """The shape of a policy whose adapters are merged."""
    return dataclasses.replace(policy, lora=LoraConfig())


def _of_run(run: str, config: ml_collections.ConfigDict, tokenizer: Tokenizer, mesh: Mesh) -> Params:
    """The decoder of a run's newest checkpoint."""
    stored = stored_config(run)
    _check_same_policy(run, stored, config)
    _check_same_tokenizer(run, sources.run_tokenizer(stored), tokenizer)
    return sources.newest_decoder(stored, build.policy(stored, tokenizer), mesh)


def _check_same_policy(run: str, stored: ml_collections.ConfigDict, config: ml_collections.ConfigDict) -> None:
    """Raise UserError where the keys of a run's policy or tokenizer are others than those evaluated."""
    different = inherited.differing(*(dict(configs.flatten(configs.resolve(c))) for c in (config, stored)))
    if different:
        listed = "\n".join(different)
        raise UserError(f"{run} has another policy:\n{listed}\nevaluate it by itself: --checkpoint={run} --modes=agent")


def _of_weights(source: str, config: ml_collections.ConfigDict, tokenizer: Tokenizer, mesh: Mesh) -> Params:
    """The decoder of published weights, in the shape of the config."""
    try:
        theirs = load_tokenizer(source)
    except (ValueError, FileNotFoundError) as error:
        logging.warning("%s has no tokenizer to compare with that of the evaluation (%s)", source, error)
    else:
        _check_same_tokenizer(source, theirs, tokenizer)
    return build.published(source, merge_adapters(build.policy(config, tokenizer)), mesh)


def _check_same_tokenizer(source: str, theirs: Tokenizer, ours: Tokenizer) -> None:
    """Raise UserError where the ids of a policy mean other texts than those of the evaluation."""
    ids = np.arange(max(theirs.vocab_size, ours.vocab_size))
    if dict(theirs.added) != dict(ours.added) or theirs.decode(ids) != ours.decode(ids):
        raise UserError(f"{source} has another tokenizer than {ours.name}; evaluate it alone: --checkpoint={source}")


def _begun(config: ml_collections.ConfigDict, tokenizer: Tokenizer, mesh: Mesh) -> Params:
    """Return the start of training without a warm start: published weights or random parameters; new adapters add 0."""
    return build.decoder(config, merge_adapters(build.policy(config, tokenizer)), mesh)


def _of_reference(config: ml_collections.ConfigDict, tokenizer: Tokenizer, mesh: Mesh) -> Params:
    return sources.reference_decoder(config, build.policy(config, tokenizer), mesh)

"""Parameters that runs have stored: those of the newest checkpoint, and the reference of the KL."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.params import cast_for_compute, init_params, join, merge_adapters, split
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime.checkpoint import Checkpoints, find_all_intact, find_newest_intact, sharded_shapes
from agentr1_jax.runtime.compile_cache import cached_jit
from agentr1_jax.train.settings import Settings

REFERENCE = "reference"
"""Folder of a run that holds the reference of its KL."""


def newest_checkpoint(run: str, prefix: str = "") -> str:
    """Return the folder of the newest intact checkpoint of a run.

    Args:
      run: run folder.
      prefix: of the message of an error: the key that names the run.

    Raises:
      UserError: there is none.
    """
    folder = os.path.join(run, "checkpoints")
    number = find_newest_intact(folder)[0]
    if number is None:
        raise UserError(f"{prefix}{run}: has no checkpoint yet; let that run come to its first one")
    return files.absolute_path(os.path.join(folder, str(number)))


def checkpoint_before(run: str, update: int) -> str:
    """Return the folder of the intact checkpoint that is nearest before an RL update; of the newest if none is before.

    Args:
      run: run folder.
      update: of RL, counted from 0; a checkpoint after as many updates has the parameters that it starts from.

    Raises:
      UserError: there is no checkpoint.
    """
    newest = newest_checkpoint(run)
    folder = os.path.dirname(newest)
    for number in find_all_intact(folder):
        checkpoint = os.path.join(folder, str(number))
        record = _read_record(checkpoint)
        if record.get("phase") == "rl" and record.get("update", 0) <= update:
            return checkpoint
    return newest


def _read_record(checkpoint: str) -> dict[str, Any]:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return reader.restore(os.path.join(checkpoint, "record"))


def restore_decoder(run: str, like: Params, prefix: str = "") -> Params:
    """Restore what is trained of the decoder in the newest checkpoint of a run; see `restore_params`."""
    return restore_params(run, {"decoder": like}, prefix)[0]["decoder"]


def restore_params(
    run: str, like: Params, prefix: str = "", checkpoint: str | None = None
) -> tuple[Params, dict[str, Any]]:
    """Restore parameters from a checkpoint of a run, without its optimizer state.

    Args:
      run: run folder.
      like: shape structs with shardings, to restore into; parameters that they leave out are not read.
      prefix: of the message of an error: the key that names the run.
      checkpoint: folder of the checkpoint; the newest one unless given.

    Returns:
      the parameters, and the record of the run's progress.

    Raises:
      UserError: there is no checkpoint, or it does not hold them.
    """
    checkpoint = checkpoint or newest_checkpoint(run, prefix)
    path = os.path.join(checkpoint, "state")
    tree = {"params": like}
    arguments = ocp.args.PyTreeRestore(
        item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            params = reader.restore(path, args=arguments)["params"]
        record = _read_record(checkpoint)
    except (ValueError, TypeError) as error:
        raise UserError(f"{prefix}{path}: {str(error).partition('. ')[0]}") from error
    # A leaf that the checkpoint lacks comes back as it was asked for.
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise UserError(f"{prefix}{path}: lacks parameters of this policy")
    return params, record


def load_run_decoder(run: str, policy: DecoderConfig, mesh: Mesh, frozen: Params) -> Params:
    """Load the whole decoder of a run's newest checkpoint, adapters merged with the `frozen` weights under them.

    Raises:
      UserError: there is no checkpoint, or it does not hold this decoder.
    """
    like = _with_shardings(_trained_shapes(policy), mesh)
    return _merge(policy, restore_decoder(run, like), frozen)


def has_reference(run: str) -> bool:
    """Return whether a run has stored the decoder that RL began with; runs with a KL term do."""
    return any(name.isdecimal() for name in files.list_names(os.path.join(run, REFERENCE)))


def reference_decoder(run: str, policy: DecoderConfig, mesh: Mesh, frozen: Params) -> Params:
    """Load the whole decoder that RL began with, in compute dtype. Raises UserError if the run has not stored it."""
    shapes = jax.eval_shape(functools.partial(cast_for_compute, policy), _trained_shapes(policy))
    stored = _read_reference(run, _with_shardings(shapes, mesh))
    if stored is None:
        raise UserError(f"{run}/{REFERENCE} is gone, the policy that RL began with; restore it")
    return _merge(policy, stored, frozen)


def make_reference(
    settings: Settings, policy: DecoderConfig, mesh: Mesh, params: Params, *, first: bool
) -> Params | None:
    """Return the decoder's trained parameters as RL starts, in compute dtype; None where neither KL nor probes need it.

    They are stored in the run folder, beside the checkpoints; unless RL starts now (`first`), those are read.

    Raises:
      UserError: a resumed run has lost them.
    """
    if not settings.needs_reference:
        return None
    run, cast = settings.run.run_dir, functools.partial(cast_for_compute, policy)
    shapes = jax.eval_shape(cast, params["decoder"])
    stored = _read_reference(run, _with_shardings(shapes, mesh))
    if stored is not None:
        return stored
    if not first:
        raise UserError(f"{run}/{REFERENCE} is gone, the policy that RL began with; restore it")
    layout = shardings(shapes, mesh)
    copy = cached_jit(lambda decoder: jax.tree.map(jnp.copy, cast(decoder)), mesh, out_shardings=layout)
    reference = copy(params["decoder"])
    with contextlib.closing(Checkpoints(run, keep=1, name=REFERENCE)) as checkpoints:
        checkpoints.save(0, reference, {})
    return reference


def _read_reference(run: str, like: Params) -> Params | None:
    with contextlib.closing(Checkpoints(run, keep=1, name=REFERENCE)) as checkpoints:
        restored = checkpoints.restore(like)
    return None if restored is None else restored[0]


def _trained_shapes(policy: DecoderConfig) -> Params:
    return jax.eval_shape(lambda key: split(policy, init_params(policy, key))[0]["decoder"], jax.random.key(0))


def _with_shardings(shapes: Params, mesh: Mesh) -> Params:
    return sharded_shapes(shapes, shardings(shapes, mesh))


def _merge(policy: DecoderConfig, trained: Params, frozen: Params) -> Params:
    return merge_adapters(policy, join({"decoder": trained}, frozen)["decoder"])

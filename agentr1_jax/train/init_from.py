"""Parameters of another run: those of its newest checkpoint, or the reference of its KL."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.params import cast_for_compute, init_params, join, merge_adapters, split
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime.checkpoint import Checkpoints, find_newest_intact, sharded_shapes

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


def restore_decoder(run: str, like: Params, prefix: str = "") -> Params:
    """Restore what is trained of the decoder in the newest checkpoint of a run; see `restore_params`."""
    return restore_params(run, {"decoder": like}, prefix)[0]["decoder"]


def restore_params(run: str, like: Params, prefix: str = "") -> tuple[Params, dict[str, Any]]:
    """Restore parameters from the newest checkpoint of a run, without its optimizer state.

    Args:
      run: run folder.
      like: shape structs with shardings, to restore into; parameters that they leave out are not read.
      prefix: of the message of an error: the key that names the run.

    Returns:
      the parameters, and the record of the run's progress.

    Raises:
      UserError: the checkpoint does not hold them.
    """
    checkpoint = newest_checkpoint(run, prefix)
    path = os.path.join(checkpoint, "state")
    tree = {"params": like}
    arguments = ocp.args.PyTreeRestore(
        item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            params = reader.restore(path, args=arguments)["params"]
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            record = reader.restore(os.path.join(checkpoint, "record"))
    except (ValueError, TypeError) as error:
        raise UserError(f"{prefix}{path}: {str(error).partition('. ')[0]}") from error
    # A leaf that the checkpoint lacks comes back as it was asked for.
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise UserError(f"{prefix}{path}: lacks parameters of this policy")
    return params, record


def load_run_decoder(run: str, policy: DecoderConfig, mesh: Mesh, frozen: Params) -> Params:
    """Load the whole decoder of a run's newest checkpoint, adapters merged.

    Args:
      run: run folder.
      policy: shape of the decoder, with its adapters.
      mesh: devices that the parameters are spread over.
      frozen: parameters that LoRA does not train, as `build.make_frozen` makes them; empty without LoRA.

    Raises:
      UserError: there is no checkpoint, or it does not hold this decoder.
    """
    return _merge(policy, restore_decoder(run, _add_shardings(_trained_shapes(policy), mesh)), frozen)


def has_reference(run: str) -> bool:
    """Return whether a run has stored the decoder that RL began with; runs with a KL term do."""
    return any(name.isdecimal() for name in files.list_names(os.path.join(run, REFERENCE)))


def reference_decoder(run: str, policy: DecoderConfig, mesh: Mesh, frozen: Params) -> Params:
    """Load the whole decoder that RL began with, in compute dtype; see `load_run_decoder` for the arguments.

    Raises:
      UserError: the run has not stored it.
    """
    like = jax.eval_shape(lambda decoder: cast_for_compute(policy, decoder), _trained_shapes(policy))
    with contextlib.closing(Checkpoints(run, keep=1, name=REFERENCE)) as stored:
        restored = stored.restore(_add_shardings(like, mesh))
    if restored is None:
        raise UserError(f"{run}/{REFERENCE} is gone, the policy that RL began with; restore it")
    return _merge(policy, restored[0], frozen)


def _trained_shapes(policy: DecoderConfig) -> Params:
    return jax.eval_shape(lambda key: split(policy, init_params(policy, key))[0]["decoder"], jax.random.key(0))


def _add_shardings(shapes: Params, mesh: Mesh) -> Params:
    return sharded_shapes(shapes, shardings(shapes, mesh))


def _merge(policy: DecoderConfig, trained: Params, frozen: Params) -> Params:
    return merge_adapters(policy, join({"decoder": trained}, frozen)["decoder"])

"""Start from another run: parameters of its newest checkpoint."""

from __future__ import annotations

import os
from typing import Any

import jax
import orbax.checkpoint as ocp

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.policy.decoder import Params
from agentr1_jax.runtime.checkpoint import find_newest_intact


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

"""What a run takes from another one in place of its own warm start (`warm_start.init_from`): tokenizer and decoder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
import orbax.checkpoint as ocp

from agentr1_jax import buckets, files
from agentr1_jax.errors import UserError
from agentr1_jax.policy.decoder import Params
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.checkpoint import find_newest_intact
from agentr1_jax.runtime.run_folder import RunFolder

SAME = ("policy.", "tokenizer.")
KEY = "warm_start.init_from: "
MAY_DIFFER = ("policy.attention", "policy.remat")
"""How the policy is computed, not what it is."""


def check(config: ml_collections.ConfigDict) -> None:
    """Refuses a `warm_start.init_from` that this run cannot start from; reads its config, and no more.

    Raises:
      UserError: no such run, one that is not finished or lacks its tokenizer, another policy (the differing keys are
        listed), or a run that would do nothing but a warm start itself.
    """
    source = config.warm_start.init_from
    if config.control:
        raise UserError("control learns from demonstrations alone; set warm_start.init_from='' or control=False")
    if files.same_path(source, config.run_dir):
        raise UserError(f"warm_start.init_from is {source}, the run's own folder; name the run that RL starts from")
    buckets.check_reachable(source, "warm_start.init_from")
    try:
        theirs = dict(configs.flatten(RunFolder(source).read_config()))
    except UserError as error:
        raise UserError(f"{KEY}{error}") from error
    different = differing(dict(configs.flatten(configs.resolve(config))), theirs)
    if different:
        listed = "\n".join(different)
        raise UserError(f"{KEY}{source} has another policy:\n{listed}\nset them to what that run has")
    if not config.tokenizer.path and not files.is_file(os.path.join(source, "tokenizer.model")):
        raise UserError(f"{KEY}{source}: its tokenizer.model is gone; restore it")
    newest_checkpoint(source, KEY)
    if not files.is_file(os.path.join(source, "summary.json")):
        raise UserError(
            f"{KEY}{source} is not finished (it has no summary.json): its policy is half trained; let it come to its "
            "end first, by the command that started it"
        )


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The keys that make two runs' policies or tokenizers different things, a line each, from flat configs."""
    keys = [key for key in sorted(ours.keys() | theirs.keys()) if key.startswith(SAME) and key not in MAY_DIFFER]
    if ours.get("policy.lora.rank") and not ours.get("policy.weights"):
        keys.append("seed")  # The frozen random weights under the adapters are made from it.
    missing = "(no such key)"
    return [
        f"  {key}: {theirs.get(key, missing)!r} there, {ours.get(key, missing)!r} here"
        for key in keys
        if ours.get(key, missing) != theirs.get(key, missing)
    ]


def newest_checkpoint(source: str, prefix: str = "") -> str:
    """Folder of the newest intact checkpoint of a run. Raises UserError, with its message after `prefix`, if there is
    none."""
    folder = os.path.join(source, "checkpoints")
    step = find_newest_intact(folder)[0]
    if step is None:
        raise UserError(f"{prefix}{source}: has no checkpoint yet; let that run come to its first one")
    return files.absolute_path(os.path.join(folder, str(step)))


def decoder(source: str, like: Params, prefix: str = "") -> Params:
    """What is trained of the decoder in the newest checkpoint of the run in `source`; its critic is not looked at.

    Args:
      source: folder of a run.
      like: shape structs with shardings, to restore into.
      prefix: of the message of an error: the key that names the run.

    Raises:
      UserError: the checkpoint does not hold such a decoder.
    """
    return restored(source, {"decoder": like}, prefix)[0]["decoder"]


def restored(source: str, like: Params, prefix: str = "") -> tuple[Params, dict[str, Any]]:
    """Parameters in the newest checkpoint of a run, and its record; the optimizer's state is not looked at.

    Args:
      source: folder of a run.
      like: shape structs with shardings, to restore into; what they leave out is not read.
      prefix: of the message of an error: the key that names the run.

    Raises:
      UserError: the checkpoint does not hold them.
    """
    checkpoint = newest_checkpoint(source, prefix)
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

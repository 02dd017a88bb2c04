"""Writes a run's policy as a Hugging Face folder, which `transformers` and what is built on it load.

    python -m experiments.export_hf RUN OUT [--dtype=bfloat16]

The newest checkpoint of RUN, with adapters merged: safetensors, `config.json`, `generation_config.json`, tokenizer.
A Hugging Face tokenizer goes along whole. Of a SentencePiece tokenizer OUT gets `tokenizer.model`, which this project
reads (`--config.tokenizer.path=OUT`). What transformers 5 makes of that file decodes alike, but has no chat template
and splits the syntax of tool calls into other ids than the policy learned: encode with this project, and give it ids.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import ml_collections
from absl import flags
from rich.console import Console

from agentr1_jax.policy import weights
from agentr1_jax.policy.config import DecoderConfig, Lora
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.params import join, merge_adapters
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime.checkpoint import Checkpoints
from agentr1_jax.runtime.errors import UserError
from agentr1_jax.text.sentencepiece import SentencePieceTokenizer
from agentr1_jax.text.tokenizer import Tokenizer, load_tokenizer
from configs import base
from experiments import build, tasks

DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "of the written tensors; that of the parameters unless given"
)


def main(argv: Sequence[str]) -> None:
    """Exports RUN to OUT."""
    _, run_dir, out = argv
    export(run_dir, out, DTYPE.value)
    Console().print(f"{out} holds the policy of {run_dir}; load it with transformers, or --config.policy.weights={out}")


def export(run_dir: str, out: str, dtype: str | None = None) -> None:
    """Writes the policy of a run's newest checkpoint.

    Args:
      run_dir: the run's folder; where it lies now, whatever its config says.
      out: a folder that does not exist, or is empty.
      dtype: of the written tensors; None for that of the parameters.

    Raises:
      UserError: no such run, no checkpoint yet, an `out` that holds something, a shape that no family has.
    """
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise UserError(f"{out}: exists and is not empty; choose another OUT")
    config = stored_config(run_dir)
    tokenizer = run_tokenizer(config)
    policy = build.policy(config, tokenizer)
    decoder = newest_policy(config, policy)
    try:
        weights.to_hf(policy)
        write_tokenizer(out, tokenizer)
        weights.save(out, dataclasses.replace(policy, lora=Lora()), decoder, dtype=dtype)
    except ValueError as error:
        raise UserError(f"{run_dir} cannot be exported: {error}") from error


def stored_config(run_dir: str) -> ml_collections.ConfigDict:
    """The config of the run in a folder.

    Raises:
      UserError: there is no run, or one of another version of the config.
    """
    path = os.path.join(run_dir, "config.json")
    if not os.path.isfile(path):
        raise UserError(f"{run_dir}: no run (it has no config.json); RUN is the config.run_dir of experiments.train")
    config = base.get_config()
    try:
        with open(path, encoding="utf-8") as lines:
            config.update(json.load(lines))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a config of this version ({str(error.args[0]).partition('. ')[0]})") from error
    config.run_dir = run_dir
    return config


def run_tokenizer(config: ml_collections.ConfigDict) -> Tokenizer:
    """The tokenizer of a run; where the run trained its own, the task's data need not be here."""
    own = os.path.join(config.run_dir, "tokenizer.model")
    return (
        load_tokenizer(own) if os.path.exists(own) else build.tokenizer(config, tasks.make_task(config), resumes=True)
    )


def newest_policy(config: ml_collections.ConfigDict, policy: DecoderConfig) -> Params:
    """The decoder of the newest checkpoint, adapters merged, spread over the devices that there are.

    Raises:
      UserError: there is no checkpoint.
    """
    if not os.path.isdir(os.path.join(config.run_dir, "checkpoints")):
        raise UserError(f"{config.run_dir}: has no checkpoint yet; let the run come to its first one")
    mesh = meshes.learner_mesh(1, jax.device_count(), 1)
    _, _, (_, like, _) = build.learner_state(config, policy, mesh)
    checkpoints = Checkpoints(config.run_dir, config.checkpoints_kept)
    try:
        restored = checkpoints.restore(like)
    finally:
        checkpoints.close()
    if restored is None:
        raise UserError(f"{config.run_dir}: has no checkpoint yet; let the run come to its first one")
    trained = {"decoder": restored[0].params["decoder"]}
    return merge_adapters(policy, join(trained, build.frozen(config, policy, mesh))["decoder"])


def write_tokenizer(out: str, tokenizer: Tokenizer) -> None:
    """The tokenizer's files, and the ids that end and pad a text."""
    os.makedirs(out, exist_ok=True)
    if isinstance(tokenizer, SentencePieceTokenizer):
        shutil.copyfile(tokenizer.name, os.path.join(out, "tokenizer.model"))
    else:
        import transformers  # Takes a second.

        transformers.AutoTokenizer.from_pretrained(tokenizer.name).save_pretrained(out)
    stops = list(tokenizer.stop_ids)
    record = {"eos_token_id": stops if len(stops) > 1 else stops[0], "pad_token_id": tokenizer.pad_id}
    Path(out, "generation_config.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    configs.run_main(main, arguments=("RUN", "OUT"))

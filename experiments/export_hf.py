"""Write a run's policy as a Hugging Face folder, which `transformers` loads.

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
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags
from rich.console import Console

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.policy import weights
from agentr1_jax.policy.config import LoraConfig
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.text.sentencepiece import SentencePieceTokenizer
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.train import build
from agentr1_jax.train.restore import load_run_decoder
from experiments.setup import read_run, read_settings

configs.define_trust_flag()
DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "of the written tensors; that of the parameters unless given"
)


def main(argv: Sequence[str]) -> None:
    """Export RUN to OUT."""
    _, run_dir, out = argv
    export(run_dir, out, DTYPE.value)
    told = f"{out} holds the policy of {run_dir}; load it with transformers, or --config.policy.weights={out}"
    Console().print(told, markup=False, highlight=False, soft_wrap=True)


def export(run_dir: str, out: str, dtype: str | None = None) -> None:
    """Write the policy of a run's newest checkpoint.

    Args:
      run_dir: the run's folder at its present path, which may differ from that of its config.
      out: a folder that does not exist, or is empty.
      dtype: dtype of the written tensors; None for that of the parameters.

    Raises:
      UserError: no such run, no checkpoint yet, an `out` that holds something, a shape that no family has.
    """
    if files.is_remote(out):
        raise UserError(f"{out}: OUT must be a local folder; copy it to the bucket afterwards")
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise UserError(f"{out}: exists and is not empty; choose another OUT")
    settings = read_settings(read_run(run_dir))
    tokenizer = build.make_tokenizer(settings, None, resumes=True)
    policy, mesh = build.make_policy(settings, tokenizer), meshes.learner_mesh(1, jax.device_count(), 1)
    decoder = load_run_decoder(run_dir, policy, mesh, build.make_frozen(settings, policy, mesh))
    try:
        weights.to_hf(policy)
        write_tokenizer(out, tokenizer)
        weights.save(out, dataclasses.replace(policy, lora=LoraConfig()), decoder, dtype=dtype)
    except ValueError as error:
        raise UserError(f"{run_dir} cannot be exported: {error}") from error


def write_tokenizer(out: str, tokenizer: Tokenizer) -> None:
    """Write the tokenizer's files, and the ids that end and pad a text."""
    os.makedirs(out, exist_ok=True)
    if isinstance(tokenizer, SentencePieceTokenizer):
        files.copy(tokenizer.name, os.path.join(out, "tokenizer.model"))
    else:
        import transformers  # Takes a second.

        transformers.AutoTokenizer.from_pretrained(tokenizer.name).save_pretrained(out)
    stops = list(tokenizer.stop_ids)
    record = {"eos_token_id": stops if len(stops) > 1 else stops[0], "pad_token_id": tokenizer.pad_id}
    Path(out, "generation_config.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    configs.run_main(main, arguments=("RUN", "OUT"))

"""Weights of encoders in: Hugging Face folders and hub ids of BERT, RoBERTa and XLM-RoBERTa."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentr1_jax.contrib.dense_retrieval.encoder import EncoderConfig, Params, init_encoder
from agentr1_jax.policy.weights import files, hub
from agentr1_jax.policy.weights.files import Tensor
from agentr1_jax.policy.weights.hf_config import count, number

FAMILIES = ("bert", "roberta", "xlm-roberta")
PREFIX = re.compile(r"^(bert|roberta)\.")
"""What the names begin with where the file holds a model with a head."""

HARMLESS = re.compile(r"^((bert|roberta)\.)?(pooler\.|embeddings\.position_ids$|cls\.|lm_head\.|classifier\.)")
"""Tensors that vectors do not need: heads of the pretraining, and numbers from 0 on."""

OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

_LAYER = "encoder.layer.{layer}"
MODULES: dict[str, str] = {
    "token": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "type": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "layers/query": f"{_LAYER}.attention.self.query",
    "layers/key": f"{_LAYER}.attention.self.key",
    "layers/value": f"{_LAYER}.attention.self.value",
    "layers/out": f"{_LAYER}.attention.output.dense",
    "layers/attention_norm": f"{_LAYER}.attention.output.LayerNorm",
    "layers/up": f"{_LAYER}.intermediate.dense",
    "layers/down": f"{_LAYER}.output.dense",
    "layers/mlp_norm": f"{_LAYER}.output.LayerNorm",
}
"""Our modules and theirs. A kernel of theirs is ours transposed, with heads and their dimensions as one axis."""

LEAVES = {"embedding": "weight", "kernel": "weight", "scale": "weight", "bias": "bias"}


def read_config(path_or_hub_id: str | os.PathLike[str]) -> EncoderConfig:
    """The encoder whose weights lie in a folder or at a hub id; float32.

    Raises:
      FileNotFoundError: there is nothing.
      ValueError: it is of another family, or does what the encoder cannot; the message names file and key.
    """
    file = hub.locate(path_or_hub_id) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent}: not a Hugging Face folder (no config.json); give another")
    return from_hf(files.read_json(file), str(file))


def from_hf(record: Mapping[str, Any], source: str) -> EncoderConfig:
    """The encoder that a `config.json` describes; what it leaves out means what it means to `transformers`.

    Raises:
      ValueError: see `read_config`; `source` is the file's name.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"{source}: not a JSON object; it should be the config.json of a Hugging Face model")
    family = record.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{source}: model_type is {family!r}; encoders that are known are {', '.join(FAMILIES)}: choose a "
            "checkpoint of one of these"
        )
    for key, reason in _refusals(record):
        raise ValueError(f"{source}: {key} is {record[key]!r}, {reason}; choose another checkpoint")
    padding = record.get("pad_token_id", 1)
    if family != "bert" and (not isinstance(padding, int) or padding < 0):
        raise ValueError(f"{source}: pad_token_id is {padding!r}; {family} counts positions from it: complete the file")
    try:
        return EncoderConfig(
            vocab_size=count(record, "vocab_size", source),
            width=count(record, "hidden_size", source),
            layers=count(record, "num_hidden_layers", source),
            heads=count(record, "num_attention_heads", source),
            hidden=count(record, "intermediate_size", source),
            positions=count(record, "max_position_embeddings", source),
            first_position=0 if family == "bert" else padding + 1,
            types=count(record, "type_vocab_size", source, 2),
            norm_eps=number(record, "layer_norm_eps", source, 1e-12),
        )
    except ValueError as error:
        raise ValueError(str(error) if source in str(error) else f"{source}: {error}") from error


def _refusals(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, reason) of what the encoder cannot compute."""
    if record.get("hidden_act", "gelu") != "gelu":
        yield "hidden_act", "but only gelu (by the error function) is known"
    if record.get("position_embedding_type", "absolute") != "absolute":
        yield "position_embedding_type", "but only absolute positions are known"
    for key in ("is_decoder", "add_cross_attention"):
        if record.get(key):
            yield key, "but only encoders are known"
    if record.get("quantization_config"):
        yield "quantization_config", "but quantised weights are not read"


def load(path_or_hub_id: str | os.PathLike[str], config: EncoderConfig) -> Params:
    """An encoder's parameters from safetensors, float32, on the host.

    Args:
      path_or_hub_id: see `read_config`.
      config: what `read_config` tells of it.

    Returns:
      the parameters of `encoder.Encoder`, as numpy arrays.

    Raises:
      FileNotFoundError: there is nothing.
      ValueError: a tensor is missing, unexpected or of another shape, or a file is broken; tensor and file are named.
    """
    folder = hub.locate(path_or_hub_id)
    tensors: dict[str, Tensor] = {}
    for name, tensor in files.open_folder(folder, HARMLESS).items():
        short = PREFIX.sub("", name)
        for old, new in OLD_NAMES.items():
            short = short.replace(old, new)
        tensors[short] = tensor
    shapes = jax.eval_shape(lambda key: init_encoder(config, key), jax.random.key(0))
    wanted: set[str] = set()

    def read(keys: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        module, _, leaf = jax.tree_util.keystr(keys, simple=True, separator="/").rpartition("/")
        theirs = f"{MODULES[module]}.{LEAVES[leaf]}"
        inputs = 2 if module == "layers/out" else 1
        if not module.startswith("layers/"):
            wanted.add(theirs)
            return _read(theirs, shape.shape, leaf, inputs, tensors, folder)
        names = [theirs.format(layer=layer) for layer in range(config.layers)]
        wanted.update(names)
        return np.stack([_read(name, shape.shape[1:], leaf, inputs, tensors, folder) for name in names])

    params = jax.tree_util.tree_map_with_path(read, shapes)
    if extra := sorted(tensors.keys() - wanted):
        raise ValueError(
            f"{tensors[extra[0]].file}: tensor {extra[0]!r} is unexpected, one of {len(extra)}: config.json does not "
            "belong to these weights"
        )
    return params


def _read(
    name: str, ours: tuple[int, ...], leaf: str, inputs: int, tensors: Mapping[str, Tensor], folder: Path
) -> np.ndarray:
    """One of their tensors, whole, in the shape of our parameter (of one layer)."""
    if name not in tensors:
        raise ValueError(f"{folder}: tensor {name!r} is missing, which config.json asks for; download the folder again")
    theirs = {
        "embedding": ours,
        "kernel": (math.prod(ours[inputs:]), math.prod(ours[:inputs])),
    }.get(leaf, (math.prod(ours),))
    tensor = tensors[name]
    if tensor.shape != theirs:
        raise ValueError(
            f"{tensor.file}: tensor {name!r} has shape {tensor.shape}; config.json asks for {theirs}: they do not "
            "belong together"
        )
    stored = np.asarray(tensor.read(tuple(slice(0, size) for size in theirs)), np.float32)
    return (stored.T if leaf == "kernel" else stored).reshape(ours)

"""Weights of encoders in: Hugging Face folders of BERT, RoBERTa and XLM-RoBERTa."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentr1_jax.contrib.dense_retrieval.encoder import Encoder, EncoderConfig, Params
from agentr1_jax.policy.weights import files
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


def read_config(folder: Path) -> EncoderConfig:
    """Return the shape of the encoder whose weights lie in a folder; float32.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: it is of another family, or does what the encoder cannot; the message names file and key.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder}: not a Hugging Face folder (no config.json); give another")
    return from_hf(files.read_json(file), str(file))


def from_hf(record: Mapping[str, Any], source: str) -> EncoderConfig:
    """Return the encoder that a `config.json` describes; what it leaves out means what it means to `transformers`.

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
    shape: dict[str, Any] = {
        "vocab_size": count(record, "vocab_size", source),
        "width": count(record, "hidden_size", source),
        "layers": count(record, "num_hidden_layers", source),
        "heads": count(record, "num_attention_heads", source),
        "hidden": count(record, "intermediate_size", source),
        "positions": count(record, "max_position_embeddings", source),
        "first_position": 0 if family == "bert" else padding + 1,
        "types": count(record, "type_vocab_size", source, 2),
        "norm_eps": number(record, "layer_norm_eps", source, 1e-12),
    }
    try:
        return EncoderConfig(**shape)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _refusals(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of what the encoder cannot compute."""
    if record.get("hidden_act", "gelu") != "gelu":
        yield "hidden_act", "but only gelu (by the error function) is known"
    if record.get("position_embedding_type", "absolute") != "absolute":
        yield "position_embedding_type", "but only absolute positions are known"
    for key in ("is_decoder", "add_cross_attention"):
        if record.get(key):
            yield key, "but only encoders are known"
    if record.get("quantization_config"):
        yield "quantization_config", "but quantised weights are not read"


def load(folder: Path, config: EncoderConfig) -> Params:
    """Return the parameters of `Encoder(config)` from the safetensors of a folder, as float32 numpy arrays.

    Raises:
      ValueError: a tensor is missing, unexpected or of another shape, or a file is broken; tensor and file are named.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in files.open_folder(folder, HARMLESS).items():
        short = PREFIX.sub("", name)
        for old, new in OLD_NAMES.items():
            short = short.replace(old, new)
        tensors[short] = tensor
    ids = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(functools.partial(Encoder(config).init, jax.random.key(0)), ids, ids == 0)["params"]
    wanted: set[str] = set()

    def read(keys: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        module, _, leaf = path.rpartition("/")
        theirs = f"{MODULES[module]}.{LEAVES[leaf]}"
        if not module.startswith("layers/"):
            wanted.add(theirs)
            return _read(theirs, path, shape.shape, tensors, folder)
        names = [theirs.format(layer=layer) for layer in range(config.layers)]
        wanted.update(names)
        return np.stack([_read(name, path, shape.shape[1:], tensors, folder) for name in names])

    params = jax.tree_util.tree_map_with_path(read, shapes)
    if extra := sorted(tensors.keys() - wanted):
        raise ValueError(
            f"{tensors[extra[0]].file}: tensor {extra[0]!r} is unexpected, one of {len(extra)}: config.json does not "
            "belong to these weights"
        )
    return params


def _read(name: str, path: str, ours: tuple[int, ...], tensors: Mapping[str, Tensor], folder: Path) -> np.ndarray:
    """Return one of their tensors in the shape of our parameter at `path` (of one layer)."""
    if name not in tensors:
        raise ValueError(f"{folder}: tensor {name!r} is missing, which config.json asks for; download the folder again")
    is_kernel = path.endswith("/kernel")
    inputs = 2 if path == "layers/out/kernel" else 1
    theirs: tuple[int, ...]
    if is_kernel:
        theirs = (math.prod(ours[inputs:]), math.prod(ours[:inputs]))
    else:
        theirs = ours if path.endswith("/embedding") else (math.prod(ours),)
    tensor = tensors[name]
    if tensor.shape != theirs:
        raise ValueError(
            f"{tensor.file}: tensor {name!r} has shape {tensor.shape}; config.json asks for {theirs}: they do not "
            "belong together"
        )
    stored = np.asarray(tensor.read(tuple(slice(0, size) for size in theirs)), np.float32)
    return (stored.T if is_kernel else stored).reshape(ours)

"""Reading of weights from files straight into sharded, stacked arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.weights import files, names
from agentr1_jax.policy.weights.files import Tensor
from agentr1_jax.policy.weights.hf_config import from_hf

HARMLESS = re.compile(r"rotary_emb\.inv_freq$")
"""Tensors of old checkpoints that are not needed: frequencies that follow from the config."""

LISTED = 4
COMPARED_ROWS = 4096
HEAD, EMBEDDING = names.tensor_name("head"), names.tensor_name("embed")


def read_config(path_or_hub_id: str | os.PathLike[str]) -> DecoderConfig:
    """Return the shape of the decoder in a Hugging Face folder or at `owner/name` on the hub; float32, no adapters.

    Raises:
      FileNotFoundError: there is no such folder, or it has no `config.json`.
      ValueError: its `config.json` is not that of a known decoder; see `hf_config.from_hf`.
    """
    file = _locate(path_or_hub_id) / "config.json"
    return from_hf(files.read_json(file), str(file))


def load(path_or_hub_id: str | os.PathLike[str], config: DecoderConfig, layout: Callable[[Params], Any]) -> Params:
    """Return the parameters of `Decoder(config)`, without adapters, from files, placed on devices.

    Each process reads only the slices that its own devices hold, each of them once, casts them to `param_dtype` on the
    host and hands them to the devices one parameter at a time. Beside the arrays themselves the host holds at most this
    process's distinct shards of one parameter (stacked over layers, in `param_dtype`) and its part of one tensor of the
    file (one layer, in the file's dtype). Files are mapped into memory; their pages are the system's to drop.

    Args:
      path_or_hub_id: see `read_config`.
      layout: tree of ShapeDtypeStruct -> tree of NamedSharding, e.g. `functools.partial(shardings, mesh=mesh)`.

    Raises:
      FileNotFoundError: there is no such folder, or it has no `config.json`.
      ValueError: a tensor is missing, unexpected or of another shape, a tied head differs from the embedding, or a file
        is broken; tensor and file are named.
    """
    path = _locate(path_or_hub_id)
    tensors = files.open_folder(path)
    shapes = names.parameter_shapes(config)
    _check(shapes, tensors, config, path)

    def read_parameter(keys: Any, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> jax.Array:
        return _read(jax.tree_util.keystr(keys, simple=True, separator="/"), shape, sharding, tensors)

    return jax.tree_util.tree_map_with_path(read_parameter, shapes, layout(shapes))


def _locate(path_or_hub_id: str | os.PathLike[str]) -> Path:
    path = files.locate(path_or_hub_id)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path}: no Hugging Face folder, since it has no config.json; give another")
    return path


def _check(shapes: Params, tensors: Mapping[str, Tensor], config: DecoderConfig, path: Path) -> None:
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in names.flatten(shapes).items():
        stacked = names.is_stacked(name)
        theirs = names.their_shape(name, shape.shape[1:] if stacked else shape.shape)
        wanted |= {names.tensor_name(name, i): theirs for i in (range(config.layers) if stacked else (None,))}
    if missing := [name for name in wanted if name not in tensors]:
        hint = ' or, if its head is the embedding, set "tie_word_embeddings": true' if HEAD in missing else ""
        raise ValueError(
            f"{path}: {_enumerate_names(missing)} missing, which config.json asks for; download the missing files{hint}"
        )
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{tensors[name].file}: tensor {name!r} has shape {tensors[name].shape}; the config asks for {shape}: "
                "config.json or policy.* do not belong to these weights"
            )
    extra = [name for name in tensors if name not in wanted and not HARMLESS.search(name)]
    if config.tied and HEAD in extra:
        _check_tie(tensors[HEAD], tensors[EMBEDDING])
        extra.remove(HEAD)
    if extra:
        raise ValueError(
            f"{tensors[extra[0]].file}: {_enumerate_names(extra)} unexpected: config.json or policy.* do not belong "
            "to these weights"
        )


def _enumerate_names(tensors: list[str]) -> str:
    more = f" and {len(tensors) - LISTED} more" if len(tensors) > LISTED else ""
    return f"tensors {', '.join(map(repr, tensors[:LISTED]))}{more} are" if tensors[1:] else f"tensor {tensors[0]!r} is"


def _check_tie(head: Tensor, embedding: Tensor) -> None:
    """Refuse a head in the file of a tied model unless it repeats the embedding."""
    rows, width = embedding.shape
    parts = ((slice(i, min(i + COMPARED_ROWS, rows)), slice(0, width)) for i in range(0, rows, COMPARED_ROWS))
    same = head.shape == embedding.shape
    if not same or not all(np.array_equal(head.read(part), embedding.read(part)) for part in parts):
        raise ValueError(
            f"{head.file}: tensor {HEAD!r} differs from {EMBEDDING!r}, though config.json says that they are tied; "
            'set "tie_word_embeddings": false there'
        )


def _read(
    path: str, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding, tensors: Mapping[str, Tensor]
) -> jax.Array:
    """Return one of our parameters."""
    shards: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def read_shard(index: Any) -> np.ndarray:
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape.shape, strict=True))
        if bounds not in shards:  # Devices that hold the same shard share it.
            shards[bounds] = read_part([slice(*b) for b in bounds])
        return shards[bounds]

    def read_part(parts: list[slice]) -> np.ndarray:
        if not names.is_stacked(path):
            return read_layer(None, shape.shape, parts).astype(shape.dtype, order="C")
        # Never written again: a CPU device may use this memory as its own.
        out = np.empty([s.stop - s.start for s in parts], shape.dtype)
        for row, layer in enumerate(range(parts[0].start, parts[0].stop)):
            out[row] = read_layer(layer, shape.shape[1:], parts[1:])
        return out

    def read_layer(layer: int | None, whole: tuple[int, ...], parts: list[slice]) -> np.ndarray:
        return names.read_ours(path, whole, parts, tensors[names.tensor_name(path, layer)].read)

    return jax.make_array_from_callback(shape.shape, sharding, read_shard, shape.dtype)

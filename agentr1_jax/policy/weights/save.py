"""Writing of weights as a folder that `transformers` loads."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.weights import names
from agentr1_jax.policy.weights.files import INDEX, SINGLE
from agentr1_jax.policy.weights.hf_config import to_hf

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Tensor to write: its name in the file, and its path and layer in our parameters."""

    name: str
    path: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    decoder_params: Params,
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: str | None = None,
) -> None:
    """Write `config.json` and safetensors, with an index where one file does not hold them all.

    One tensor (of one layer) at a time is gathered and written. Files get their names when all are complete, and
    `config.json` last.

    Args:
      folder: created if missing; must hold no weights yet.
      config: shape of the decoder.
      decoder_params: parameters of the decoder, adapters merged (`params.merge_adapters`).
      max_shard_bytes: most bytes of tensors in one file; a larger tensor has a file of its own.
      dtype: of the stored tensors; None for that of the parameters.

    Raises:
      ValueError: there are adapters, parameters and config do not belong together, a dtype that safetensors lacks, no
        family has this shape, other processes hold parts of the weights, or the folder holds weights already.
    """
    folder = Path(folder)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    record = to_hf(config) | ({"torch_dtype": dtype} if dtype else {})
    flat = _flat(decoder_params)
    _check(config, flat)
    if stale := [path.name for path in folder.glob("*.safetensors*")]:
        raise ValueError(f"{folder}: holds weights already ({stale[0]}); choose another folder or empty it")
    folder.mkdir(parents=True, exist_ok=True)
    entries = list(_entries(config, flat, dtype))
    shards = _shards(entries, max_shard_bytes)
    count = len(shards)
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE]
    for file, shard in zip(files, shards, strict=True):
        _write(folder / f"{file}.partial", shard, flat)
    for file in files:
        os.replace(folder / f"{file}.partial", folder / file)
    if count > 1:
        weight_map = {entry.name: file for file, shard in zip(files, shards, strict=True) for entry in shard}
        total = sum(entry.bytes for entry in entries)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", record)


def _flat(tree: Params) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}


def _check(config: DecoderConfig, flat: dict[str, Any]) -> None:
    if adapters := [path for path in flat if "lora_" in path]:
        raise ValueError(f"{adapters[0]}: merge the adapters first, by policy.params.merge_adapters")
    shapes = {path: leaf.shape for path, leaf in _flat(names.parameter_shapes(config)).items()}
    for path in sorted(shapes.keys() | flat.keys()):
        given = flat[path].shape if path in flat else None
        if given != shapes.get(path):
            raise ValueError(f"parameter {path} has shape {given}, the config asks for {shapes.get(path)}")
        if not getattr(flat[path], "is_fully_addressable", True):
            raise ValueError(
                f"parameter {path} lies on devices of several processes; save from one that holds it whole"
            )
        if np.dtype(flat[path].dtype).name not in DTYPES:
            raise ValueError(f"parameter {path} is {flat[path].dtype}; choose a dtype among {', '.join(DTYPES)}")


def _entries(config: DecoderConfig, flat: dict[str, Any], dtype: str | None) -> Iterator[_Entry]:
    """In the order of the model: embedding, layer by layer, final norm, head."""

    def entry(path: str, layer: int | None) -> _Entry:
        leaf = flat[path]
        shape = leaf.shape if layer is None else leaf.shape[1:]
        kind = np.dtype(jnp.dtype(dtype or leaf.dtype))
        return _Entry(names.tensor_name(path, layer), path, layer, names.their_shape(path, shape), kind)

    for stacked, paths in itertools.groupby((p for p in names.TABLE if p in flat), names.is_stacked):
        present = list(paths)
        for layer in range(config.layers) if stacked else (None,):
            yield from (entry(path, layer) for path in present)


def _shards(entries: list[_Entry], limit: int) -> list[list[_Entry]]:
    shards: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    return shards


def _write(path: Path, shard: list[_Entry], flat: dict[str, Any]) -> None:
    """One file: length of the header (uint64), the header (JSON), the tensors' bytes.

    `safetensors.save_file` would want all tensors of the file at once, and copy them.
    """
    ends = list(itertools.accumulate(entry.bytes for entry in shard))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry, end in zip(shard, ends, strict=True):
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype.name],
            "shape": list(entry.shape),
            "data_offsets": [end - entry.bytes, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for entry in shard:
            leaf = flat[entry.path]
            ours = np.asarray(leaf if entry.layer is None else leaf[entry.layer])
            theirs = names.to_theirs(entry.path, ours.astype(entry.dtype))
            out.write(theirs.reshape(-1).view(np.uint8).data)


def _write_json(path: Path, record: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    os.replace(partial, path)

"""Writing of weights as a folder that `transformers` loads."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.weights import names
from agentr1_jax.policy.weights.files import INDEX, SINGLE
from agentr1_jax.policy.weights.hf_config import to_hf

DTYPES = ("float64", "float32", "float16", "bfloat16")


def save(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    decoder_params: Params,
    *,
    max_shard_bytes: int = 2_000_000_000,
    dtype: str | None = None,
) -> None:
    """Write `config.json` and safetensors, with an index where one file does not hold them all.

    The tensors of one file at a time are gathered and written. Files get their names when all are complete, and
    `config.json` last.

    Args:
      folder: created if missing; must hold no weights yet.
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
    flat = names.flatten(decoder_params)
    _check(config, flat)
    if stale := [path.name for path in folder.glob("*.safetensors*")]:
        raise ValueError(f"{folder}: holds weights already ({stale[0]}); choose another folder or empty it")
    folder.mkdir(parents=True, exist_ok=True)
    contents: list[list[str]] = []
    total = 0
    for shard in _shards(_tensors(config, flat, dtype), max_shard_bytes):
        save_file(shard, folder / f"{len(contents)}.partial", metadata={"format": "pt"})
        contents.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()
    count = len(contents)
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE for i in range(1, count + 1)]
    for number, file in enumerate(files):
        os.replace(folder / f"{number}.partial", folder / file)
    if count > 1:
        weight_map = {name: file for file, held in zip(files, contents, strict=True) for name in held}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", record)


def _check(config: DecoderConfig, flat: dict[str, Any]) -> None:
    if adapters := [path for path in flat if "lora_" in path]:
        raise ValueError(f"{adapters[0]}: merge the adapters first, by policy.params.merge_adapters")
    shapes = {path: leaf.shape for path, leaf in names.flatten(names.parameter_shapes(config)).items()}
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


def _tensors(config: DecoderConfig, flat: dict[str, Any], dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    """Yield their tensors by name in the order of the model: embedding, layer by layer, final norm, head."""
    for stacked, paths in itertools.groupby((p for p in names.TABLE if p in flat), names.is_stacked):
        present = list(paths)
        for layer in range(config.layers) if stacked else (None,):
            for path in present:
                ours = np.asarray(flat[path] if layer is None else flat[path][layer])
                yield names.tensor_name(path, layer), names.to_theirs(path, ours.astype(jnp.dtype(dtype or ours.dtype)))


def _shards(tensors: Iterable[tuple[str, np.ndarray]], limit: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the tensors of one file after the other."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _write_json(path: Path, record: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    os.replace(partial, path)

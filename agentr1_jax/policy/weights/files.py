"""Tensors in folders of safetensors files, read in parts."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
NOTHING = re.compile(r"(?!)")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Tensor of a checkpoint, not yet read.

    Attributes:
      file: path of its file, for error messages.
      shape: of the whole tensor.
      read: slices with start and stop, one for each axis -> that part, read from the file.
    """

    file: str
    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], np.ndarray]


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
      ValueError: it is not valid JSON.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); download it again") from error


def open_folder(folder: Path, ignored: re.Pattern[str] = NOTHING) -> dict[str, Tensor]:
    """Return all tensors of a folder by name, except those whose name matches `ignored`; only headers are read.

    Raises:
      ValueError: a file is missing, truncated or broken, or holds a tensor that is not floating-point.
    """
    index = folder / INDEX
    if (folder / SINGLE).is_file():  # transformers looks for it first, too.
        return _open_file(folder / SINGLE, ignored)
    if not index.is_file():
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        found = f"it has {', '.join(others[:3])} but no {INDEX}" if others else "it has no *.safetensors"
        raise ValueError(
            f"{folder}: neither {SINGLE} nor {INDEX} ({found}); download the folder again, or save the model with "
            "save_pretrained of transformers"
        )
    tensors: dict[str, Tensor] = {}
    weight_map = _weight_map(index)
    for name in sorted(set(weight_map.values())):
        for key, tensor in _open_file(folder / name, ignored).items():
            if key in tensors:
                raise ValueError(f"{folder / name}: tensor {key!r} is in {tensors[key].file} too; download both again")
            tensors[key] = tensor
    for key, name in weight_map.items():
        if ignored.search(key):
            continue
        if key not in tensors or Path(tensors[key].file).name != name:
            raise ValueError(
                f"{index}: says that tensor {key!r} is in {name}, which does not hold it; download both again"
            )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    record = read_json(index)
    files = record.get("weight_map") if isinstance(record, dict) else None
    names = files.values() if isinstance(files, dict) else ()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"{index}: weight_map must tell a file name for each tensor; download the file again")
    for name in sorted(set(names)):
        if not (index.parent / name).is_file():
            raise ValueError(f"{index}: names {name}, which is not there; download it")
    return dict(files or {})


def _open_file(path: Path, ignored: re.Pattern[str]) -> dict[str, Tensor]:
    try:
        opened = safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: truncated, or no safetensors file ({error}; {path.stat().st_size} bytes); download it again"
        ) from error
    tensors = {}
    for key in opened.keys():
        if ignored.search(key):
            continue
        stored = opened.get_slice(key)
        if stored.get_dtype() not in FLOATS:
            raise ValueError(
                f"{path}: tensor {key!r} is stored as {stored.get_dtype()}; of {', '.join(FLOATS)} only: quantised "
                "checkpoints are not read, choose another"
            )
        tensors[key] = Tensor(str(path), tuple(stored.get_shape()), stored.__getitem__)
    return tensors

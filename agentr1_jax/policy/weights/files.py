"""Folders of weights, here or on the Hugging Face hub, and their tensors, read in parts."""

from __future__ import annotations

import dataclasses
import json
import os
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

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""Weights, configs, and files of tokenizers."""
HUB_SECONDS = 10.0


def locate(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """Return the folder of a path, or of the download of an `owner/name` on the hub, which stays in the hub's cache.

    A path whose parent is a folder here is never looked up on the hub. HF_HUB_OFFLINE=1 keeps to the cache.

    Raises:
      FileNotFoundError: there is no such path, and the hub cannot give it; the message says why.
    """
    spec = os.fspath(path_or_hub_id)
    path = Path(spec).expanduser()
    if path.exists():
        return path
    if not HUB_ID.fullmatch(spec) or path.parent.is_dir():
        raise FileNotFoundError(f"{spec}: no such folder; give a folder with weights, or a hub id (owner/name)")
    import huggingface_hub  # Here, because it is slow to import and most runs have their weights in a folder.
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                spec, allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"], etag_timeout=HUB_SECONDS
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise FileNotFoundError(
            f"{spec}: no such folder here, and the hub could not give it ({type(error).__name__}: {reason}); check "
            "the spelling and the network, log in (`hf auth login`) if access to the model is granted to some only, or "
            "download it elsewhere and give its folder"
        ) from error


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Tensor of a checkpoint, not yet read.

    Attributes:
      file: path of its file, for error messages.
      read: slices with start and stop, one for each axis -> that part, read from the file.
    """

    file: str
    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], np.ndarray]


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises ValueError where it is none."""
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
    weight_map = _read_index(index)
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


def _read_index(index: Path) -> dict[str, str]:
    """Return the file name of each tensor."""
    record = read_json(index)
    weight_map = record.get("weight_map") if isinstance(record, dict) else None
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"{index}: weight_map must tell a file name for each tensor; download the file again")
    for name in sorted(set(names)):
        if not (index.parent / name).is_file():
            raise ValueError(f"{index}: names {name}, which is not there; download it")
    return dict(weight_map or {})


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

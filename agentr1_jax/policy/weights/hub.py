"""Location of weights: a path, or an id on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""Weights, configs, and files of tokenizers."""

TIMEOUT = 10.0


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
                spec, allow_patterns=list(FILES), ignore_patterns=["*/*"], etag_timeout=TIMEOUT
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise FileNotFoundError(
            f"{spec}: no such folder here, and the hub could not give it ({type(error).__name__}: {reason}); check "
            "the spelling and the network, log in (`hf auth login`) if access to the model is granted to some only, or "
            "download it elsewhere and give its folder"
        ) from error

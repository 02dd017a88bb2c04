"""Where the real data are."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder(data_dir: str | os.PathLike[str] = "") -> Path:
    """The folder of real data: `data_dir`, else AGENTR1_DATA, else `../shared/data` beside the project.

    Raises:
      FileNotFoundError: there is no such folder; the message says how to name one.
    """
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(data_dir or os.environ.get("AGENTR1_DATA") or beside)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: no such data folder; set the environment variable AGENTR1_DATA (or data_dir in the config) to "
            "the folder that holds multihop/ and bfcl_v4/"
        )
    return folder

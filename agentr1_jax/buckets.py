"""Access to buckets, with clear errors where `gcsfs` (the extra `gcs`) or the credentials are missing."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

from etils import epath

from agentr1_jax.errors import UserError

PREFIX = "gs://"


@functools.cache
def prepare() -> None:
    """Set up the access to buckets. Raises UserError if the extra `gcs` is not installed."""
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{PREFIX} paths need gcsfs, which is not installed: pip install 'agentr1_jax[gcs]'")
    import fsspec.config

    # TensorStore and other processes write there too, so cached listings would be out of date.
    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    # Where TensorFlow is installed epath would use it instead of gcsfs, and raise other errors.
    os.environ.setdefault("EPATH_USE_TF", "false")


def file_system() -> Any:
    """Return the fsspec file system under epath, for operations that epath lacks."""
    prepare()
    import fsspec

    return fsspec.filesystem("gs")


def check_reachable(where: str | os.PathLike[str], name: str) -> None:
    """Refuse a path in a bucket that cannot be read from this host.

    Args:
      where: path of a file or folder, which need not exist.
      name: config key or flag that holds the path, for the message.

    Raises:
      UserError: the extra `gcs` is not installed, the bucket does not answer, or wants other credentials.
    """
    if not os.fspath(where).startswith(PREFIX):
        return
    try:
        prepare()
        epath.Path(where).exists()
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:  # gcsfs, aiohttp and google-auth each raise their own exceptions.
        raise UserError(
            f"{name}: {os.fspath(where)} cannot be reached ({type(error).__name__}: {error}); this host needs "
            "credentials for the bucket: those of its service account, or `gcloud auth application-default login`"
        ) from error

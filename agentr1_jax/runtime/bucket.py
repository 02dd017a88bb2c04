"""What a run folder in a bucket has in place of a lock and of a file that grows.

The lock is a marker object that names its owner. A killed run leaves its marker behind; the message to the next run
says how to remove it. An object cannot be appended to: `BucketFile` writes it whole, now and then.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

from absl import logging

from agentr1_jax import files
from agentr1_jax.errors import UserError

REWRITE_SECONDS = 30.0
"""Least time between two writes of an object in a bucket, in seconds."""
_START = time.time()
"""Time at which this process started, in seconds since 1970: a marker that names its number and is older is stale."""


@contextlib.contextmanager
def hold_marker(path: str, owner: dict[str, Any]) -> Iterator[None]:
    """Hold a marker object in a bucket.

    Args:
      path: path of the object.
      owner: host, process and time of the run that holds it.

    Raises:
      UserError: another run holds it, or the bucket cannot be written to.
    """
    owner = {**owner, "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "token": secrets.token_hex(8)}
    try:
        found = _create_marker(path, owner)
        if found is not None and _is_stale(found):
            logging.warning("%s: its owner %s has ended; the marker is replaced", path, describe_owner(found))
            files.remove(path)
            found = _create_marker(path, owner)
    except UserError:
        raise
    except Exception as error:  # gcsfs, aiohttp and google-auth each raise their own exceptions.
        fault = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(
            f"{path} cannot be written ({fault}); see that the bucket exists, and that this host may create, read, "
            "list and delete objects there"
        ) from error
    if found is not None:
        raise UserError(
            f"{os.path.dirname(path)}: another run is at work there ({describe_owner(found)}, since "
            f"{found.get('since')}); wait for its end, stop it, or choose another --config.run_dir. A killed run "
            f"leaves its marker: once you know that it has ended, remove it by `gcloud storage rm {path}`"
        )
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # The next run is told how to remove it.
            if json.loads(files.read_bytes(path)).get("token") == owner["token"]:
                files.remove(path)


def _create_marker(path: str, owner: dict[str, Any]) -> dict[str, Any] | None:
    """Create the marker unless there is one; return the owner that an existing one names, None if it is ours."""
    try:
        files.create(path, json.dumps(owner).encode())
        return None
    except FileExistsError:
        found = json.loads(files.read_bytes(path))
    # A request that was repeated because its answer was lost finds its own marker.
    return None if found.get("token") == owner["token"] else found


def _is_stale(owner: dict[str, Any]) -> bool:
    """Whether the owner was a process of this host that has ended."""
    if owner.get("host") != socket.gethostname():
        return False
    process = owner.get("process", 0)
    return owner.get("time", 0) < _START if process == os.getpid() else not os.path.exists(f"/proc/{process}")


def describe_owner(owner: dict[str, Any]) -> str:
    """Return the process and the host of an owner."""
    return f"process {owner.get('process')} on {owner.get('host')}"


class BucketFile:
    """Text of an object in a bucket, which is written whole: at most every `REWRITE_SECONDS`, or by `rewrite`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._text = files.read_bytes(path).decode() if files.exists(path) else ""
        self._written, self._due = len(self._text), 0.0

    def write(self, text: str) -> None:
        self._text += text

    def flush(self) -> None:
        if time.monotonic() >= self._due:
            self.rewrite()

    def rewrite(self) -> None:
        if len(self._text) > self._written:
            with files.atomic_write(self._path) as out:
                out.write(self._text)
            self._written = len(self._text)
        self._due = time.monotonic() + REWRITE_SECONDS

    def close(self) -> None:
        self.rewrite()

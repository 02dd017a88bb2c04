"""Lock of a run folder: a second run in the same folder is refused.

On disks it is a lock of the kernel (`filelock`), which ends with its process. A bucket has no locks, but a marker
object that names its owner. A killed run leaves its marker behind; the message to the next run says how to remove it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import filelock
from absl import logging

from agentr1_jax import files
from agentr1_jax.errors import UserError

NAME = ".lock"
"""Name of the lock's file or object in the run folder."""
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""`OSError.errno` of a file system without locks."""
_START = time.time()
"""Time at which this process started, in seconds since 1970: a marker with its number that is older is stale."""


def lock_folder(folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Hold the lock of a folder, which is made if need be and removed afterwards if nothing else was put into it.

    Raises:
      UserError: another process holds it; the message names it. Or a bucket cannot be written to.
    """
    if files.is_remote(folder):
        return _hold_marker(os.path.join(folder, NAME))
    return _hold_kernel_lock(folder)


@contextlib.contextmanager
def _hold_kernel_lock(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the kernel's lock on the file `.lock`, which contains the owner's name for the message."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, NAME)
    descriptors: list[int] = []

    def write_owner(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_own_name()).encode(), 0)
        descriptors.append(descriptor)

    lock = filelock.FileLock(path, timeout=0, fallback_to_soft=False, on_acquired=write_owner)
    try:
        lock.acquire()
    except filelock.Timeout:
        try:
            owner = _describe_owner(json.loads(files.read_bytes(path)))
        except (OSError, ValueError):
            owner = "its owner has not written its name yet"
        raise UserError(
            f"{os.fspath(folder)}: another run is at work there ({owner}); wait for its end, stop it, "
            "or choose another folder (--config.run_dir)"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logging.warning("%s: this file system has no locks; see that no second run uses the folder", folder)
    try:
        yield
    finally:
        # filelock leaves the file. It is removed while the lock is held, unless the folder was replaced meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if descriptors and os.path.samestat(os.stat(path), os.fstat(descriptors[0])):
                os.unlink(path)
        files.remove_if_empty(folder)
        lock.release()


@contextlib.contextmanager
def _hold_marker(path: str) -> Iterator[None]:
    """Hold a marker object in a bucket."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    owner = {**_own_name(), "since": since, "token": secrets.token_hex(8)}
    try:
        found = _create_marker(path, owner)
        if found is not None and _is_stale(found):
            logging.warning("%s: its owner %s has ended; the marker is replaced", path, _describe_owner(found))
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
            f"{os.path.dirname(path)}: another run is at work there ({_describe_owner(found)}, since "
            f"{found.get('since')}); wait for its end, stop it, or choose another folder (--config.run_dir). A killed "
            f"run leaves its marker: once you know that it has ended, remove it by `gcloud storage rm {path}`"
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
        files.create_object(path, json.dumps(owner).encode())
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


def _own_name() -> dict[str, Any]:
    return {"host": socket.gethostname(), "process": os.getpid(), "time": time.time()}


def _describe_owner(owner: dict[str, Any]) -> str:
    return f"process {owner.get('process')} on {owner.get('host')}"

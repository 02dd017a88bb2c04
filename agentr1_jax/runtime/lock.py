"""Lock of a run folder: a second run in the same folder is refused.

On disks it is a lock of the kernel (`filelock`), which ends with its process. A bucket has no locks, but a marker
object (`runtime/bucket.py`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import filelock
from absl import logging

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime.bucket import describe_owner, hold_marker

NAME = ".lock"
"""Name of the lock's file or object in the run folder."""
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""`OSError.errno` of a file system without locks."""


def lock_folder(folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Hold the lock of a folder, which is made if need be and removed afterwards if nothing else was put into it.

    Raises:
      UserError: another process holds it; the message names it. Or a bucket cannot be written to.
    """
    if files.is_remote(folder):
        return hold_marker(os.path.join(folder, NAME), _owner())
    return _hold_kernel_lock(folder)


@contextlib.contextmanager
def _hold_kernel_lock(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the kernel's lock on the file `.lock`, which contains the owner's name for the message."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, NAME)
    descriptors: list[int] = []

    def write_owner(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_owner()).encode(), 0)
        descriptors.append(descriptor)

    lock = filelock.FileLock(path, timeout=0, fallback_to_soft=False, on_acquired=write_owner)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UserError(
            f"{os.fspath(folder)}: another run is at work there ({_describe_owner(path)}); wait for its end, stop it, "
            "or choose another --config.run_dir"
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


def _owner() -> dict[str, Any]:
    return {"host": socket.gethostname(), "process": os.getpid(), "time": time.time()}


def _describe_owner(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return describe_owner(json.load(file))
    except (OSError, ValueError, AttributeError):
        return "its owner has not written its name yet"

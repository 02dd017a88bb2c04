"""One run, one owner: a second run on the same folder is refused.

The lock of a local folder is the kernel's, that of a folder in a bucket is an object that its owner renews.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from types import TracebackType

from absl import logging

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime.lease import Lease

NAME = ".lock"


def lock(folder: str | os.PathLike[str]) -> RunLock | Lease:
    """Holds a folder until it is released. Raises UserError if another process holds it."""
    return Lease(os.path.join(folder, NAME)) if files.is_remote(folder) else RunLock(folder)


class RunLock:
    """Holds a local folder until it is released, or its process has ended however that was.

    The lock is the kernel's, on the file `.lock` of the folder. The file names its owner, for the message.

    Args:
      folder: made if need be.

    Raises:
      UserError: another process holds it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        os.makedirs(folder, exist_ok=True)
        self._path = os.path.join(folder, NAME)
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _owner(self._file)
                os.close(self._file)
                raise UserError(
                    f"{os.fspath(folder)}: another run is at work there ({owner}); wait for its end, stop it, or "
                    "choose another --config.run_dir"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                logging.warning("%s: no locks in this file system; see that no second run uses it", folder)
            if self._is_in_place():
                break
            os.close(self._file)  # Its last owner removed it between our two calls.
        os.ftruncate(self._file, 0)
        os.write(self._file, json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode())

    def release(self) -> None:
        """Removes the file, and the folder if nothing else came into it."""
        if self._file >= 0:
            if self._is_in_place():  # Else the folder was removed under the run, and the file there is another's.
                os.unlink(self._path)
            files.remove_if_empty(os.path.dirname(self._path))
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False


def _owner(file: int) -> str:
    try:
        owner = json.loads(os.pread(file, 1000, 0))
        return f"process {owner['process']} on {owner['host']}"
    except (ValueError, KeyError, TypeError):
        return "its owner has not written its name yet"

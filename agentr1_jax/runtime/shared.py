"""One folder for all processes: a path that is another place on another host is refused."""

from __future__ import annotations

import os
import secrets
import socket
import time

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.config import PROBE

SECONDS = 5.0
"""How long a process looks for the file: a network file system may be late to show it."""


def check_shared(folder: str) -> None:
    """Refuses a run folder in which some process does not find what process 0 writes there. Collective.

    Raises:
      UserError: in all processes; it names those that do not see it, and where they looked.
    """
    if processes.process_count() == 1:
        return
    first, path = processes.process_index() == 0, os.path.join(folder, PROBE)
    token = processes.all_gather_json(secrets.token_hex(8))[0]
    if first:
        with files.published(path) as out:
            out.write(token)
    processes.barrier()
    place = f"{files.absolute(folder)} on {socket.gethostname()}"
    found = processes.all_gather_json([_missing(path, token), place])
    if first:
        files.remove(path)
    blind = [f"process {index} ({where}: {fault})" for index, (fault, where) in enumerate(found) if fault]
    if blind:
        raise UserError(
            f"{folder}: not all processes share this folder: what process 0 writes ({found[0][1]}) is not seen by "
            f"{', '.join(blind)}. Give a --config.run_dir on a file system that all hosts mount at one path, or "
            "gs://BUCKET/FOLDER"
        )


def _missing(path: str, token: str) -> str:
    """Why a file with the token is not there; "" if it is."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            if files.read_bytes(path).decode() == token:
                return ""
            fault = "another run wrote it"
        except UserError:
            raise
        except Exception as error:  # What reaches buckets raises errors of its own.
            fault = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            return fault
        time.sleep(0.1)

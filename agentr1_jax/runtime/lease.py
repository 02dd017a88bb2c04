"""The lock of a run folder in a bucket: an object that its owner renews, taken over when it was not for a while.

A bucket has no locks, but writes on condition: an object is created only if there is none, and replaced only if it is
still the generation that one knows. Nobody's clock is believed: whoever wants a folder that has an owner watches for
`EXPIRY_SECONDS` whether the object is renewed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from types import TracebackType
from typing import NamedTuple, NoReturn

from absl import logging

from agentr1_jax import files
from agentr1_jax.errors import UserError

RENEWAL_SECONDS = 15.0
EXPIRY_SECONDS = 60.0
POLL_SECONDS = 1.0
REQUEST_SECONDS = 10.0


class Found(NamedTuple):
    """The object as it was read: its generation, whose it is, and what names them."""

    generation: int
    token: str
    owner: str


def leave(message: str) -> NoReturn:
    """Ends this process at once: whatever it still wrote would be in another run's folder."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    os._exit(UserError.status)


class Lease:
    """Holds a folder in a bucket until it is released, or has not been renewed for a while: then this process ends.

    Args:
      path: of the object.
      renewal: seconds between two renewals.
      expiry: seconds without one after which others take it over.

    Raises:
      UserError: another process holds it, or the bucket cannot be written to.
    """

    def __init__(self, path: str, *, renewal: float = RENEWAL_SECONDS, expiry: float = EXPIRY_SECONDS) -> None:
        files.path(path)  # Refuses where the extra is not installed.
        from google.api_core import exceptions
        from google.cloud import storage

        self._errors = exceptions
        self._path, self._renewal, self._expiry = path, renewal, expiry
        self._token, self._generation = secrets.token_hex(8), 0
        bucket, _, self._name = files.absolute(path).removeprefix(files.BUCKETS).partition("/")
        try:
            self._bucket = storage.Client().bucket(bucket)
            self._take()
        except UserError:
            raise
        except Exception as error:  # google-api-core, google-auth and requests each raise their own.
            fault = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise UserError(
                f"{path} cannot be written ({fault}); see that the bucket exists, and that this host may create, read, "
                "list and delete objects there"
            ) from error
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Removes the object, unless it is another's by now."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join()
        with contextlib.suppress(self._errors.GoogleAPICallError):  # It would expire all the same.
            blob = self._bucket.blob(self._name)
            blob.delete(if_generation_match=self._generation, timeout=REQUEST_SECONDS)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _take(self) -> None:
        """Creates the object, or replaces one that nobody renews."""
        if self._write(0):
            return
        before = self._read()
        if before:
            logging.info("%s: %s has it; waits %g s for a sign of life", self._path, before.owner, self._expiry)
        deadline = time.monotonic() + self._expiry
        while before and time.monotonic() < deadline:
            time.sleep(min(POLL_SECONDS, self._expiry / 10))
            now = self._read()
            if now and now.generation != before.generation:
                raise self._refusal(now)
            before = now
        if not self._write(before.generation if before else 0):
            raise self._refusal(self._read())
        if before:
            logging.warning("%s: taken over from %s, which does not renew it", self._path, before.owner)

    def _refusal(self, found: Found | None) -> UserError:
        owner = found.owner if found else "it is about to leave"
        return UserError(
            f"{os.path.dirname(self._path)}: another run is at work there ({owner}); wait for its end, stop it, or "
            "choose another --config.run_dir"
        )

    def _renew(self) -> None:
        while not self._end.wait(self._renewal):
            try:
                if not self._write(self._generation):
                    found = self._read()
                    fault = f"was not renewed in time and is {found.owner}'s by now" if found else "has been removed"
                    leave(f"{self._path} {fault}; this run ends, and its folder is left to whoever has it now")
            except Exception as error:  # The network may come back.
                logging.warning("%s could not be renewed (%s: %s)", self._path, type(error).__name__, error)

    def _write(self, generation: int) -> bool:
        """Writes the object if it is of this generation, 0 for none; False if it is not."""
        blob = self._bucket.blob(self._name)
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        blob.metadata = {"owner": owner, "token": self._token}
        try:
            text = f"{owner}, renewed {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n"
            blob.upload_from_string(text, if_generation_match=generation, timeout=REQUEST_SECONDS)
            self._generation = blob.generation
        except self._errors.PreconditionFailed:
            found = self._read()
            if found is None or found.token != self._token:
                return False
            self._generation = found.generation  # An attempt had come through whose answer did not.
        return True

    def _read(self) -> Found | None:
        """What is there; None where there is nothing."""
        blob = self._bucket.get_blob(self._name, timeout=REQUEST_SECONDS)
        if blob is None:
            return None
        facts = blob.metadata or {}
        return Found(blob.generation, facts.get("token", ""), facts.get("owner", "somebody without a name"))

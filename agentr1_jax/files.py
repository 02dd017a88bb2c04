"""Files of run folders, on disks and in buckets (`gs://BUCKET/FOLDER`).

`etils.epath` reads, writes and lists both kinds. This module adds what it lacks: atomic writes of whole files on disks,
listings that are never out of date, sizes and checksums of all files of a folder, creation that fails where something
exists, and clear errors where `gcsfs` (the extra `gcs`) or the credentials are missing.

Paths are strings or path objects; `os.path.join` and `os.path.basename` hold for both kinds. A bucket has objects and
no folders: a folder exists while there are objects below it. An object appears whole or not at all and cannot be
appended to.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import errno
import functools
import importlib.util
import io
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

import google_crc32c
from etils import epath

from agentr1_jax.errors import UserError

PathLike = str | os.PathLike[str]

PREFIX = "gs://"
READERS = 4
"""Files that are read at once for their checksums."""
READ_BYTES = 1 << 18
"""Bytes of a file in one read of them: so few that other threads wait no 0.1 ms for the interpreter."""


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


def _bucket_files() -> Any:
    """Return the fsspec file system under epath, for operations that epath lacks."""
    prepare()
    import fsspec

    return fsspec.filesystem("gs")


def check_reachable(where: PathLike, name: str) -> None:
    """Refuse a path in a bucket, which need not exist, that cannot be read from this host.

    Args:
      where: path of a file or folder.
      name: config key or flag that holds the path, for the message.

    Raises:
      UserError: the extra `gcs` is not installed, the bucket does not answer, or wants other credentials.
    """
    if not is_remote(where):
        return
    try:
        exists(where)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:  # gcsfs, aiohttp and google-auth each raise their own exceptions.
        raise UserError(
            f"{name}: {os.fspath(where)} cannot be reached ({type(error).__name__}: {error}); this host needs "
            "credentials for the bucket: those of its service account, or `gcloud auth application-default login`"
        ) from error


def is_remote(path: PathLike) -> bool:
    """Return True for a path in a bucket."""
    return os.fspath(path).startswith(PREFIX)


def path(where: PathLike) -> epath.Path:
    """Return an `epath.Path`. Raises UserError for a path in a bucket if the extra `gcs` is not installed."""
    if is_remote(where):
        prepare()
    return epath.Path(os.fspath(where))


def absolute_path(where: PathLike) -> str:
    """Return the absolute path; a path in a bucket is absolute already."""
    return os.fspath(path(where)) if is_remote(where) else os.path.abspath(where)


def same_path(one: PathLike, other: PathLike) -> bool:
    """Return True if two paths name one file or folder, after links and `..` are resolved."""
    both = [absolute_path(each) if is_remote(each) else os.path.realpath(each) for each in (one, other)]
    return both[0] == both[1]


def exists(where: PathLike) -> bool:
    """Return True if there is a file or folder at this path."""
    return path(where).exists()


def is_file(where: PathLike) -> bool:
    """Return True if there is a file at this path."""
    return path(where).is_file()


def is_folder(where: PathLike) -> bool:
    """Return True if there is a folder at this path."""
    return path(where).is_dir()


def list_names(folder: PathLike) -> list[str]:
    """List the names of the files and folders in a folder, sorted; a missing folder has none."""
    try:
        if not is_remote(folder):
            return sorted(os.listdir(folder))
        own = absolute_path(folder).removeprefix(PREFIX)
        names = _bucket_files().ls(own, detail=False)
        # An empty object that stands for the folder is listed under the folder's own name.
        return sorted(os.path.basename(name) for name in names if name.rstrip("/") != own)
    except (FileNotFoundError, NotADirectoryError):
        return []


def file_sizes(folder: PathLike) -> dict[str, int]:
    """Return the sizes in bytes of all files below a folder, by their paths relative to it."""
    if is_remote(folder):
        own = absolute_path(folder).removeprefix(PREFIX)
        entries = _bucket_files().find(own, detail=True)
        return {os.path.relpath(name, own): entry["size"] for name, entry in entries.items()}
    paths = [os.path.join(root, name) for root, _, inside in os.walk(folder) for name in inside]
    return {os.path.relpath(each, folder): os.path.getsize(each) for each in paths}


def file_checksums(folder: PathLike, names: Iterable[str]) -> dict[str, str | None]:
    """Return the CRC-32C of files below a folder, as Google Cloud Storage writes it: base64 of four bytes.

    Files on a disk are read, several at once. A bucket knows the checksums of its objects: nothing is fetched.

    Args:
      folder: the folder.
      names: paths relative to it.

    Returns:
      name -> checksum; None for an object of which the bucket tells none.

    Raises:
      OSError: a file cannot be read.
    """
    if is_remote(folder):
        own = absolute_path(folder).removeprefix(PREFIX)
        entries = _bucket_files().find(own, detail=True)
        return {name: entries.get(f"{own}/{name}", {}).get("crc32c") for name in names}
    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        return dict(zip(names, pool.map(lambda name: _checksum(os.path.join(folder, name)), names), strict=True))


def _checksum(where: PathLike) -> str:
    checksum = google_crc32c.Checksum()
    with open(where, "rb", buffering=0) as file:
        while part := file.read(READ_BYTES):
            checksum.update(part)
    return base64.b64encode(checksum.digest()).decode()


@contextlib.contextmanager
def open_bytes(where: PathLike) -> Iterator[IO[bytes]]:
    """Open a file to read bytes from; an object in a bucket is fetched whole.

    Raises:
      FileNotFoundError: there is no such file; the error names it, in buckets too.
    """
    if not is_remote(where):
        with open(where, "rb") as file:
            yield file
        return
    try:
        whole = path(where).read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(where)) from error
    yield io.BytesIO(whole)


def read_bytes(where: PathLike) -> bytes:
    """Read a whole file. Raises FileNotFoundError, which names it."""
    with open_bytes(where) as file:
        return file.read()


@contextlib.contextmanager
def atomic_write(where: PathLike, mode: str = "w", **options: Any) -> Iterator[IO[Any]]:
    """Open a new file to write to, which replaces an old one only when this context ends without an exception.

    A file on a disk is written beside its place and renamed; an object in a bucket is held in memory until the end.

    Args:
      where: path of the file; its folder is made if need be.
      mode: `w` for text in UTF-8, `wb` for bytes.
      options: `errors` and `newline`, as `open` takes them.
    """
    text = {} if mode == "wb" else {"encoding": "utf-8", **options}
    if is_remote(where):
        whole = io.BytesIO()
        out: IO[Any] = whole if mode == "wb" else io.TextIOWrapper(whole, **text)
        yield out
        out.flush()
        path(where).write_bytes(whole.getvalue())
        return
    where = os.fspath(where)
    os.makedirs(os.path.dirname(where) or ".", exist_ok=True)
    partial = f"{where}.partial"
    try:
        with open(partial, mode, **text) as file:
            yield file
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    os.replace(partial, where)


def create_object(where: str, data: bytes) -> None:
    """Write a new object in a bucket. Raises FileExistsError if there is one; of several processes one succeeds."""
    _bucket_files().pipe_file(absolute_path(where), data, mode="create")


def copy(source: PathLike, to: PathLike) -> None:
    """Copy a file atomically."""
    with atomic_write(to, "wb") as out:
        out.write(read_bytes(source))


def remove(where: PathLike) -> None:
    """Remove a file."""
    path(where).unlink()


def remove_if_empty(folder: PathLike) -> None:
    """Remove a folder if it is empty."""
    if not is_remote(folder):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def move_folder(source: PathLike, to: PathLike) -> None:
    """Move a folder to a free path: by a rename, or in a bucket object by object."""
    if is_remote(source):
        _bucket_files().mv(absolute_path(source), absolute_path(to), recursive=True)
    else:
        os.makedirs(os.path.dirname(to), exist_ok=True)
        os.rename(source, to)


@contextlib.contextmanager
def local_folder(folder: PathLike) -> Iterator[str]:
    """Return a folder on a disk for code that cannot write to buckets: the folder itself, or a temporary one.

    The files of the temporary folder are copied to the bucket when this context ends, whatever the reason.
    """
    if not is_remote(folder):
        yield os.fspath(folder)
        return
    with tempfile.TemporaryDirectory() as scratch:
        try:
            yield scratch
        finally:
            for name in file_sizes(scratch):
                copy(os.path.join(scratch, name), os.path.join(folder, name))

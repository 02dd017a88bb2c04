"""Files of run folders, on local file systems and in buckets (`gs://BUCKET/FOLDER`), through `etils.epath`.

Paths are strings or path objects; `os.path.join` and `os.path.basename` hold for both kinds. A bucket knows objects and
no folders: a folder is there while something lies in it. Its objects appear whole or not at all, and are never
appended to. The way into buckets is `gcsfs`, by the extra `gcs`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import io
import os
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from etils import epath

from agentr1_jax.errors import UserError

BUCKETS = "gs://"

PathLike = str | os.PathLike[str]


def is_remote(path: PathLike) -> bool:
    """Whether a path lies in a bucket."""
    return os.fspath(path).startswith(BUCKETS)


def path(where: PathLike) -> epath.Path:
    """A path as an object, with the way into buckets prepared where it is one there.

    Raises:
      UserError: it lies in a bucket, and the extra `gcs` is not installed.
    """
    if is_remote(where):
        _prepare_buckets()
    return epath.Path(os.fspath(where))


def check_reachable(where: PathLike, name: str) -> None:
    """Refuses a path in a bucket that cannot be read from here.

    Args:
      where: of a file or folder that need not exist.
      name: of the key or flag that says so, for the message.

    Raises:
      UserError: the extra `gcs` is not installed, the bucket does not answer, or wants other credentials.
    """
    if not is_remote(where):
        return
    try:
        path(where).exists()
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:  # gcsfs, aiohttp and google-auth each raise their own.
        raise UserError(
            f"{name}: {os.fspath(where)} cannot be reached ({type(error).__name__}: {error}); this host needs "
            "credentials for the bucket: those of its service account, or `gcloud auth application-default login`"
        ) from error


def absolute(where: PathLike) -> str:
    """The path from the root on; one in a bucket has no other."""
    return os.fspath(path(where)) if is_remote(where) else os.path.abspath(where)


def same(one: PathLike, other: PathLike) -> bool:
    """Whether two paths are one place, links and `..` followed."""
    both = [absolute(each) if is_remote(each) else os.path.realpath(each) for each in (one, other)]
    return both[0] == both[1]


def exists(where: PathLike) -> bool:
    """Whether there is such a file or folder."""
    return path(where).exists()


def is_file(where: PathLike) -> bool:
    """Whether there is such a file."""
    return path(where).is_file()


def is_folder(where: PathLike) -> bool:
    """Whether there is such a folder."""
    return path(where).is_dir()


def names(folder: PathLike) -> list[str]:
    """What lies in a folder, sorted; nothing where there is none."""
    try:
        if not is_remote(folder):
            return sorted(os.listdir(folder))
        files, own = _file_system(), absolute(folder).removeprefix(BUCKETS)
        # An empty object that stands for the folder is listed by the folder's own name.
        return sorted(os.path.basename(name) for name in files.ls(own, detail=False) if name.rstrip("/") != own)
    except (FileNotFoundError, NotADirectoryError):
        return []


def sizes(folder: PathLike) -> dict[str, int]:
    """Bytes of all files below a folder, by their paths from there."""
    if is_remote(folder):
        own = absolute(folder).removeprefix(BUCKETS)
        found = _file_system().find(own, detail=True)
        return {os.path.relpath(name, own): facts["size"] for name, facts in found.items()}
    paths = [os.path.join(root, name) for root, _, inside in os.walk(folder) for name in inside]
    return {os.path.relpath(each, folder): os.path.getsize(each) for each in paths}


@contextlib.contextmanager
def opened(where: PathLike) -> Iterator[IO[bytes]]:
    """A file to read bytes from; one in a bucket is fetched whole. Raises FileNotFoundError, which names it."""
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
    """All of a file. Raises FileNotFoundError, which names it."""
    with opened(where) as file:
        return file.read()


@contextlib.contextmanager
def published(where: PathLike, mode: str = "w", **how: Any) -> Iterator[IO[Any]]:
    """A new file to write to, which takes the place of an old one when it is whole; its folder is made if need be.

    A local one is renamed into place. One in a bucket is held in memory until then.

    Args:
      where: its path.
      mode: `w` for text in UTF-8, `wb` for bytes.
      how: `errors` and `newline`, as `open` takes them.
    """
    text = {} if mode == "wb" else {"encoding": "utf-8", **how}
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


def copy(source: PathLike, to: PathLike) -> None:
    """Copies a file, which appears whole."""
    with published(to, "wb") as out:
        out.write(read_bytes(source))


def remove(where: PathLike) -> None:
    """Removes a file."""
    path(where).unlink()


def remove_if_empty(folder: PathLike) -> None:
    """Removes a folder in which nothing lies."""
    if not is_remote(folder):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def move_folder(source: PathLike, to: PathLike) -> None:
    """Moves a folder to where nothing is: a rename, or in a bucket object by object, the old ones last."""
    if is_remote(source):
        _file_system().mv(absolute(source), absolute(to), recursive=True)
    else:
        os.makedirs(os.path.dirname(to), exist_ok=True)
        os.rename(source, to)


@contextlib.contextmanager
def written_locally(folder: PathLike) -> Iterator[str]:
    """A local folder for what writes no other: the folder itself, or one whose files are taken to the bucket after."""
    if not is_remote(folder):
        yield os.fspath(folder)
        return
    with tempfile.TemporaryDirectory() as scratch:
        try:
            yield scratch
        finally:
            for name in sizes(scratch):
                copy(os.path.join(scratch, name), os.path.join(folder, name))


@functools.cache
def _prepare_buckets() -> None:
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{BUCKETS} paths need gcsfs, which is not installed: pip install 'agentr1_jax[gcs]'")
    import fsspec.config

    # Others write there too, TensorStore and other processes among them: what was once listed must not be believed.
    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    # epath would take another way where TensorFlow happens to be installed, with other errors.
    os.environ.setdefault("EPATH_USE_TF", "false")


def _file_system() -> Any:
    """What epath works with in buckets, for what it does not offer itself."""
    _prepare_buckets()
    import fsspec

    return fsspec.filesystem("gs")

"""Vectors of a corpus: computed once, file by file, and stored in a folder with which an interrupted run continues."""

from __future__ import annotations

import functools
import io
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from absl import logging

from agentr1_jax.tools.search.corpus import fingerprint
from agentr1_jax.tools.search.tool import Corpus

Embed = Callable[[Sequence[str]], np.ndarray]
"""Texts -> float32 [B, D]."""

META = "meta.json"
VERSION = 2
PART = 8192  # passages of a file: what an interruption can cost


def corpus_vectors(
    corpus: Corpus, embed: Embed, encoder: str, folder: str | os.PathLike[str] = "", part: int = PART
) -> list[np.ndarray]:
    """Return one vector for each passage, of its title and text.

    The folder holds `meta.json`, which says of what corpus and encoder it is, and `vectors-00000.npy`, ... of `part`
    passages each, with a checksum behind the array. Files get their names when they are complete; those that are there
    are not computed again, but read once (1 s per GB) to compare their checksums. Several processes may work on one
    folder: what both compute is written twice, and the same.

    Args:
      corpus: at least one passage.
      embed: texts -> their vectors.
      encoder: name of all that these vectors depend on; see `Embedder.identity`.
      folder: folder of the files; "" for none.
      part: passages of a file, at least 1.

    Returns:
      float32 [<= part, D] each, in the corpus's order; mapped files where there is a folder.

    Raises:
      ValueError: the corpus or `part` is empty, the folder is of another corpus or encoder or does not say of which, a
        file of it is damaged, or `embed` makes anything but finite vectors of one width.
    """
    if part < 1:
        raise ValueError(f"part is {part}; a file must have at least 1 passage")
    if not corpus:
        raise ValueError("a search needs at least one passage; the corpus is empty")
    if folder:
        folder = Path(folder)
        part = _check_meta(folder, {"corpus": fingerprint(corpus), "encoder": encoder, "passages": len(corpus)}, part)
    parts: list[np.ndarray] = []
    started, computed = time.perf_counter(), 0
    for start in range(0, len(corpus), part):
        passages = corpus[start : start + part]
        path = Path(folder) / f"vectors-{start // part:05d}.npy"
        if not (folder and path.exists()):
            vectors = np.asarray(embed([f"{p.title} {p.text}" for p in passages]), np.float32)
            _check(vectors, len(passages), parts[0].shape[1] if parts else None, "embed")
            if not np.isfinite(vectors).all():
                raise ValueError(
                    "embed: vectors hold numbers that are not finite; check the encoder's weights, or its dtype"
                )
            computed += len(passages)
            rate = computed / (time.perf_counter() - started)
            logging.info("embedded %d of %d passages, %.0f a second", start + len(passages), len(corpus), rate)
            if folder:
                _write(path, functools.partial(_save, vectors))
        if folder:
            vectors = _map_file(path)
            _check(vectors, len(passages), parts[0].shape[1] if parts else None, str(path))
        parts.append(vectors)
    return parts


def _check_meta(folder: Path, expected: dict[str, Any], part: int) -> int:
    """Return the passages of a file, by the folder's `meta.json`; write one where there is none."""
    path = folder / META
    # Looked for first: another process that begins now writes its vectors after its meta data.
    orphans = any(folder.glob("vectors-*.npy"))
    if orphans and not path.exists():
        raise _unusable(folder, f"it has no {META} to say of what corpus and encoder they are")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        meta = {"version": VERSION, **expected, "part": part}
        _write(path, lambda file: file.write(json.dumps(meta, indent=2).encode()))
        return part
    try:
        meta = dict(json.loads(path.read_text("utf-8")))
        stored = int(meta["part"])
        if stored < 1:
            raise ValueError(f"part is {stored}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unusable(folder, f"its {META} is damaged ({type(error).__name__}: {error})") from error
    for key, value in {"version": VERSION, **expected}.items():
        if meta.get(key) != value:
            raise _unusable(folder, f"they were made with {key} {meta.get(key)!r}, here it is {value!r}")
    return stored


def _save(vectors: np.ndarray, file: BinaryIO) -> None:
    """Write an array as `np.save` does, and behind it the CRC-32 of all that."""
    whole = io.BytesIO()
    np.save(whole, vectors)
    file.write(whole.getbuffer())
    file.write(_checksum(whole.getbuffer()))


def _checksum(data: memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


def _map_file(path: Path) -> np.ndarray:
    try:
        data = np.memmap(path, np.uint8, "r")
        if data[-4:].tobytes() != _checksum(data[:-4].data):
            raise ValueError("its checksum is that of other data")
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: damaged ({error}); delete it, and it is computed again") from error


def _check(vectors: np.ndarray, rows: int, width: int | None, source: str) -> None:
    fits = vectors.ndim == 2 and vectors.shape == (rows, width or vectors.shape[1])
    if not fits or vectors.dtype != np.float32:
        raise ValueError(
            f"{source}: vectors are {vectors.dtype} {list(vectors.shape)}, they should be float32 "
            f"[{rows}, {width or 'width'}]"
        )


def _unusable(folder: Path, why: str) -> ValueError:
    return ValueError(
        f"{folder}: these vectors cannot be used: {why}; name another folder, or delete this one and they are computed "
        "again"
    )


def _write(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file that appears at once and whole."""
    partial = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex}")
    try:
        with partial.open("wb") as file:
            write(file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

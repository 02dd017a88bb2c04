"""Vectors of a corpus: computed once, file by file, and stored in a folder with which an interrupted run continues."""

from __future__ import annotations

import io
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
      encoder: name of all that these vectors depend on; see `Embedder.identity`.
      folder: folder of the files; "" for none.
      part: passages of a file; those of a folder that has files remain.

    Returns:
      float32 [<= part, D] each, in the corpus's order; mapped files where there is a folder.

    Raises:
      ValueError: the corpus is empty, the folder is of another corpus or encoder or does not say of which, or a file of
        it is damaged.
    """
    if not corpus:
        raise ValueError("a search needs at least one passage; the corpus is empty")
    if folder:
        expected = {"version": VERSION, "corpus": fingerprint(corpus), "encoder": encoder, "passages": len(corpus)}
        part = _check_meta(Path(folder), expected, part)
    parts: list[np.ndarray] = []
    started, computed = time.perf_counter(), 0
    for start in range(0, len(corpus), part):
        passages = corpus[start : start + part]
        path = Path(folder) / f"vectors-{start // part:05d}.npy"
        if not (folder and path.exists()):
            vectors = np.asarray(embed([f"{p.title} {p.text}" for p in passages]), np.float32)
            computed += len(passages)
            rate = computed / (time.perf_counter() - started)
            logging.info("embedded %d of %d passages, %.0f a second", start + len(passages), len(corpus), rate)
            if folder:
                _write(path, _to_bytes(vectors))
        if folder:
            vectors = _map_file(path, len(passages))
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
        _write(path, json.dumps({**expected, "part": part}, indent=2).encode())
        return part
    try:
        meta = dict(json.loads(path.read_text("utf-8")))
        stored = int(meta["part"])
        if stored < 1:
            raise ValueError(f"part is {stored}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unusable(folder, f"its {META} is damaged ({type(error).__name__}: {error})") from error
    for key, value in expected.items():
        if meta.get(key) != value:
            raise _unusable(folder, f"they were made with {key} {meta.get(key)!r}, here it is {value!r}")
    return stored


def _unusable(folder: Path, why: str) -> ValueError:
    return ValueError(
        f"{folder}: these vectors cannot be used: {why}; name another folder, or delete this one and they are computed "
        "again"
    )


def _to_bytes(vectors: np.ndarray) -> bytes:
    """Return what `np.save` writes, and behind it the CRC-32 of all that."""
    whole = io.BytesIO()
    np.save(whole, vectors)
    return whole.getvalue() + _checksum(whole.getbuffer())


def _checksum(data: memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


def _map_file(path: Path, rows: int) -> np.ndarray:
    try:
        data = np.memmap(path, np.uint8, "r")
        if data[-4:].tobytes() != _checksum(data[:-4].data):
            raise ValueError("its checksum is that of other data")
        vectors: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        if len(vectors) != rows:
            raise ValueError(f"it has {len(vectors)} vectors for {rows} passages")
        return vectors
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: damaged ({error}); delete it, and it is computed again") from error


def _write(path: Path, content: bytes) -> None:
    """Write a file that appears at once and whole."""
    partial = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

"""The vectors of a corpus: computed once, part by part, and kept in a folder that an interrupted run goes on with."""

from __future__ import annotations

import functools
import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from absl import logging

from agentr1_jax.tools.search.corpus import Corpus, fingerprint

Embed = Callable[[Sequence[str]], np.ndarray]
"""Texts to float32 [B, D]."""

META = "meta.json"
VERSION = 1
PART = 8192  # passages of a file: what an interruption can cost


def corpus_vectors(
    corpus: Corpus, embed: Embed, encoder: str, folder: str | os.PathLike[str] = "", part: int = PART
) -> list[np.ndarray]:
    """One vector for each passage, of its title and text.

    The folder holds `meta.json`, which says of what corpus and encoder it is, and `vectors-00000.npy`, ... of `part`
    passages each. Files get their names when they are complete; those that are there are not computed again. Several
    processes may work on one folder: what both compute is written twice, and the same.

    Args:
      corpus: at least one passage.
      embed: texts -> their vectors.
      encoder: names all that these vectors depend on; see `Embedder.identity`.
      folder: "" keeps nothing.
      part: passages of a file.

    Returns:
      float32 [<= part, D] each, in the corpus's order; mapped files where there is a folder.

    Raises:
      ValueError: the corpus is empty, the folder is of another corpus or encoder, or a file of it is damaged.
    """
    if not corpus:
        raise ValueError("a search needs at least one passage; the corpus is empty")
    if folder:
        folder = Path(folder)
        part = _agreed(folder, {"corpus": fingerprint(corpus), "encoder": encoder, "passages": len(corpus)}, part)
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
                _write(path, functools.partial(np.save, arr=vectors))
        if folder:
            vectors = _mapped(path)
        _check(vectors, len(passages), parts[0].shape[1] if parts else None, str(path) if folder else "embed")
        parts.append(vectors)
    return parts


def _agreed(folder: Path, expected: dict[str, Any], part: int) -> int:
    """Passages of a file: what the folder says, which gets its `meta.json` where it has none."""
    path = folder / META
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        meta = {"version": VERSION, **expected, "part": part}
        _write(path, lambda file: file.write(json.dumps(meta, indent=2).encode()))
        return part
    try:
        meta = dict(json.loads(path.read_text("utf-8")))
        kept = int(meta["part"])
    except (ValueError, TypeError, KeyError) as error:
        raise _unusable(folder, f"its {META} is damaged ({type(error).__name__}: {error})") from error
    for key, value in {"version": VERSION, **expected}.items():
        if meta.get(key) != value:
            raise _unusable(folder, f"they were made with {key} {meta.get(key)!r}, here it is {value!r}")
    return kept


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: damaged ({error}); delete it, and it is computed again") from error


def _check(vectors: np.ndarray, rows: int, width: int | None, source: str) -> None:
    width = width or vectors.shape[-1]
    if vectors.shape != (rows, width) or vectors.dtype != np.float32:
        raise ValueError(
            f"{source}: vectors are {vectors.dtype} {list(vectors.shape)}, they should be float32 [{rows}, {width}]"
        )


def _unusable(folder: Path, why: str) -> ValueError:
    return ValueError(
        f"{folder}: these vectors cannot be used: {why}; name another folder, or delete this one and they are computed "
        "again"
    )


def _write(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Writes a file that appears at once and whole."""
    partial = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex}")
    try:
        with partial.open("wb") as file:
            write(file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

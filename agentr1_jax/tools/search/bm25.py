"""BM25 by the library bm25s, in memory or over a saved index that processes share as mapped files."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentr1_jax.tools.search.corpus import Corpus, fingerprint
from agentr1_jax.tools.search.retriever import Hit

K1, B = 0.9, 0.4
VERSION = 1  # of the saved index
# Up to here a search (0.13 ms on one core; 0.5 ms over 40,000) takes no longer than starting a thread for it.
SMALL = 10_000
_WORD = re.compile(r"(?u)\b\w\w+\b")
_META = "meta.json"
_BLOCK = 1 << 20


class BM25:
    """A Retriever: the passages with the highest BM25 score (Lucene's form, k₁ = 0.9 and b = 0.4).

    The indexed text is title and text. Passages that share no term with the query are never returned; equal scores are
    ordered by the passage's index.

    Args:
      corpus: at least one passage.
      index: of bm25s, built from just this corpus (`load` gives one); None builds it, in 3 s for 43,000 passages.

    Raises:
      ValueError: the corpus is empty, or holds no word to search for.
    """

    batches = False

    def __init__(self, corpus: Corpus, index: Any = None) -> None:
        if not corpus:
            raise ValueError("a search needs at least one passage; the corpus is empty")
        self.corpus = corpus
        self._index = _built(corpus) if index is None else index

    @property
    def blocking(self) -> bool:
        """Whether a search takes so long that it is worth a thread; by the number of passages."""
        return len(self.corpus) > SMALL

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """At most `top_k` hits for each query, best first."""
        return [self._hits(query, top_k) for query in queries]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the index to a new folder, which appears at once and whole. A killed process leaves a `.partial-*`.

        Raises:
          ValueError: the folder exists and is not empty.
        """
        folder = Path(folder)
        partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex}")
        try:
            self._index.save(partial, show_progress=False)
            files = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
            meta = {**_expected(self.corpus), "files": files}
            (partial / _META).write_text(json.dumps(meta, indent=2), encoding="utf-8")
            if folder.exists() and not _empty(folder):
                raise ValueError(f"{folder}: there is something already; delete it or name another folder")
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], corpus: Corpus) -> BM25:
        """The index that `save` wrote, as files mapped into memory: they are read as searches need them.

        Checksums are compared, so that every file is read once (1 s per GB).

        Raises:
          ValueError: it was built from another corpus, by other rules or by another version, is damaged or none at
            all; the message says which and what to do.
        """
        folder = Path(folder)
        meta = _read_meta(folder)
        for key, expected in _expected(corpus).items():
            if meta.get(key) != expected:
                raise _unusable(folder, f"it was built with {key} {meta.get(key)!r}, here it is {expected!r}")
        _check_files(folder, meta)
        library, _ = _library()
        try:
            index = library.load(folder, mmap=True, show_progress=False)
            # Views of the mapped files without the cost of numpy.memmap, which wraps every slice anew.
            index.scores |= {key: np.asarray(index.scores[key]) for key in ("data", "indices", "indptr")}
        except Exception as error:  # Whatever another version of the library makes of these files.
            raise _unusable(folder, f"bm25s cannot read it ({type(error).__name__}: {error})") from error
        return cls(corpus, index)

    def _hits(self, query: str, top_k: int) -> list[Hit]:
        vocabulary = self._index.vocab_dict
        terms = [vocabulary[word] for word in words(query) if word in vocabulary]
        if not terms:
            return []
        scores = self._index.get_scores_from_ids(terms)
        return [Hit(self.corpus[i], float(scores[i])) for i in _top(scores, top_k)]


def build_or_load(corpus: Corpus, folder: str | os.PathLike[str] = "") -> BM25:
    """BM25 by the index saved in `folder`, which is built first where there is none; without a folder, in memory.

    Several processes may do so at once: each builds, one saves, all share its files.

    Raises:
      ValueError: as `BM25` and `BM25.load` do.
    """
    if not folder:
        return BM25(corpus)
    folder = Path(folder)
    if not folder.exists() or _empty(folder):
        built = BM25(corpus)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            built.save(folder)
        except (ValueError, OSError):
            if not folder.exists() or _empty(folder):  # Not because another process was first.
                raise
    return BM25.load(folder, corpus)


def words(text: str) -> list[str]:
    """Terms of a text for BM25: lower-cased words of two or more characters without English stop words."""
    _, stop_words = _library()
    return [word for word in _WORD.findall(text.lower()) if word not in stop_words]


@functools.cache
def _library() -> tuple[Any, frozenset[str]]:
    """The class BM25 and the stop words of bm25s.

    Imported late: the import runs a JAX program, and the processes of a run have to find each other before any does.
    """
    import bm25s
    from bm25s.stopwords import STOPWORDS_EN

    # It reports every index it builds, through a handler of its own.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s.BM25, frozenset(STOPWORDS_EN)


def _built(corpus: Corpus) -> Any:
    terms = [words(f"{p.title} {p.text}") for p in corpus]
    if not any(terms):
        raise ValueError(
            f"a search needs words, and the {len(corpus)} passages of the corpus hold none: words have two or more "
            "letters or digits and are no English stop words"
        )
    library, _ = _library()
    index = library(k1=K1, b=B)
    index.index(terms, show_progress=False)
    return index


def _expected(corpus: Corpus) -> dict[str, Any]:
    """What the meta data of an index of this corpus say."""
    _, stop_words = _library()
    stop = hashlib.blake2b(" ".join(sorted(stop_words)).encode(), digest_size=8).hexdigest()
    return {
        "version": VERSION,
        "passages": len(corpus),
        "fingerprint": fingerprint(corpus),
        "k1": K1,
        "b": B,
        "words": f"{_WORD.pattern} of the lower-cased text without stop words {stop}",
    }


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unusable(folder, f"it is no whole index ({type(error).__name__}: {error})") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("files"), dict):
        raise _unusable(folder, f"its {_META} is damaged")
    return meta


def _check_files(folder: Path, meta: dict[str, Any]) -> None:
    for name, expected in meta["files"].items():
        try:
            found = _checksum(folder / name)
        except OSError as error:
            raise _unusable(folder, f"its file {name} cannot be read ({error})") from error
        if found != expected:
            raise _unusable(folder, f"its file {name} is damaged (bytes and checksum {found}, not {expected})")


def _unusable(folder: Path, why: str) -> ValueError:
    return ValueError(f"{folder}: this search index cannot be used: {why}; delete the folder, and it is built again")


def _checksum(path: Path) -> list[int]:
    """Bytes and CRC-32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def _empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _top(scores: np.ndarray, k: int) -> list[int]:
    """Indices of the k highest positive scores [N], descending; ties by index, whatever the partition does to them."""
    k = min(k, len(scores))
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
    candidates = np.flatnonzero((scores >= threshold) & (scores > 0))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:k].tolist()

"""Passages, and the files that hold them."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from agentr1_jax.errors import GET_DATA
from agentr1_jax.tools.records import DAMAGE, damage_error, read_records
from agentr1_jax.tools.search.tool import Corpus, Passage

WHAT = "not a passage with id, title and text"


def read_corpus(path: str | os.PathLike[str]) -> list[Passage]:
    """Read passages from a file of JSON records `{"id", "title", "text"}`; see `records.read_records`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a record is not a passage, or an id occurs twice; the message names file and line.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such corpus; {GET_DATA}")
    passages: dict[str, Passage] = {}
    for where, record in read_records(path, WHAT):
        try:
            passage = _passage(record)
            if passage.id in passages:
                raise ValueError(f"the id {passage.id!r} occurs twice")
        except DAMAGE as error:
            raise damage_error(where, WHAT, error) from error
        passages[passage.id] = passage
    return list(passages.values())


def ids_by_content(corpus: Corpus) -> dict[bytes, str]:
    """Return content hash -> id; of equal passages that of the first in the corpus."""
    return {content_hash(passage): passage.id for passage in reversed(corpus)}


def content_hash(passage: Passage) -> bytes:
    """Return a hash of title and text up to white space: equal for passages that two corpora hold under two ids."""
    text = f"{passage.title.strip()}\n{' '.join(passage.text.split())}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def fingerprint(corpus: Corpus) -> str:
    """Return a hash of ids, titles and texts in their order; equal in every process and on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    for passage in corpus:
        for field in (passage.id, passage.title, passage.text):
            encoded = field.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big"))  # Else "ab", "c" would equal "a", "bc".
            digest.update(encoded)
    return digest.hexdigest()


def _passage(record: Any) -> Passage:
    key, title, text = record["id"], record["title"], record["text"]
    if not isinstance(key, str | int) or not isinstance(title, str) or not isinstance(text, str):
        raise TypeError("title and text must be strings, id a string or a number")
    return Passage(str(key), title, text)

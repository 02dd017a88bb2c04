"""Passages: what searches search."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence

_GZIP = b"\x1f\x8b"


@dataclasses.dataclass(frozen=True)
class Passage:
    """One searchable passage."""

    id: str
    title: str
    text: str

    @property
    def line(self) -> str:
        """The passage as a search result shows it: on one line, whatever its text holds."""
        shown = f"- {self.title}: {self.text}" if self.title else f"- {self.text}"
        return " ".join(shown.splitlines())


Corpus = Sequence[Passage]


def read_corpus(path: str | os.PathLike[str]) -> list[Passage]:
    """Reads passages from JSONL, gzipped or plain, one `{"id", "title", "text"}` a line.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not a passage, or an id occurs twice; the message names file and line.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such corpus; set AGENTR1_DATA to the folder that holds the data")
    passages: dict[str, Passage] = {}
    try:
        for line in _lines(path):
            passage = _passage(line)
            if passage.id in passages:
                raise ValueError(f"the id {passage.id!r} occurs twice")
            passages[passage.id] = passage
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path}, line {len(passages) + 1}: not a passage with id, title and text "
            f"({type(error).__name__}: {error}); repair or download the file again"
        ) from error
    return list(passages.values())


def fingerprint(corpus: Corpus) -> str:
    """A hash of ids, titles and texts in their order; equal in every process and on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    for passage in corpus:
        for field in (passage.id, passage.title, passage.text):
            encoded = field.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big"))  # Else "ab", "c" would equal "a", "bc".
            digest.update(encoded)
    return digest.hexdigest()


def _lines(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        zipped = file.read(2) == _GZIP
    with gzip.open(path) if zipped else open(path, "rb") as lines:
        yield from lines


def _passage(line: bytes) -> Passage:
    record = json.loads(line)
    key, title, text = record["id"], record["title"], record["text"]
    if not isinstance(key, str | int) or not isinstance(title, str) or not isinstance(text, str):
        raise TypeError("title and text must be strings, id a string or a number")
    f"{title}{text}".encode()  # Raises on half a surrogate pair, at which tokenizers would fail later.
    return Passage(str(key), title, text)

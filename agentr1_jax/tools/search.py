"""Passages and a BM25 search tool over them (by the library bm25s)."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax.tools.base import ToolResult

_WORD = re.compile(r"(?u)\b\w\w+\b")
EMPTY_RESULT = "No results."
# Up to here a search (0.13 ms on one core; 0.5 ms over 40,000) takes no longer than starting a thread for it.
SMALL = 10_000


@dataclasses.dataclass(frozen=True)
class Passage:
    """One searchable passage."""

    id: str
    title: str
    text: str

    @property
    def line(self) -> str:
        """The passage as a search result shows it."""
        return f"- {self.title}: {self.text}"


Corpus = Sequence[Passage]


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


def words(text: str) -> list[str]:
    """Terms of a text for BM25: lower-cased words of two or more characters without English stop words."""
    _, stop_words = _library()
    return [word for word in _WORD.findall(text.lower()) if word not in stop_words]


def read_corpus(path: str | os.PathLike[str]) -> list[Passage]:
    """Reads passages from gzipped JSONL, one `{"id", "title", "text"}` a line.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not a passage, or an id occurs twice; the message names file and line.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such corpus; set AGENTR1_DATA to the folder that holds the data")
    passages: dict[str, Passage] = {}
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                record = json.loads(line)
                passage = Passage(str(record["id"]), record["title"], record["text"])
                if not isinstance(passage.title, str) or not isinstance(passage.text, str):
                    raise TypeError("title and text must be strings")
                if passage.id in passages:
                    raise ValueError(f"the id {passage.id!r} occurs twice")
                passages[passage.id] = passage
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}, line {max(number, 1)}: not a passage with id, title and text "
            f"({type(error).__name__}: {error}); repair or download the file again"
        ) from error
    return list(passages.values())


class SearchTool:
    """Tool `search(query)`: the `top_k` passages with the highest BM25 score, one line each.

    k₁ = 0.9 and b = 0.4 (Lucene's form of BM25); the indexed text is title and text. Passages that share no term with
    the query are never shown; equal scores are ordered by the passage's index. `data` of a result: `ids` and `titles`.

    Attributes:
      blocking: whether a search takes so long that it is worth a thread (see `Tool`); by the number of passages.
    """

    name = "search"
    description = "Searches passages of an encyclopedia."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string", "minLength": 1, "description": "what to look for"}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, corpus: Corpus, top_k: int):
        if not corpus:
            raise ValueError("a search tool needs at least one passage; the corpus is empty")
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}; it must be at least 1")
        self.corpus = corpus
        self.top_k = top_k
        self.blocking = len(corpus) > SMALL
        bm25, _ = _library()
        self._index = bm25(k1=0.9, b=0.4)
        self._index.index([words(f"{p.title} {p.text}") for p in corpus], show_progress=False)

    def search(self, query: str, top_k: int | None = None) -> list[int]:
        """Indices of the best passages, best first; at most `top_k` (by default the tool's own)."""
        vocabulary = self._index.vocab_dict
        terms = [vocabulary[word] for word in words(query) if word in vocabulary]
        if not terms:
            return []
        scores = self._index.get_scores_from_ids(terms)
        return _top(scores, self.top_k if top_k is None else top_k)

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs one search; see the class."""
        found = [self.corpus[i] for i in self.search(arguments["query"])]
        content = "\n".join(p.line for p in found) or EMPTY_RESULT
        return ToolResult(content, data={"ids": [p.id for p in found], "titles": [p.title for p in found]})


def _top(scores: np.ndarray, k: int) -> list[int]:
    """Indices of the k highest positive scores [N], descending; ties by index, whatever the partition does to them."""
    k = min(k, len(scores))
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
    candidates = np.flatnonzero((scores >= threshold) & (scores > 0))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:k].tolist()

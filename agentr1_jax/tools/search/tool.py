"""The search tool, and the contract of the retrievers that it asks."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from agentr1_jax.tools.base import ToolResult, failure, run_in_thread

EMPTY_RESULT = "No results."
MARKER = " ..."
_WHOLE_WORDS = re.compile(r"(?s)(.*\S)\s")


@dataclasses.dataclass(frozen=True)
class Passage:
    """One searchable passage."""

    id: str
    title: str
    text: str

    @property
    def line(self) -> str:
        """The passage in a search result, on one line."""
        shown = f"- {self.title}: {self.text}" if self.title else f"- {self.text}"
        return " ".join(shown.splitlines())


@dataclasses.dataclass(frozen=True)
class Hit:
    """A passage and its score; scores of two retrievers do not compare."""

    passage: Passage
    score: float


Corpus = Sequence[Passage]
Hits = Sequence[Hit]


class Retriever(Protocol):
    """Finds passages for queries."""

    @property
    def blocking(self) -> bool:
        """True where `search` takes so long (0.5 ms and more) that it is worth a thread; False where it is async."""

    @property
    def batches(self) -> bool:
        """True where many queries at once cost less than one by one."""

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[Hits] | Awaitable[Sequence[Hits]]:
        """Return at most `top_k` hits for each query, best first; sync or async.

        Raises:
          RetrieverError: the infrastructure failed all of the queries.
        """


class RetrieverError(Exception):
    """A failure of the infrastructure.

    Attributes:
      kind: a short typed name, e.g. `timeout`; counted as `tools/error/<kind>`.
      message: what happened, where, and what to do.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class SearchTool:
    """Tool `search(query)`: the best `top_k` passages of a retriever, one line each.

    `data` of a result: `ids`, `titles` and `scores` of these passages. A RetrieverError becomes a failed call of its
    kind, a fault of the infrastructure. Where the retriever gains from batches, the tool has `execute_batch`.

    Attributes:
      retriever: finds the passages.
      top_k: passages of a result.
      passage_characters: length of a passage's text, the ` ...` of a truncated one included; 0 for no limit.

    Raises:
      ValueError: `top_k` or `passage_characters` makes no sense.
    """

    name = "search"
    description = "Searches passages of an encyclopedia."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string", "minLength": 1, "description": "what to look for"}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, retriever: Retriever, top_k: int, passage_characters: int = 0) -> None:
        check_display(top_k, passage_characters)
        self.retriever = retriever
        self.top_k = top_k
        self.passage_characters = passage_characters
        if retriever.batches:  # `wrappers.wrap_tool` collects calls for a tool that has it.
            self.execute_batch = self._execute_batch

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one search; see the class."""
        (result,) = await self._execute_batch([arguments])
        return result

    async def _execute_batch(self, arguments: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        queries = [call["query"] for call in arguments]
        try:
            found = await self._search(queries)
        except RetrieverError as error:
            return [failure(error.kind, f"Error: search failed: {error.message}", "infrastructure")] * len(queries)
        if len(found) != len(queries):
            message = f"Error: the retriever returned results of {len(found)} queries for {len(queries)}"
            return [failure("bad_result", message, "infrastructure")] * len(queries)
        return [self.result(hits[: self.top_k]) for hits in found]

    async def _search(self, queries: Sequence[str]) -> Sequence[Hits]:
        if self.retriever.blocking:
            found = await run_in_thread(self.retriever.search, queries, self.top_k)
        else:
            found = self.retriever.search(queries, self.top_k)
        return await found if inspect.isawaitable(found) else found

    def result(self, hits: Hits) -> ToolResult:
        """Return the result that shows these hits."""
        data = {
            "ids": [hit.passage.id for hit in hits],
            "titles": [hit.passage.title for hit in hits],
            "scores": [float(hit.score) for hit in hits],
        }
        return ToolResult("\n".join(self._line(hit.passage) for hit in hits) or EMPTY_RESULT, data=data)

    def _line(self, passage: Passage) -> str:
        if not self.passage_characters:
            return passage.line
        return dataclasses.replace(passage, text=truncate_text(passage.text, self.passage_characters)).line


def check_display(top_k: int, passage_characters: int) -> None:
    """Refuse settings with which a SearchTool can show nothing. Raises ValueError."""
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1")
    if passage_characters and passage_characters <= len(MARKER):
        raise ValueError(f"passage_characters is {passage_characters}; it must be 0 (no limit) or over {len(MARKER)}")


def truncate_text(text: str, characters: int) -> str:
    """Truncate a text to `characters`, the marker ` ...` included; between words, unless its first word is too long."""
    if len(text) <= characters:
        return text
    room = characters - len(MARKER)
    whole = _WHOLE_WORDS.match(text[: room + 1])
    return (whole[1] if whole else text[:room]) + MARKER

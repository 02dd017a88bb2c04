"""The Retriever contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Sequence
from typing import Protocol

from agentr1_jax.tools.search.corpus import Passage


@dataclasses.dataclass(frozen=True)
class Hit:
    """A passage and its score; scores of two retrievers do not compare."""

    passage: Passage
    score: float


Hits = Sequence[Hit]


class Retriever(Protocol):
    """Finds passages for queries."""

    @property
    def blocking(self) -> bool:
        """True where `search` takes so long (0.5 ms and more) that it is worth a thread; False where it is async."""
        ...

    @property
    def batches(self) -> bool:
        """True where many queries at once cost less than one by one."""
        ...

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[Hits] | Awaitable[Sequence[Hits]]:
        """Return at most `top_k` hits for each query, best first; sync or async.

        Raises:
          RetrieverError: the infrastructure failed all of the queries.
        """
        ...


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

"""The Retriever contract: what finds passages for queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Sequence
from typing import Protocol

from agentr1_jax.tools.search.corpus import Passage


@dataclasses.dataclass(frozen=True)
class Hit:
    """A passage found and how well it fits; scores of two retrievers do not compare."""

    passage: Passage
    score: float


Hits = Sequence[Hit]


class Retriever(Protocol):
    """Finds passages, by words, by meaning or by asking somebody else."""

    @property
    def blocking(self) -> bool:
        """Whether `search` takes so long (0.5 ms and more) that it is worth a thread; False where it is async."""
        ...

    @property
    def batches(self) -> bool:
        """Whether many queries at once cost less than one by one."""
        ...

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[Hits] | Awaitable[Sequence[Hits]]:
        """At most `top_k` hits for each query, best first; sync or async.

        Raises:
          RetrieverError: nothing can be said about any of the queries, through no fault of theirs.
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

"""From config to the retriever of a task."""

from __future__ import annotations

import importlib
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentr1_jax.envs.registry import Dispatch, call_directly
from agentr1_jax.errors import UserError
from agentr1_jax.tasks.multihop.task import RetrieverConfig
from agentr1_jax.tools.search import BM25, Corpus, RemoteRetriever, Retriever

T = TypeVar("T")


class LateDispatch:
    """A `Dispatch` whose way is known later: a task is made before the engine whose thread its searches run on.

    Attributes:
      to: `Engine.dispatch`, once there is an engine; until then functions run on the spot.
    """

    def __init__(self) -> None:
        self.to: Dispatch = call_directly

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]:
        return self.to(function)


def make_retriever(c: RetrieverConfig, corpus: Corpus, top_k: int, dispatch: Dispatch = call_directly) -> Retriever:
    """Make the retriever of `task.multihop.retriever` over a corpus (`http` has its own, but takes its ids).

    A dense one computes the corpus's vectors here, unless its index has them, and compiles what searches need.

    Args:
      c: keys of `task.multihop.retriever`.
      corpus: passages.
      top_k: passages that a search returns.
      dispatch: runs what uses the devices; see `DenseRetriever`.

    Raises:
      UserError: the keys do not fit each other, or what they name cannot be used.
    """
    index = os.path.join(os.path.expanduser(c.index), c.kind) if c.index else ""
    try:
        if c.kind == "http":
            return RemoteRetriever(c.url, c.seconds, c.attempts, cache=c.cache, corpus=corpus)
        if c.kind == "bm25":
            return BM25(corpus, index)
        dense = importlib.import_module("agentr1_jax.contrib.dense_retrieval")
        return dense.make_dense_retriever(c, corpus, top_k, index, dispatch)
    except (ValueError, OSError) as error:
        raise UserError(f"task.multihop.retriever: {error}") from error

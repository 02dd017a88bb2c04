"""From config to the retriever of a task."""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentr1_jax.errors import UserError
from agentr1_jax.policy.embedder import QUERY_TOKENS, Embedder
from agentr1_jax.tasks.multihop.task import RetrieverConfig
from agentr1_jax.tools.search import Corpus, RemoteRetriever, Retriever, build_or_load
from agentr1_jax.tools.search.dense import Dense, Dispatch, at_once
from agentr1_jax.tools.search.vectors import corpus_vectors

T = TypeVar("T")


class LateDispatch:
    """A `Dispatch` whose way is known later: a task is made before the engine whose thread its searches run on.

    Attributes:
      to: `Engine.dispatch`, once there is an engine; until then functions run on the spot.
    """

    def __init__(self) -> None:
        self.to: Dispatch = at_once

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]:
        return self.to(function)


def make_retriever(c: RetrieverConfig, corpus: Corpus, top_k: int, dispatch: Dispatch = at_once) -> Retriever:
    """The retriever of `task.multihop.retriever`, over a corpus (`http` has its own, but takes its ids).

    A dense one computes the corpus's vectors here, unless its index has them, and compiles what searches need.

    Args:
      c: its settings.
      corpus: passages.
      top_k: passages that a search returns.
      dispatch: runs what uses the devices; see `Dense`.

    Raises:
      UserError: the keys do not fit each other, or what they name cannot be used.
    """
    index = os.path.join(os.path.expanduser(c.index), c.kind) if c.index else ""
    try:
        if c.kind == "http":
            return RemoteRetriever(c.url, c.seconds, c.attempts, cache=c.cache, corpus=corpus)
        if c.kind == "bm25":
            return build_or_load(corpus, index)
        return _dense(c, corpus, top_k, index, dispatch)
    except (ValueError, OSError) as error:
        raise UserError(f"task.multihop.retriever: {error}") from error


def _dense(c: RetrieverConfig, corpus: Corpus, top_k: int, index: str, dispatch: Dispatch) -> Dense:
    embedder = Embedder(c.encoder, pooling=c.pooling, normalised=c.normalised, dtype=c.dtype, most_tokens=c.tokens)
    passages = functools.partial(embedder.embed, prefix=c.passage_prefix)
    vectors = corpus_vectors(corpus, passages, f"{embedder.identity} {c.passage_prefix!r}", index)
    queries = functools.partial(embedder.embed, prefix=c.query_prefix, tokens_per_call=QUERY_TOKENS)
    dense = Dense(corpus, vectors, queries, dtype=c.dtype, dispatch=dispatch)
    embedder.compile(QUERY_TOKENS)
    dense.find(["?"], top_k)
    return dense

"""From config to the retriever of a task."""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import ml_collections

from agentr1_jax.errors import UserError
from agentr1_jax.policy.embedder import DTYPES, QUERY_TOKENS, Embedder
from agentr1_jax.policy.encoder import POOLINGS
from agentr1_jax.tools.search import Corpus, RemoteRetriever, Retriever, build_or_load
from agentr1_jax.tools.search.dense import Dense, Dispatch, at_once
from agentr1_jax.tools.search.vectors import corpus_vectors
from configs import base

T = TypeVar("T")

KEYS = {
    "bm25": ("index",),
    "dense": (
        "encoder",
        "index",
        "pooling",
        "normalised",
        "query_prefix",
        "passage_prefix",
        "tokens",
        "dtype",
    ),
    "http": ("url", "seconds", "attempts", "cache"),
}
"""Keys of `task.multihop.retriever` that each kind reads."""

NEEDED = {"dense": "encoder", "http": "url"}


class LateDispatch:
    """A `Dispatch` whose way is known later: a task is made before the engine whose thread its searches run on.

    Attributes:
      to: `Engine.dispatch`, once there is an engine; until then functions run on the spot.
    """

    def __init__(self) -> None:
        self.to: Dispatch = at_once

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]:
        return self.to(function)


def check_retriever(config: ml_collections.ConfigDict) -> None:
    """Refuses what cannot work, before anything is read.

    Raises:
      UserError: names the keys of `task.multihop.retriever` and what to do.
    """
    c, default = config.task.multihop.retriever, base.get_config().task.multihop.retriever
    if c.kind not in KEYS:
        raise UserError(f"task.multihop.retriever.kind is {c.kind!r}; choose one of {', '.join(KEYS)}")
    needed = NEEDED.get(c.kind)
    if needed and not c[needed]:
        raise UserError(
            f"task.multihop.retriever.kind is {c.kind!r}, which needs task.multihop.retriever.{needed}; set it"
        )
    for key, value in c.items():
        if key != "kind" and key not in KEYS[c.kind] and value != default[key]:
            kinds = " or ".join(repr(kind) for kind, keys in KEYS.items() if key in keys)
            raise UserError(
                f"task.multihop.retriever.{key} is {value!r}, which only kind {kinds} reads; "
                f"task.multihop.retriever.kind is {c.kind!r}: change one of them"
            )
    for key, known in (("pooling", POOLINGS), ("dtype", DTYPES)):
        if c[key] not in known:
            raise UserError(f"task.multihop.retriever.{key} is {c[key]!r}; choose one of {', '.join(known)}")


def make_retriever(config: ml_collections.ConfigDict, corpus: Corpus, dispatch: Dispatch = at_once) -> Retriever:
    """The retriever that `config.task.multihop.retriever` names, over a corpus (`http` has its own, but takes its ids).

    A dense one computes the corpus's vectors here, unless its index has them, and compiles what searches need.

    Args:
      config: of the run.
      corpus: passages.
      dispatch: runs what uses the devices; see `Dense`.

    Raises:
      UserError: the keys do not fit each other, or what they name cannot be used.
    """
    check_retriever(config)
    c = config.task.multihop.retriever
    index = os.path.join(os.path.expanduser(c.index), c.kind) if c.index else ""
    try:
        if c.kind == "http":
            return RemoteRetriever(c.url, c.seconds, c.attempts, cache=c.cache, corpus=corpus)
        if c.kind == "bm25":
            return build_or_load(corpus, index)
        return _dense(config, corpus, index, dispatch)
    except (ValueError, OSError) as error:
        raise UserError(f"task.multihop.retriever: {error}") from error


def _dense(config: ml_collections.ConfigDict, corpus: Corpus, index: str, dispatch: Dispatch) -> Dense:
    c = config.task.multihop.retriever
    embedder = Embedder(c.encoder, pooling=c.pooling, normalised=c.normalised, dtype=c.dtype, most_tokens=c.tokens)
    passages = functools.partial(embedder.embed, prefix=c.passage_prefix)
    vectors = corpus_vectors(corpus, passages, f"{embedder.identity} {c.passage_prefix!r}", index)
    queries = functools.partial(embedder.embed, prefix=c.query_prefix, tokens_per_call=QUERY_TOKENS)
    dense = Dense(corpus, vectors, queries, dtype=c.dtype, dispatch=dispatch)
    embedder.compile(QUERY_TOKENS)
    dense.find(["?"], config.task.top_k)
    return dense

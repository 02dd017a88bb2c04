"""The dense retriever: exact search among the vectors of passages, on the devices of this process."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from agentr1_jax.contrib.dense_retrieval.embedder import QUERY_TOKENS, Embedder
from agentr1_jax.contrib.dense_retrieval.top_k import make_top_k
from agentr1_jax.contrib.dense_retrieval.vectors import Embed, corpus_vectors
from agentr1_jax.envs.registry import Dispatch, call_directly
from agentr1_jax.tasks.multihop.task import RetrieverConfig
from agentr1_jax.tools.search.tool import Corpus, Hit


class DenseRetriever:
    """A Retriever: the passages with the highest dot product of their vector and the query's; exact.

    A search runs programs on the devices that the rollout engine decodes on. Each device runs its programs in the order
    in which they were enqueued, and a program over several devices waits for all of them: were two threads to enqueue
    such programs, device 0 could wait in one of them and device 1 in the other, for ever. Hence all programs go through
    the engine's thread: `dispatch` is its `Dispatcher` during a rollout, and a search runs between two decode calls.

    A query's hits do not depend on which others share its batch; equal scores are ordered by the passage's index.

    Args:
      corpus: at least one passage.
      vectors: vectors of the passages in order, float32 [*, D] each; see `vectors.corpus_vectors`.
      embed: queries -> their vectors, float32 [B, D].
      dtype: dtype of the vectors on the devices, float32 or bfloat16.
      devices: devices of this process that share the passages; None for all.
      dispatch: runs a search where no other thread enqueues programs.

    Raises:
      ValueError: vectors and corpus do not belong together.
    """

    blocking = False
    batches = True

    def __init__(
        self,
        corpus: Corpus,
        vectors: Sequence[np.ndarray],
        embed: Embed,
        *,
        dtype: str = "float32",
        devices: Sequence[jax.Device] | None = None,
        dispatch: Dispatch = call_directly,
    ) -> None:
        if sum(map(len, vectors)) != len(corpus) or not corpus:
            raise ValueError(f"there are {sum(map(len, vectors))} vectors for {len(corpus)} passages")
        self.corpus = corpus
        self._embed = embed
        self._top_k = make_top_k(vectors, dtype=dtype, devices=devices)
        self._dispatch = dispatch

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return the `top_k` nearest passages (all there are, if fewer) for each query, best first."""
        return await self._dispatch(functools.partial(self.find, list(queries), top_k))

    def find(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Search on the calling thread."""
        if not queries:
            return []
        scores, rows = self._top_k(self._embed(queries), top_k)
        return [
            [Hit(self.corpus[row], float(score)) for score, row in zip(*found, strict=True)]
            for found in zip(scores, rows, strict=True)
        ]


def make_dense_retriever(
    settings: RetrieverConfig, corpus: Corpus, top_k: int, index: str = "", dispatch: Dispatch = call_directly
) -> DenseRetriever:
    """Make the retriever of `task.multihop.retriever`, and compile the programs of its searches.

    Args:
      settings: keys of `task.multihop.retriever`.
      corpus: at least one passage.
      top_k: passages that a search returns.
      index: folder that keeps the vectors; "" computes them anew.
      dispatch: see `DenseRetriever`.

    Raises:
      ValueError: the encoder or the index cannot be used.
      OSError: likewise.
    """
    embedder = Embedder(
        settings.encoder,
        pooling=settings.pooling,
        normalised=settings.normalised,
        dtype=settings.dtype,
        max_tokens=settings.tokens,
    )
    passages = functools.partial(embedder.embed, prefix=settings.passage_prefix)
    vectors = corpus_vectors(corpus, passages, f"{embedder.identity} {settings.passage_prefix!r}", index)
    queries = functools.partial(embedder.embed, prefix=settings.query_prefix, tokens_per_call=QUERY_TOKENS)
    retriever = DenseRetriever(corpus, vectors, queries, dtype=settings.dtype, dispatch=dispatch)
    embedder.compile(QUERY_TOKENS)
    retriever.find(["?"], top_k)
    return retriever

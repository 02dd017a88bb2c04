"""Dense retrieval: passages whose vectors are nearest to the query's."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import jax
import numpy as np

from agentr1_jax.tools.search.corpus import Corpus
from agentr1_jax.tools.search.retriever import Hit
from agentr1_jax.tools.search.top_k import make_top_k
from agentr1_jax.tools.search.vectors import Embed

T = TypeVar("T")


class Dispatch(Protocol):
    """Runs a function that uses devices where and when it may; see `Dense`."""

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]: ...


async def at_once(function: Callable[[], T]) -> T:
    """A `Dispatch` that calls the function on the spot, for where nothing else uses the devices meanwhile."""
    return function()


class Dense:
    """A Retriever: the passages with the highest dot product of their vector and the query's; exact.

    A search runs programs on the devices that the rollout engine decodes on. Each device runs its programs in the order
    in which they were enqueued, and a program over several devices waits for all of them: were two threads to enqueue
    such programs, device 0 could wait in one of them and device 1 in the other, for ever. Hence all go through one
    thread, the engine's: `dispatch` is `Engine.dispatch` during a rollout, and a search runs between two of its turns.

    A query's hits do not depend on which others share its batch; equal scores are ordered by the passage's index.

    Args:
      corpus: at least one passage.
      vectors: of the passages in order, float32 [*, D] each; see `vectors.corpus_vectors`.
      embed: queries -> their vectors, float32 [B, D].
      dtype: of the passages' vectors on the devices, float32 or bfloat16.
      devices: of this process over which the passages are dealt; None for all.
      dispatch: runs a search.

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
        dispatch: Dispatch = at_once,
    ) -> None:
        if sum(map(len, vectors)) != len(corpus) or not corpus:
            raise ValueError(f"there are {sum(map(len, vectors))} vectors for {len(corpus)} passages")
        self.corpus = corpus
        self._embed = embed
        self._top_k = make_top_k(vectors, dtype=dtype, devices=devices)
        self._dispatch = dispatch

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` nearest passages (all there are, if fewer) for each query, best first."""
        return await self._dispatch(functools.partial(self.find, list(queries), top_k))

    def find(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """What `search` finds, on the thread that calls."""
        if not queries:
            return []
        scores, rows = self._top_k(self._embed(queries), top_k)
        return [
            [Hit(self.corpus[row], float(score)) for score, row in zip(*found, strict=True)]
            for found in zip(scores, rows, strict=True)
        ]

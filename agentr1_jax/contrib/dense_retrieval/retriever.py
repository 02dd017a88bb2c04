"""The dense retriever: exact search among the vectors of passages, on the devices of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from agentr1_jax.contrib.dense_retrieval.embedder import QUERY_TOKENS, Embedder
from agentr1_jax.contrib.dense_retrieval.vectors import Embed, corpus_vectors
from agentr1_jax.envs.registry import Dispatch, call_directly
from agentr1_jax.tasks.multihop.task import RetrieverConfig
from agentr1_jax.tools.search.tool import Corpus, Hit

QUERIES = 32
"""Queries of one call; fewer are padded, so that what a query finds depends on no other and nothing recompiles."""
MAX_SCORES = 1 << 21
"""Scores that a device holds at once; 8 MiB."""


class DenseRetriever:
    """A Retriever: the passages with the highest dot product of their vector and the query's; exact.

    A search runs programs on the devices that the rollout engine decodes on. Each device runs its programs in the order
    in which they were enqueued, and a program over several devices waits for all of them: were two threads to enqueue
    such programs, device 0 could wait in one of them and device 1 in the other, for ever. Hence all programs go through
    the engine's thread: `dispatch` is its `Dispatcher` during a rollout, and a search runs between two decode calls.

    A query's hits do not depend on which others share its batch; equal scores are ordered by the passage's index.

    Args:
      vectors: vectors of the passages in order, float32 [*, D] each; see `vectors.corpus_vectors`.
      embed: queries -> their vectors, float32 [B, D].
      dtype: dtype of the vectors on the devices, float32 or bfloat16.
      devices: devices of this process that share the passages; None for all.
      dispatch: runs a search where no other thread enqueues programs.
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
      top_k: passages that a search returns.
      index: folder that keeps the vectors; "" computes them anew.
      dispatch: see `DenseRetriever`.

    Raises:
      ValueError, OSError: the encoder or the index cannot be used.
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


def make_top_k(
    parts: Sequence[np.ndarray],
    *,
    dtype: str = "float32",
    devices: Sequence[jax.Device] | None = None,
    max_scores: int = MAX_SCORES,
) -> Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]:
    """Put a matrix on devices and return the function that finds its rows with the highest dot products.

    The devices share the rows. Each goes through its rows in blocks and keeps the best of all blocks so far; the best
    of all devices are merged at the end. So no device ever holds more than `max_scores` scores, and the result is
    that of the whole matrix: dot products summed in float32, equal ones ordered by row.

    Args:
      parts: float32 [*, D] each, at least one row in all; together the matrix, e.g. files mapped into memory.
      dtype: dtype of the matrix on the devices; queries are rounded to it, too.

    Returns:
      (queries float32 [Q, D], k) -> scores float32 [Q, min(k, N)], descending, and rows int32 of the same shape; Q is
      at least 1. One program for each k.
    """
    count, width = sum(len(part) for part in parts), parts[0].shape[1]
    mesh = Mesh(np.array(devices or jax.local_devices()), ("shard",), axis_types=(AxisType.Auto,))
    shards = mesh.devices.size
    blocks = -(-count // (shards * max(max_scores // QUERIES, 1)))
    block = -(-count // (shards * blocks))
    own = blocks * block

    def rows(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(shards * own)
        out = np.zeros((stop - start, width), jnp.dtype(dtype))
        first = 0
        for part in parts:
            low, high = max(start, first), min(stop, first + len(part))
            if low < high:
                out[low - start : high - start] = part[low - first : high - first]
            first += len(part)
        return out

    matrix = jax.make_array_from_callback((shards * own, width), NamedSharding(mesh, P("shard")), rows)

    def top_k(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores, places = [], []
        for start in range(0, len(queries), QUERIES):
            part = queries[start : start + QUERIES]
            padded = np.zeros((QUERIES, width), jnp.dtype(dtype))
            padded[: len(part)] = part
            best, at = jax.device_get(_find(padded, matrix, mesh=mesh, count=count, block=block, k=min(k, count)))
            scores.append(best[: len(part)])
            places.append(at[: len(part)])
        return np.concatenate(scores), np.concatenate(places)

    return top_k


@functools.partial(jax.jit, static_argnames=("mesh", "count", "block", "k"))
def _find(
    queries: Float[Array, "queries width"],
    matrix: Float[Array, "rows width"],
    *,
    mesh: Mesh,
    count: int,
    block: int,
    k: int,
) -> tuple[Float[Array, "queries k"], Int[Array, "queries k"]]:
    """Return scores and rows of the best of a matrix that `mesh` shares; its rows from `count` on are padding."""

    def on_shard(queries: Array, matrix: Array) -> tuple[Array, Array]:
        first = jax.lax.axis_index("shard") * len(matrix)
        scores, places = best_of_blocks(queries, matrix, first, count, block, k)
        return scores[None], places[None]

    search = jax.shard_map(on_shard, mesh=mesh, in_specs=(P(), P("shard")), out_specs=P("shard"), check_vma=False)
    scores, places = (jnp.moveaxis(x, 0, 1).reshape(len(queries), -1) for x in search(queries, matrix))
    best, at = jax.lax.top_k(scores, k)
    return best, jnp.take_along_axis(places, at, axis=1)


def best_of_blocks(
    queries: Float[Array, "queries width"],
    matrix: Float[Array, "rows width"],
    first: Array,
    count: int,
    block: int,
    k: int,
) -> tuple[Float[Array, "queries k"], Int[Array, "queries k"]]:
    """Return scores and rows of the best of a device's part of the matrix, which begins at row `first`.

    `top_k` puts equal values in order of place, and what was found so far stands before the block: ties go by row.
    """

    def step(best: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        part = jax.lax.dynamic_slice_in_dim(matrix, start, block)
        scores = jax.lax.dot_general(
            queries,
            part,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        scores = jnp.where(first + start + jnp.arange(block) < count, scores, -jnp.inf)
        values, at = jax.lax.top_k(jnp.concatenate([best[0], scores], axis=1), k)
        before = jnp.take_along_axis(best[1], jnp.minimum(at, k - 1), axis=1)
        return (values, jnp.where(at < k, before, first + start + at - k)), None

    nothing = jnp.full((len(queries), k), -jnp.inf), jnp.zeros((len(queries), k), jnp.int32)
    best, _ = jax.lax.scan(step, nothing, jnp.arange(0, len(matrix), block))
    return best

"""Exact search among vectors on devices: the rows of a matrix with the highest dot products."""

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

QUERIES = 32
"""Queries of one call; fewer are padded, so that what a query finds depends on no other and nothing recompiles."""

MAX_SCORES = 1 << 21
"""Scores that a device holds at once; 8 MiB."""

TopK = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def make_top_k(
    parts: Sequence[np.ndarray],
    *,
    dtype: str = "float32",
    devices: Sequence[jax.Device] | None = None,
    max_scores: int = MAX_SCORES,
) -> TopK:
    """Put a matrix on devices and return the function that searches it.

    The devices share the rows. Each goes through its rows in blocks and keeps the best of all blocks so far; the best
    of all devices are merged at the end. So no device ever holds more than `max_scores` scores, and the result is
    that of the whole matrix: dot products summed in float32, equal ones ordered by row.

    Args:
      parts: float32 [*, D] each, at least one row in all; together the matrix, e.g. files mapped into memory.
      dtype: dtype of the matrix on the devices, float32 or bfloat16; queries are rounded to it, too.
      devices: devices of this process; None for all.
      max_scores: scores of a block.

    Returns:
      (queries float32 [Q, D], k) -> scores float32 [Q, min(k, N)], descending, and rows int32 of the same shape. One
      program for each k.
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
        found = []
        for start in range(0, len(queries), QUERIES):
            part = queries[start : start + QUERIES]
            padded = np.zeros((QUERIES, width), jnp.dtype(dtype))
            padded[: len(part)] = part
            scores, places = jax.device_get(_find(padded, matrix, mesh=mesh, count=count, block=block, k=min(k, count)))
            found.append((scores[: len(part)], places[: len(part)]))
        if not found:
            return np.zeros((0, min(k, count)), np.float32), np.zeros((0, min(k, count)), np.int32)
        return np.concatenate([scores for scores, _ in found]), np.concatenate([places for _, places in found])

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
    """Scores and rows of the best; `matrix` lies on the devices of `mesh`, and its rows from `count` on are padding."""

    def on_shard(queries: Array, matrix: Array) -> tuple[Array, Array]:
        first = jax.lax.axis_index("shard") * len(matrix)
        scores, places = _best_of_blocks(queries, matrix, first, count, block, k)
        return scores[None], places[None]

    search = jax.shard_map(on_shard, mesh=mesh, in_specs=(P(), P("shard")), out_specs=P("shard"), check_vma=False)
    scores, places = (jnp.moveaxis(x, 0, 1).reshape(len(queries), -1) for x in search(queries, matrix))
    best, at = jax.lax.top_k(scores, k)
    return best, jnp.take_along_axis(places, at, axis=1)


def _best_of_blocks(
    queries: Float[Array, "queries width"],
    matrix: Float[Array, "rows width"],
    first: Array,
    count: int,
    block: int,
    k: int,
) -> tuple[Float[Array, "queries k"], Int[Array, "queries k"]]:
    """The best k rows of a device's part of the matrix, which begins at row `first`; rows from `count` on are padding.

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

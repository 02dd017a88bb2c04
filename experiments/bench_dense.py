"""Compares exact searches among vectors in one run: blocks, the whole score matrix, numpy on the host.

    python -m experiments.bench_dense [--passages=43000 --width=384 --devices=1 --json=FILE]

Vectors are random: times do not depend on what they say. Rounds alternate, so that all share whatever else the machine
does, and the fastest of each counts; ratios tell more than times, and on a busy machine CPU time more than wall time.
`whole` is one matmul and one `top_k` over all scores on one device; `numpy` is a matmul and `argpartition`. Both hold
all scores at once, blocks no more than `top_k.MOST_SCORES`.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from agentr1_jax.tools.search.top_k import MOST_SCORES, QUERIES, TopK, make_top_k

PASSAGES = flags.DEFINE_integer("passages", 43_000, "vectors to search", lower_bound=1)
WIDTH = flags.DEFINE_integer("width", 384, "numbers of a vector", lower_bound=1)
TOP_K = flags.DEFINE_integer("top_k", 5, "results of a query", lower_bound=1)
DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "of the vectors on the devices")
DEVICES = flags.DEFINE_integer("devices", 1, "over which blocks are dealt", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 5, "the fastest of so many counts", lower_bound=1)
JSON = flags.DEFINE_string("json", "", "file for the figures")


def whole(matrix: np.ndarray, dtype: str) -> TopK:
    """All scores in one matmul on the first device."""
    on_device = jax.device_put(matrix.astype(jnp.dtype(dtype)), jax.devices()[0])

    @functools.partial(jax.jit, static_argnames="k")
    def find(queries: jax.Array, matrix: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        scores = jnp.matmul(queries, matrix.T, precision="highest", preferred_element_type=jnp.float32)
        best, rows = jax.lax.top_k(scores, k)
        return best, rows

    return lambda queries, k: jax.device_get(find(queries.astype(jnp.dtype(dtype)), on_device, k))


def by_numpy(matrix: np.ndarray) -> TopK:
    """On the host."""

    def find(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores = queries @ matrix.T
        best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
        rows = np.take_along_axis(best, order, axis=1)
        return np.take_along_axis(scores, rows, axis=1), rows

    return find


def searches(matrix: np.ndarray) -> dict[str, TopK]:
    """What is compared, by name."""
    devices = jax.devices()[: DEVICES.value]
    found = {"numpy": by_numpy(matrix)}
    for dtype in DTYPES.value:
        found[f"whole {dtype}"] = whole(matrix, dtype)
        found[f"blocks {dtype}"] = make_top_k([matrix], dtype=dtype, devices=devices)
    return found


def spent(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a call by the clock, and of this process's CPU cores in it."""
    clocks = {"ms": time.perf_counter, "cpu_ms": time.process_time}
    begin = {key: clock() for key, clock in clocks.items()}
    call()
    return {key: 1000 * (clock() - begin[key]) for key, clock in clocks.items()}


def measured(matrix: np.ndarray, queries: np.ndarray, k: int) -> dict[str, dict[str, float]]:
    """For each search its milliseconds (see `spent`), and the share of its results that those of numpy are, too."""
    found = searches(matrix)
    expected = found["numpy"](queries, k)[1]
    out = {}
    for name, search in found.items():  # Compiles, too.
        out[name] = {"agrees": float(np.mean(search(queries, k)[1] == expected))}
    for _ in range(ROUNDS.value):
        for name, search in found.items():
            for key, value in spent(functools.partial(search, queries, k)).items():
                out[name][key] = min(value, out[name].get(key, value))
    return out


def main(argv: Sequence[str]) -> None:
    """The table, and the figures as JSON."""
    del argv
    rng = np.random.default_rng(0)
    matrix, queries = (rng.standard_normal((count, WIDTH.value), np.float32) for count in (PASSAGES.value, QUERIES))
    figures = measured(matrix, queries, min(TOP_K.value, PASSAGES.value))
    title = f"{QUERIES} queries, top {TOP_K.value} of {PASSAGES.value:,} vectors of {WIDTH.value}"
    out = Table(title=f"{title}; scores of {MOST_SCORES // QUERIES:,} at once in blocks")
    for column in ("search", "ms", "times numpy", "CPU ms", "times numpy", "equal results"):
        out.add_column(column, justify="left" if column == "search" else "right")
    for name, own in figures.items():
        times = (f"{x:.2f}" for key in ("ms", "cpu_ms") for x in (own[key], own[key] / figures["numpy"][key]))
        out.add_row(name, *times, f"{own['agrees']:.1%}")
    Console().print(out)
    if JSON.value:
        with open(os.path.expanduser(JSON.value), "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    app.run(main)

"""Exact search among vectors against brute force."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.contrib.dense_retrieval import top_k
from agentr1_jax.contrib.dense_retrieval.top_k import QUERIES, make_top_k
from agentr1_jax.runtime.compile_cache import CompileCounter


def brute_force(matrix, queries, k):
    scores = queries.astype(np.float64) @ matrix.astype(np.float64).T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


def split(matrix, places):
    return [part for part in np.split(matrix, sorted(places)) if len(part)]


@settings(max_examples=15)
@given(
    rows=st.sampled_from([1, 2, 7, 25, 90]),
    queries=st.integers(0, QUERIES + 3),
    k=st.sampled_from([1, 3, 30, 100]),
    spread=st.integers(1, 3),
    devices=st.sampled_from([1, 3]),
    block=st.sampled_from([1, 7, 1000]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    cuts=st.lists(st.integers(0, 90), max_size=3),
    seed=st.integers(0, 99),
)
def test_it_equals_brute_force_and_ties_go_by_row(rows, queries, k, spread, devices, block, dtype, cuts, seed):
    rng = np.random.default_rng(seed)
    # Small whole numbers: sums are exact in any order, and many rows are equal.
    matrix = rng.integers(-spread, spread + 1, (rows, 3)).astype(np.float32)
    asked = rng.integers(-2, 3, (queries, 3)).astype(np.float32)
    search = make_top_k(split(matrix, cuts), dtype=dtype, devices=jax.devices()[:devices], max_scores=block * QUERIES)
    scores, found = search(asked, k)
    expected_scores, expected = brute_force(matrix, asked, k)
    assert scores.dtype == np.float32 and found.shape == (queries, min(k, rows))
    np.testing.assert_array_equal(scores, expected_scores)
    np.testing.assert_array_equal(found, expected)


def test_real_numbers_and_what_rounding_does():
    rng = np.random.default_rng(0)
    matrix, queries = (rng.normal(size=(n, 32)).astype(np.float32) for n in (3000, 40))
    expected_scores, expected = brute_force(matrix, queries, 10)
    scores, found = make_top_k([matrix], max_scores=QUERIES * 256)(queries, 10)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5)

    def rounded(x):
        return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)

    expected_scores, _ = brute_force(rounded(matrix), rounded(queries), 10)
    scores, _ = make_top_k([matrix], dtype="bfloat16")(queries, 10)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5, err_msg="sums are not in float32")


def test_what_a_query_finds_depends_on_no_other_and_nothing_recompiles():
    rng = np.random.default_rng(1)
    matrix, queries = (rng.normal(size=(n, 16)).astype(np.float32) for n in (500, 20))
    search = make_top_k([matrix], devices=jax.devices()[:2])
    together = search(queries, 5)
    compiles = CompileCounter()
    for i in range(20):
        alone = search(queries[i : i + 1], 5)
        np.testing.assert_array_equal(alone[0][0], together[0][i])
        np.testing.assert_array_equal(alone[1][0], together[1][i])
    assert compiles.count == 0


@pytest.mark.parametrize("rows", [4096, 65536])
def test_scores_of_all_rows_are_never_held(rows):
    block, k = 1024, 5
    matrix = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    queries = jax.ShapeDtypeStruct((QUERIES, 64), jnp.float32)

    def search(queries, matrix):
        return top_k._best_of_blocks(queries, matrix, jnp.int32(0), rows, block, k)

    memory = jax.jit(search).lower(queries, matrix).compile().memory_analysis()
    # The scores of a block, a few times over, and its rows.
    assert memory.temp_size_in_bytes < 6 * 4 * block * (QUERIES + 64)

"""BM25 search against its formula, ties, odd input and the reading of a corpus."""

from __future__ import annotations

import collections
import gzip
import json
import math
import random
import time

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr1_jax.tools.base import Tool, argument_error
from agentr1_jax.tools.search import EMPTY_RESULT, Passage, SearchTool, _top, read_corpus, words


def corpus(*texts: str) -> list[Passage]:
    return [Passage(f"p{i}", f"Title{i}", text) for i, text in enumerate(texts)]


def bm25(passages: list[Passage], query: str, k1: float = 0.9, b: float = 0.4) -> list[float]:
    """Lucene's BM25 written down once more, slowly."""
    counts = [collections.Counter(words(f"{p.title} {p.text}")) for p in passages]
    lengths = [sum(c.values()) for c in counts]
    mean = sum(lengths) / len(lengths)
    scores = [0.0] * len(passages)
    for term in words(query):
        df = sum(term in c for c in counts)
        idf = math.log(1 + (len(passages) - df + 0.5) / (df + 0.5))
        for i, c in enumerate(counts):
            scores[i] += idf * c[term] / (c[term] + k1 * (1 - b + b * lengths[i] / mean))
    return scores


def test_order_is_that_of_the_formula():
    rng = random.Random(0)
    vocabulary = [f"word{i}" for i in range(30)]
    passages = corpus(*(" ".join(rng.choices(vocabulary, k=rng.randint(3, 25))) for _ in range(200)))
    tool = SearchTool(passages, top_k=10)
    for _ in range(30):
        query = " ".join(rng.choices(vocabulary, k=4))
        scores = bm25(passages, query)
        found = tool.search(query)
        assert len(found) == 10
        np.testing.assert_allclose([scores[i] for i in found], sorted(scores, reverse=True)[:10], rtol=1e-5)


def test_the_title_is_searched_and_shown():
    tool = SearchTool([Passage("a", "Glass Harbor", "a film"), Passage("b", "Pale River", "a song")], top_k=2)
    result = tool.execute({"query": "HARBOR"})
    assert result.content == "- Glass Harbor: a film"
    assert result.data == {"ids": ["a"], "titles": ["Glass Harbor"]}


@pytest.mark.parametrize("query", ["unheard", "the of and", "?!", " ", "x"])
def test_an_empty_result_says_so(query):
    result = SearchTool(corpus("some text"), top_k=3).execute({"query": query})
    assert result.ok and result.content == EMPTY_RESULT and result.data["ids"] == []


def test_equal_scores_are_ordered_by_index():
    tool = SearchTool(corpus(*["same words here"] * 50), top_k=7)
    assert tool.search("same words") == list(range(7))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 45))
def test_top_equals_a_full_stable_sort(scores, k):
    array = np.asarray(scores, np.float32)
    assert _top(array, k) == [i for i in np.argsort(-array, kind="stable") if array[i] > 0][:k]


def test_arguments_are_one_string_that_is_not_empty():
    tool = SearchTool(corpus("text"), top_k=1)
    assert isinstance(tool, Tool)
    jsonschema.Draft202012Validator.check_schema(dict(tool.parameters))
    assert argument_error(tool, {"query": "x"}) is None
    for wrong in ({}, {"query": ""}, {"query": 3}, {"query": "x", "top_k": 50}):
        assert argument_error(tool, wrong)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="empty"):
        SearchTool([], top_k=3)
    with pytest.raises(ValueError, match="top_k is 0"):
        SearchTool(corpus("x"), top_k=0)


def test_many_queries_are_quick():
    rng = random.Random(0)
    tool = SearchTool(corpus(*(" ".join(f"w{rng.randint(0, 300)}" for _ in range(15)) for _ in range(400))), top_k=3)
    start = time.perf_counter()
    for i in range(200):
        tool.execute({"query": f"w{i} w{i + 1} w{i + 2}"})
    assert (time.perf_counter() - start) / 200 < 1e-3


def write(path, lines):
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.write("\n".join(lines))


GOOD = json.dumps({"id": "a", "title": "T", "text": "é"})


def test_a_corpus_is_read(tmp_path):
    write(tmp_path / "c.jsonl.gz", [GOOD])
    assert read_corpus(tmp_path / "c.jsonl.gz") == [Passage("a", "T", "é")]


@pytest.mark.parametrize(
    "second", ["{", '{"id": "b", "title": "T"}', "[]", '{"id": "b", "title": 1, "text": ""}', GOOD]
)
def test_errors_of_a_corpus_name_file_and_line(tmp_path, second):
    write(tmp_path / "c.jsonl.gz", [GOOD, second])
    with pytest.raises(ValueError, match=r"c\.jsonl\.gz, line 2: not a passage"):
        read_corpus(tmp_path / "c.jsonl.gz")


def test_a_missing_or_cut_file_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="AGENTR1_DATA"):
        read_corpus(tmp_path / "none.jsonl.gz")
    write(tmp_path / "c.jsonl.gz", [GOOD] * 50)
    (tmp_path / "c.jsonl.gz").write_bytes((tmp_path / "c.jsonl.gz").read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"c\.jsonl\.gz, line"):
        read_corpus(tmp_path / "c.jsonl.gz")

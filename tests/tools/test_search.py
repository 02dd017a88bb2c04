"""BM25 search against its formula, ties, odd input; what the tool shows; the reading of a corpus."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import gzip
import json
import math
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr1_jax.tools import base
from agentr1_jax.tools.base import Tool, ToolError, argument_error
from agentr1_jax.tools.search import (
    BM25,
    EMPTY_RESULT,
    Hit,
    Passage,
    RetrieverError,
    SearchTool,
    fingerprint,
    read_corpus,
)
from agentr1_jax.tools.search.bm25 import _top, words
from agentr1_jax.tools.search.tool import MARKER, truncate_text
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool


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


def search(retriever, query: str, top_k: int) -> list[str]:
    (hits,) = retriever.search([query], top_k)
    return [hit.passage.id for hit in hits]


def test_order_and_scores_are_those_of_the_formula():
    rng = random.Random(0)
    vocabulary = [f"word{i}" for i in range(30)]
    passages = corpus(*(" ".join(rng.choices(vocabulary, k=rng.randint(3, 25))) for _ in range(200)))
    queries = [" ".join(rng.choices(vocabulary, k=4)) for _ in range(30)]
    found = BM25(passages).search(queries, 10)
    for query, hits in zip(queries, found, strict=True):
        scores = bm25(passages, query)
        assert len(hits) == 10
        expected = [scores[passages.index(hit.passage)] for hit in hits]
        np.testing.assert_allclose(expected, sorted(scores, reverse=True)[:10], rtol=1e-5)
        np.testing.assert_allclose([hit.score for hit in hits], expected, rtol=1e-5)


def test_the_title_is_searched_and_shown():
    passages = [Passage("a", "Glass Harbor", "a film"), Passage("b", "Pale River", "a song")]
    result = SearchTool(BM25(passages), top_k=2).execute({"query": "HARBOR"})
    assert result.content == "- Glass Harbor: a film"
    (score,) = result.data["scores"]
    assert result.data == {"ids": ["a"], "titles": ["Glass Harbor"], "scores": [score]}
    assert score == pytest.approx(max(bm25(passages, "harbor")))
    json.dumps(result.data)


@pytest.mark.parametrize("query", ["unheard", "the of and", "?!", " ", "x"])
def test_an_empty_result_says_so(query):
    result = SearchTool(BM25(corpus("some text")), top_k=3).execute({"query": query})
    assert result.ok and result.content == EMPTY_RESULT and result.data["ids"] == []


def test_equal_scores_are_ordered_by_index():
    assert search(BM25(corpus(*["same words here"] * 50)), "same words", 7) == [f"p{i}" for i in range(7)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 45))
def test_top_equals_a_full_stable_sort(scores, k):
    array = np.asarray(scores, np.float32)
    assert _top(array, k) == [i for i in np.argsort(-array, kind="stable") if array[i] > 0][:k]


def test_arguments_are_one_string_that_is_not_empty():
    tool = SearchTool(BM25(corpus("text")), top_k=1)
    assert isinstance(tool, Tool)
    jsonschema.Draft202012Validator.check_schema(dict(tool.parameters))
    assert argument_error(tool, {"query": "x"}) is None
    for wrong in ({}, {"query": ""}, {"query": 3}, {"query": "x", "top_k": 50}):
        assert argument_error(tool, wrong)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="empty"):
        BM25([])
    with pytest.raises(ValueError, match="the 2 passages of the corpus hold none"):
        BM25([Passage("a", "The", "a b"), Passage("b", "", "")])
    retriever = BM25(corpus("x"))
    with pytest.raises(ValueError, match="top_k is 0"):
        SearchTool(retriever, top_k=0)
    for characters in (-1, len(MARKER)):
        with pytest.raises(ValueError, match=f"passage_characters is {characters}"):
            SearchTool(retriever, 1, characters)


@given(st.text("ab \n", max_size=30), st.integers(len(MARKER) + 1, 32))
def test_a_text_is_cut_between_words_and_says_so(text, characters):
    cut = truncate_text(text, characters)
    assert len(cut) <= characters
    if len(text) <= characters:
        assert cut == text
        return
    kept = cut.removesuffix(MARKER)
    assert cut == kept + MARKER and text.startswith(kept)
    longest = text[: characters - len(MARKER)]
    if kept != longest:  # Cut shorter than need be: at the end of the last word that is there whole.
        assert text[len(kept)].isspace() and kept[-1:].strip() and len(longest[len(kept) :].split()) <= 1


def test_long_passages_are_cut_and_each_has_one_line():
    passages = [Passage("a", "T", "one two three four"), Passage("b", "", "one\ntwo\r\nthree\u2028four")]
    lines = SearchTool(BM25(passages), 2, passage_characters=12).execute({"query": "two"}).content.split("\n")
    assert sorted(lines) == ["- T: one two ...", "- one two ..."]
    lines = SearchTool(BM25(passages), 2).execute({"query": "two"}).content.split("\n")
    assert sorted(lines) == ["- T: one two three four", "- one two three four"]


@dataclasses.dataclass
class Planned:
    """A retriever that finds each query itself, unless it has an error to raise."""

    error: RetrieverError | None = None
    is_async: bool = False
    batches: bool = True
    blocking: bool = False
    wrong: int = 0
    asked: list[list[str]] = dataclasses.field(default_factory=list)

    def search(self, queries, top_k):
        return self._later(queries) if self.is_async else self._now(queries)

    async def _later(self, queries):
        await asyncio.sleep(0)
        return self._now(queries)

    def _now(self, queries):
        self.asked.append(list(queries))
        if self.error:
            raise self.error
        hits = [[Hit(Passage(f"{query}{n}", "T", query), 1.0) for n in range(5)] for query in queries]
        return hits[self.wrong :]


def calls(tool, *queries):
    async def main():
        return await asyncio.gather(*(base.call(tool, {"query": query}) for query in queries))

    return asyncio.run(main())


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_calls_reach_the_retriever_in_batches_where_it_gains_from_them(is_async, batches, blocking):
    retriever = Planned(is_async=is_async, batches=batches, blocking=blocking)
    tool = wrap_tool(SearchTool(retriever, 2), ToolsConfig(), ToolMetrics())
    results = calls(tool, "a", "b", "c")
    assert [result.data["ids"] for result in results] == [["a0", "a1"], ["b0", "b1"], ["c0", "c1"]]
    assert sorted(retriever.asked) == ([["a", "b", "c"]] if batches else [["a"], ["b"], ["c"]])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("batches", [False, True])
def test_what_a_retriever_cannot_do_is_typed_and_no_fault_of_the_policy(is_async, batches):
    retriever = Planned(RetrieverError("http_5xx", "the server burns"), is_async, batches)
    meter = ToolMetrics()
    results = calls(wrap_tool(SearchTool(retriever, 2), ToolsConfig(backoff_seconds=0), meter), "a", "b")
    for result in results:
        assert result.error == ToolError("http_5xx", "infrastructure") and "the server burns" in result.content
    assert sum(map(len, retriever.asked)) == 6 == meter.metrics()["tools/error/http_5xx"]
    missing = Planned(is_async=is_async, batches=batches, wrong=1)
    results = calls(wrap_tool(SearchTool(missing, 2), ToolsConfig(max_attempts=1), meter), "a", "b")
    assert {result.error for result in results} == {ToolError("bad_result", "infrastructure")}


def write(path, lines):
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.write("\n".join(lines))


GOOD = json.dumps({"id": "a", "title": "T", "text": "é"})


def test_a_corpus_is_read(tmp_path):
    write(tmp_path / "c.jsonl.gz", [GOOD])
    assert read_corpus(tmp_path / "c.jsonl.gz") == [Passage("a", "T", "é")]
    (tmp_path / "plain.jsonl").write_text(GOOD + '\n{"id": 7, "title": "", "text": "x"}\n', encoding="utf-8")
    assert read_corpus(tmp_path / "plain.jsonl") == [Passage("a", "T", "é"), Passage("7", "", "x")]


@pytest.mark.parametrize(
    "second",
    ["{", '{"id": "b", "title": "T"}', "[]", '{"id": "b", "title": 1, "text": ""}', GOOD]
    + ['{"id": null, "title": "T", "text": ""}', '{"id": "b", "title": "T", "text": "\\ud800"}', "\x00"],
)
def test_errors_of_a_corpus_name_file_and_line(tmp_path, second):
    write(tmp_path / "c.jsonl.gz", [GOOD, second])
    with pytest.raises(ValueError, match=r"c\.jsonl\.gz, line 2: not a passage"):
        read_corpus(tmp_path / "c.jsonl.gz")
    (tmp_path / "c.jsonl").write_text(f"{GOOD}\n{second}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"c\.jsonl, line 2: not a passage"):
        read_corpus(tmp_path / "c.jsonl")


def test_a_missing_or_damaged_file_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="AGENTR1_DATA"):
        read_corpus(tmp_path / "none.jsonl.gz")
    rng = random.Random(0)
    lines = [json.dumps({"id": str(n), "title": "T", "text": str(rng.random())}) for n in range(2000)]
    write(tmp_path / "c.jsonl.gz", lines)
    whole = (tmp_path / "c.jsonl.gz").read_bytes()
    scrambled = bytearray(whole)
    scrambled[len(whole) // 2 : len(whole) // 2 + 8] = b"\xff" * 8
    for damaged in (whole[:-12], whole[: len(whole) // 2], bytes(scrambled)):
        (tmp_path / "c.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"c\.jsonl\.gz, line \d+"):
            read_corpus(tmp_path / "c.jsonl.gz")


def test_a_fingerprint_tells_corpora_apart():
    passages = [Passage("a", "T", "one"), Passage("b", "U", "two")]
    assert fingerprint(passages) == fingerprint(list(passages)) == "26ed15df04bcaab3f3a45e64808ac390"
    others = [
        passages[::-1],
        passages[:1],
        [Passage("a", "To", "ne"), passages[1]],
        [Passage("a", "T", "oneb"), Passage("", "U", "two")],
        [passages[0], Passage("b", "U", "Two")],
    ]
    assert len({fingerprint(other) for other in [*others, passages, []]}) == 7

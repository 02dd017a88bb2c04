"""BM25 search against its formula, ties, odd input, its saved index; what the tool shows; the reading of a corpus."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import gzip
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_doubles import run

from agentr1_jax.tools import base
from agentr1_jax.tools.base import Tool, ToolError, argument_error
from agentr1_jax.tools.search import (
    BM25,
    EMPTY_RESULT,
    Hit,
    Passage,
    RetrieverError,
    SearchTool,
    bm25,
    fingerprint,
    read_corpus,
)
from agentr1_jax.tools.search.bm25 import SMALL, _top, words
from agentr1_jax.tools.search.tool import MARKER, truncate_text
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool


def corpus(*texts: str) -> list[Passage]:
    return [Passage(f"p{i}", f"Title{i}", text) for i, text in enumerate(texts)]


def slow_scores(passages: list[Passage], query: str, k1: float = 0.9, b: float = 0.4) -> list[float]:
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
        scores = slow_scores(passages, query)
        assert len(hits) == 10
        expected = [scores[passages.index(hit.passage)] for hit in hits]
        np.testing.assert_allclose(expected, sorted(scores, reverse=True)[:10], rtol=1e-5)
        np.testing.assert_allclose([hit.score for hit in hits], expected, rtol=1e-5)


def test_the_title_is_searched_and_shown():
    passages = [Passage("a", "Glass Harbor", "a film"), Passage("b", "Pale River", "a song")]
    result = run(SearchTool(BM25(passages), top_k=2), {"query": "HARBOR"})
    assert result.content == "- Glass Harbor: a film"
    (score,) = result.data["scores"]
    assert result.data == {"ids": ["a"], "titles": ["Glass Harbor"], "scores": [score]}
    assert score == pytest.approx(max(slow_scores(passages, "harbor")))
    json.dumps(result.data)


@pytest.mark.parametrize("query", ["unheard", "the of and", "?!"])
def test_an_empty_result_says_so(query):
    result = run(SearchTool(BM25(corpus("some text")), top_k=3), {"query": query})
    assert result.ok and result.content == EMPTY_RESULT and result.data["ids"] == []


def test_equal_scores_are_ordered_by_index():
    assert search(BM25(corpus(*["same words here"] * 50)), "same words", 7) == [f"p{i}" for i in range(7)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 45))
def test_top_equals_a_full_stable_sort(scores, k):
    array = np.asarray(scores, np.float32)
    assert _top(array, k) == [i for i in np.argsort(-array, kind="stable") if array[i] > 0][:k]


def test_bad_arguments_and_settings_are_refused():
    tool = SearchTool(BM25(corpus("text")), top_k=1)
    assert isinstance(tool, Tool) and argument_error(tool, {"query": "x"}) is None
    for wrong in ({}, {"query": ""}, {"query": 3}, {"query": "x", "top_k": 50}):
        assert argument_error(tool, wrong)
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
    lines = run(SearchTool(BM25(passages), 2, passage_characters=12), {"query": "two"}).content.split("\n")
    assert sorted(lines) == ["- T: one two ...", "- one two ..."]
    lines = run(SearchTool(BM25(passages), 2), {"query": "two"}).content.split("\n")
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


@pytest.mark.parametrize(("is_async", "blocking"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("batches", [False, True])
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


VOCABULARY = [f"word{i}" for i in range(40)]
RNG = random.Random(1)
CORPUS = [Passage(f"p{i}", f"Title{i}", " ".join(RNG.choices(VOCABULARY, k=12))) for i in range(300)]
QUERIES = [" ".join(RNG.choices(VOCABULARY, k=3)) for _ in range(40)] + ["Title7", "unheard"]


def test_the_mapped_index_finds_the_very_same_and_is_built_once(tmp_path, monkeypatch):
    first = BM25(CORPUS, tmp_path / "new")
    assert first.search(QUERIES, 5) == BM25(CORPUS).search(QUERIES, 5)
    assert sum(map(len, first.search(QUERIES, 5))) > 150
    arrays = [first._index.scores[key] for key in ("data", "indices", "indptr")]
    assert all(isinstance(array.base, np.memmap) and not array.flags.writeable for array in arrays)
    monkeypatch.setattr(bm25, "_build_index", lambda corpus: pytest.fail("it is there"))
    assert BM25(CORPUS, tmp_path / "new").search(QUERIES, 3) == first.search(QUERIES, 3)


def test_another_corpus_has_an_index_of_its_own(tmp_path):
    BM25(CORPUS, tmp_path)
    other = CORPUS[::-1]
    assert BM25(other, tmp_path).search(QUERIES, 5) == BM25(other).search(QUERIES, 5)
    assert len(list(tmp_path.iterdir())) == 2


def test_many_may_build_it_at_once(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        built = list(pool.map(lambda _: BM25(CORPUS, tmp_path), range(6)))
    assert all(one.search(QUERIES, 3) == built[0].search(QUERIES, 3) for one in built)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_interrupted_build_leaves_no_index(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("pathlib.Path.rename", interrupt)
        BM25(CORPUS, tmp_path)
    assert not list(tmp_path.iterdir())
    assert BM25(CORPUS, tmp_path).search(QUERIES, 1)


def test_a_damaged_index_is_refused(tmp_path):
    BM25(CORPUS, tmp_path)
    (index,) = tmp_path.iterdir()
    (index / "params.index.json").write_text("{")
    with pytest.raises(ValueError, match="bm25s cannot read this index.*delete the folder"):
        BM25(CORPUS, tmp_path)


def test_only_a_large_index_needs_threads():
    passages = [Passage(str(n), "Title", "text") for n in range(SMALL + 1)]
    assert BM25(passages).blocking and not BM25(passages[:-1]).blocking


@pytest.mark.slow
def test_figures_of_the_whole_dev_file_are_those_that_its_readme_states(data_dir):
    """One search by question rarely finds all gold passages; one search per gold title does."""
    files = [f"corpus_{dataset}.jsonl.gz" for dataset in ("hotpotqa", "2wikimultihopqa", "musique")]
    retriever = BM25([passage for file in files for passage in read_corpus(data_dir / "multihop" / file)])
    with gzip.open(data_dir / "multihop" / "questions_hotpotqa_dev.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    titles = {passage.id: passage.title for passage in retriever.corpus}
    by_question = sum(set(row["gold_ids"]) <= set(search(retriever, row["question"], 5)) for row in rows)
    by_titles = sum(all(g in search(retriever, titles[g], 3) for g in row["gold_ids"]) for row in rows)
    assert (by_question / len(rows), by_titles / len(rows)) == pytest.approx((0.51, 0.945), abs=0.02)


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
    + ['{"id": "b", "title": "T", "text": "\\ud800"}', "\x00"],
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

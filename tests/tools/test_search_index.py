"""The saved BM25 index: equal results, built once, shared by processes."""

from __future__ import annotations

import concurrent.futures
import random

import numpy as np
import pytest

from agentr1_jax.tools.search import BM25, Passage, bm25

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


@pytest.mark.parametrize(
    "other", [CORPUS[:-1], CORPUS[::-1], [*CORPUS[:-1], Passage("p299", "Title299", "changed word1")]]
)
def test_another_corpus_has_an_index_of_its_own(tmp_path, other):
    BM25(CORPUS, tmp_path)
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

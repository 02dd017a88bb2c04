"""The saved BM25 index: equal results, shared by processes, and refused where it does not fit."""

from __future__ import annotations

import concurrent.futures
import json
import random
import shutil

import numpy as np
import pytest

from agentr1_jax.tools.search import BM25, Passage, build_or_load

VOCABULARY = [f"word{i}" for i in range(40)]
RNG = random.Random(1)
CORPUS = [Passage(f"p{i}", f"Title{i}", " ".join(RNG.choices(VOCABULARY, k=12))) for i in range(300)]
QUERIES = [" ".join(RNG.choices(VOCABULARY, k=3)) for _ in range(40)] + ["Title7", "unheard"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "bm25"
    BM25(CORPUS).save(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def test_the_mapped_index_finds_the_very_same(saved):
    loaded = BM25.load(saved, CORPUS)
    assert loaded.search(QUERIES, 5) == BM25(CORPUS).search(QUERIES, 5)
    assert sum(map(len, loaded.search(QUERIES, 5))) > 150
    arrays = [loaded._index.scores[key] for key in ("data", "indices", "indptr")]
    assert all(isinstance(array.base, np.memmap) and not array.flags.writeable for array in arrays)


def test_it_is_built_once(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "bm25"
    first = build_or_load(CORPUS, folder)
    monkeypatch.setattr("agentr1_jax.tools.search.bm25._built", lambda corpus: pytest.fail("it is there"))
    assert build_or_load(CORPUS, folder).search(QUERIES, 3) == first.search(QUERIES, 3)
    assert [path.name for path in folder.parent.iterdir()] == ["bm25"]  # Nothing partial is left.


def test_without_a_folder_it_is_in_memory_and_an_empty_folder_is_used(tmp_path):
    assert build_or_load(CORPUS).search(QUERIES, 3) == build_or_load(CORPUS, tmp_path).search(QUERIES, 3)
    assert (tmp_path / "meta.json").exists()


def test_many_may_build_it_at_once(tmp_path):
    folder = tmp_path / "bm25"
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        built = list(pool.map(lambda _: build_or_load(CORPUS, folder), range(6)))
    assert all(one.search(QUERIES, 3) == built[0].search(QUERIES, 3) for one in built)
    assert [path.name for path in tmp_path.iterdir()] == ["bm25"]


def test_a_killed_build_leaves_no_index(tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.rename", killed)
        BM25(CORPUS).save(tmp_path / "bm25")
    assert not list(tmp_path.iterdir())
    assert build_or_load(CORPUS, tmp_path / "bm25").search(QUERIES, 1)


def test_saving_overwrites_nothing(saved):
    before = {path: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(ValueError, match="something already"):
        BM25(CORPUS[:5]).save(saved)
    assert {path: path.read_bytes() for path in saved.iterdir()} == before


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (CORPUS[:-1], "passages 300, here it is 299"),
        (CORPUS[::-1], "fingerprint"),
        ([*CORPUS[:-1], Passage("p299", "Title299", "changed")], "fingerprint"),
    ],
)
def test_an_index_of_another_corpus_is_refused(saved, other, what):
    for load in (BM25.load, lambda folder, corpus: build_or_load(corpus, folder)):
        with pytest.raises(ValueError, match=f"built with {what}.*delete the folder"):
            load(saved, other)


@pytest.mark.parametrize("key", ["version", "k1", "b", "words"])
def test_an_index_by_other_rules_is_refused(copied, key):
    meta = json.loads((copied / "meta.json").read_text())
    (copied / "meta.json").write_text(json.dumps(meta | {key: 7}))
    with pytest.raises(ValueError, match=f"built with {key} 7, here it is .*delete the folder"):
        BM25.load(copied, CORPUS)


def test_a_damaged_index_is_refused(saved, tmp_path):
    names = sorted(path.name for path in saved.iterdir())
    assert len(names) == 6
    for name in names:
        for damage in ("missing", "cut", "changed"):
            copy = shutil.copytree(saved, tmp_path / f"{name}-{damage}")
            path = copy / name
            data = path.read_bytes()
            path.unlink()
            if damage == "cut":
                path.write_bytes(data[:-1])
            if damage == "changed":
                path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
            with pytest.raises(ValueError, match=rf"(?s){name}-{damage}: this search index.*delete the folder"):
                BM25.load(copy, CORPUS)


def test_what_is_no_index_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "none", tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match="it is no whole index"):
            BM25.load(folder, CORPUS)
    with pytest.raises(ValueError, match="it is no whole index"):
        build_or_load(CORPUS, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"

"""From config to retriever: each kind, and what is refused at start."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from agentr1_jax.errors import UserError
from agentr1_jax.tasks.multihop.task import RETRIEVER_KEYS, RetrieverConfig
from agentr1_jax.tools.search import BM25, Passage, RemoteRetriever
from agentr1_jax.validation import from_section
from experiments.setup import _make_retriever as make_retriever

CORPUS = [Passage(f"p{i}", f"Title {i}", f"text {word} number {i}") for i, word in enumerate("red green blue".split())]
WORDS = [*"title text number red green blue query".split(), ":", "0", "1", "2"]


def config_of(**keys):
    return from_section(RetrieverConfig, "task.multihop.retriever", keys)


def ids(retriever, *queries):
    found = retriever.search(queries, 2)
    return [[hit.passage.id for hit in hits] for hits in (asyncio.run(found) if asyncio.iscoroutine(found) else found)]


def test_every_key_belongs_to_a_kind():
    names = {field.name for field in dataclasses.fields(RetrieverConfig)}
    assert names == {"kind", *(key for keys in RETRIEVER_KEYS.values() for key in keys)}


def test_bm25_is_the_default_and_keeps_its_index(tmp_path):
    assert isinstance(make_retriever(RetrieverConfig(), CORPUS, 2), BM25)
    config = config_of(index=str(tmp_path))
    for _ in range(2):
        assert ids(make_retriever(config, CORPUS, 2), "green") == [["p1"]]
    assert len(list((tmp_path / "bm25").iterdir())) == 1


def test_http(tmp_path):
    retriever = make_retriever(config_of(kind="http", url="http://localhost:9/retrieve", seconds=3.0), CORPUS, 2)
    assert isinstance(retriever, RemoteRetriever)
    assert (retriever.url, retriever.seconds, retriever.attempts) == ("http://localhost:9/retrieve", 3.0, 1)
    assert set(retriever._ids.values()) == {"p0", "p1", "p2"}  # What it finds takes these ids.
    with pytest.raises(UserError, match="task.multihop.retriever.url is 'localhost'; it must be like"):
        make_retriever(config_of(kind="http", url="localhost"), CORPUS, 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "sparse"}, "task.multihop.retriever.kind is 'sparse'; it must be 'bm25', 'dense' or 'http'"),
        ({"kind": "dense"}, "which needs encoder; set it"),
        ({"kind": "http"}, "task.multihop.retriever: kind is 'http', which needs url; set it"),
        ({"encoder": "x"}, "retriever: encoder is 'x', which only kind 'dense' reads; .*kind is 'bm25': change"),
        ({"url": "http://x"}, "task.multihop.retriever: url is 'http://x', which only kind 'http' reads"),
        ({"kind": "http", "url": "http://x", "index": "y"}, "index is 'y', which only kind 'bm25' or 'dense' reads"),
        ({"kind": "dense", "encoder": "x", "seconds": 1.0}, "seconds is 1.0, which only kind 'http' reads"),
        ({"kind": "dense", "encoder": "x", "pooling": "max"}, "pooling is 'max'; it must be 'mean' or 'cls'"),
        ({"kind": "dense", "encoder": "x", "dtype": "int8"}, "dtype is 'int8'; it must be 'float32' or 'bfloat16'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        config_of(**keys)

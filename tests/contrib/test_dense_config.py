"""From config to the dense retriever."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from encoders import checkpoint

from agentr1_jax.envs.registry import call_directly
from agentr1_jax.errors import UserError
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.tasks.multihop.task import RetrieverConfig
from agentr1_jax.tools.search import Passage
from agentr1_jax.validation import from_section
from experiments.setup import _make_retriever as make_retriever

CORPUS = [Passage(f"p{i}", f"Title {i}", f"text {word} number {i}") for i, word in enumerate("red green blue".split())]
WORDS = [*"title text number red green blue query".split(), ":", "0", "1", "2"]


def config_of(**keys):
    return from_section(RetrieverConfig, "task.multihop.retriever", keys)


def ids(retriever, *queries):
    found = retriever.search(queries, 2)
    return [[hit.passage.id for hit in hits] for hits in (asyncio.run(found) if asyncio.iscoroutine(found) else found)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(checkpoint(tmp_path_factory.mktemp("encoder") / "tiny-bert", words=WORDS))


def test_dense_keeps_its_vectors_and_compiles_before_the_first_search(encoder, tmp_path):
    config = config_of(kind="dense", encoder=encoder, index=str(tmp_path), query_prefix="query: ", tokens=16)
    dispatches = [call_directly]
    first = make_retriever(config, CORPUS, 2, lambda function: dispatches[-1](function))
    compiles = CompileCounter()
    found = ids(first, "title 1 text green number 1", "red")
    assert compiles.count == 0 and all(len(hits) == 2 for hits in found)
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "dense").iterdir()}
    assert set(written) == {"meta.json", "vectors-00000.npy"}
    again = make_retriever(config, CORPUS, 2)
    assert ids(again, "title 1 text green number 1", "red") == found
    assert written == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "dense").iterdir()}

    asked = []

    async def engines(function):
        asked.append(function)
        return function()

    dispatches.append(engines)
    assert ids(first, "title 1 text green number 1", "red") == found and len(asked) == 1

    for changes, corpus in (({"passage_prefix": "text "}, CORPUS), ({"pooling": "cls"}, CORPUS), ({}, CORPUS[:2])):
        other = dataclasses.replace(config, **changes)
        with pytest.raises(
            UserError, match=r"task.multihop.retriever: .*dense: these vectors cannot be used: they were made with"
        ):
            make_retriever(other, corpus, 2)


def test_prefixes_go_to_what_they_are_for(encoder, tmp_path):
    plain, prefixed, both = (
        make_retriever(config_of(kind="dense", encoder=encoder, tokens=16, **prefixes), CORPUS, 2)
        for prefixes in ({}, {"query_prefix": "query: "}, {"query_prefix": "query: ", "passage_prefix": "query: "})
    )

    def scores(retriever, query):
        return [hit.score for hit in retriever.find([query], 3)[0]]

    np.testing.assert_allclose(scores(prefixed, "red"), scores(plain, "query: red"), atol=1e-6)
    same = both.find([f"{CORPUS[1].title} {CORPUS[1].text}"], 1)[0][0]
    assert same.passage == CORPUS[1] and same.score == pytest.approx(1, abs=1e-5)


def test_an_encoder_that_is_not_there_or_broken_is_refused(encoder, tmp_path):
    def dense(path, **keys):
        return make_retriever(config_of(kind="dense", encoder=str(path), **keys), CORPUS, 2)

    with pytest.raises(UserError, match=r"task.multihop.retriever: .*nowhere: no such folder"):
        dense(tmp_path / "nowhere")
    with pytest.raises(UserError, match="task.multihop.retriever.tokens is 4; it must be greater than or equal to 16"):
        dense(encoder, tokens=4)
    checkpoint(tmp_path / "cut", words=WORDS)
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"task.multihop.retriever: .*cut/model\.safetensors: truncated"):
        dense(tmp_path / "cut")

"""Dense retrieval: vectors on disk, exact search against brute force, a config's retriever, searches in a rollout."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoders import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from plays import multihop_task
from schedules import engine_of

from agentr1_jax.agents.session import Identity
from agentr1_jax.contrib.dense_retrieval.embedder import QUERY_TOKENS, Embedder
from agentr1_jax.contrib.dense_retrieval.retriever import QUERIES, DenseRetriever, best_of_blocks, make_top_k
from agentr1_jax.contrib.dense_retrieval.vectors import corpus_vectors
from agentr1_jax.envs.base import Action
from agentr1_jax.envs.registry import call_directly
from agentr1_jax.errors import UserError
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.runner import TaskGroup, run_groups
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.tasks.multihop.task import RetrieverConfig
from agentr1_jax.tools.search import Passage, SearchTool
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.trajectory import Outcome
from agentr1_jax.validation import from_section
from experiments.setup import make_retriever

CORPUS = [Passage(f"p{i}", f"Title {i}", f"text {i % 7} of {i}") for i in range(50)]


class Counting:
    """Makes vectors out of the letters of a text, and keeps the batches that it was asked for."""

    def __init__(self, width=8):
        self.width = width
        self.batches = []

    def __call__(self, texts):
        self.batches.append(list(texts))
        out = np.zeros((len(texts), self.width), np.float32)
        for row, text in zip(out, texts, strict=True):
            np.add.at(row, [ord(c) % self.width for c in text], 1)
        return out


def test_vectors_are_kept_mapped_and_not_computed_again(tmp_path):
    embed = Counting()
    parts = corpus_vectors(CORPUS, embed, "letters", tmp_path / "index", part=20)
    assert [len(batch) for batch in embed.batches] == [20, 20, 10]
    assert embed.batches[0][3] == "Title 3 text 3 of 3"
    np.testing.assert_array_equal(np.concatenate(parts), Counting()(sum(embed.batches, [])))
    again = corpus_vectors(CORPUS, pytest.fail, "letters", tmp_path / "index")
    assert [part.shape for part in again] == [(20, 8), (20, 8), (10, 8)]
    assert all(isinstance(part, np.memmap) and not part.flags.writeable for part in again)
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == [
        "meta.json",
        *(f"vectors-0000{i}.npy" for i in range(3)),
    ]
    in_memory = corpus_vectors(CORPUS, Counting(), "letters", part=64)
    np.testing.assert_array_equal(np.concatenate(in_memory), np.concatenate(again))
    with pytest.raises(ValueError, match="the corpus is empty"):
        corpus_vectors([], Counting(), "letters")


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    class Killed(Counting):
        def __call__(self, texts):
            if len(self.batches) == 2:
                raise KeyboardInterrupt
            return super().__call__(texts)

    with pytest.raises(KeyboardInterrupt):
        corpus_vectors(CORPUS, Killed(), "letters", tmp_path, part=20)
    rest = Counting()
    parts = corpus_vectors(CORPUS, rest, "letters", tmp_path, part=20)
    assert [len(batch) for batch in rest.batches] == [10]
    whole = corpus_vectors(CORPUS, Counting(), "letters")
    np.testing.assert_array_equal(np.concatenate(parts), np.concatenate(whole))


def edit(meta, **keys):
    meta.write_text(json.dumps(json.loads(meta.read_text()) | keys))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda meta: edit(meta, corpus="0"), "they were made with corpus '0', here it is '"),
        (lambda meta: edit(meta, encoder="sounds"), "they were made with encoder 'sounds', here it is 'letters'"),
        (lambda meta: edit(meta, version=1), "they were made with version 1, here it is 2"),
        (lambda meta: edit(meta, part=0), r"its meta\.json is damaged \(ValueError: part is 0\)"),
        (lambda meta: meta.write_text("[" * 100_000), r"its meta\.json is damaged \(RecursionError"),
        (lambda meta: meta.unlink(), r"it has no meta\.json to say of what corpus and encoder they are"),
    ],
)
def test_vectors_of_something_else_or_of_nobody_knows_what_are_refused(tmp_path, change, why):
    corpus_vectors(CORPUS, Counting(), "letters", tmp_path, part=20)
    change(tmp_path / "meta.json")
    message = f"{tmp_path}: these vectors cannot be used: {why}.*; name another folder, or delete this one"
    with pytest.raises(ValueError, match=message):
        corpus_vectors(CORPUS, pytest.fail, "letters", tmp_path)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-30] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda path: np.save(path, np.full((20, 8), np.nan, np.float32)),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes((path.parent / "vectors-00002.npy").read_bytes()),
    ],
)
def test_a_damaged_file_of_vectors_is_refused_and_can_be_made_again(tmp_path, damage):
    whole = np.concatenate(corpus_vectors(CORPUS, Counting(), "letters", tmp_path, part=20))
    path = tmp_path / "vectors-00001.npy"
    damage(path)
    with pytest.raises(ValueError, match=r"vectors-00001\.npy: damaged .*; delete it, and it is computed again"):
        corpus_vectors(CORPUS, pytest.fail, "letters", tmp_path)
    path.unlink()
    rest = Counting()
    np.testing.assert_array_equal(np.concatenate(corpus_vectors(CORPUS, rest, "letters", tmp_path)), whole)
    assert [len(batch) for batch in rest.batches] == [20]


def dense(corpus=CORPUS, **options):
    return DenseRetriever(corpus, corpus_vectors(corpus, Counting(), "", part=20), Counting(), **options)


def nearest(corpus, queries, top_k, embed):
    """Ids and scores by brute force."""
    passages = embed([f"{p.title} {p.text}" for p in corpus])
    scores = embed(queries) @ passages.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return [[(corpus[i].id, row[i]) for i in best] for row, best in zip(scores, order, strict=True)]


@pytest.mark.parametrize(("count", "top_k"), [(50, 4), (50, 60), (1, 3)])
def test_hits_are_the_nearest_passages_ties_by_index(count, top_k):
    queries = ["text 3", "Title 12", "", "zzz"]
    found = asyncio.run(dense(CORPUS[:count]).search(queries, top_k))
    assert [[(hit.passage.id, hit.score) for hit in hits] for hits in found] == nearest(
        CORPUS[:count], queries, top_k, Counting()
    )
    assert asyncio.run(dense(CORPUS[:count]).search([], top_k)) == []


def test_a_search_runs_where_it_is_dispatched_to():
    asked = []

    async def dispatch(function):
        asked.append(function)
        return await call_directly(function)

    result = asyncio.run(SearchTool(dense(dispatch=dispatch), top_k=2).execute({"query": "Title 7"}))
    assert len(asked) == 1 and len(result.data["ids"]) == 2
    (hits,) = dense().find(["Title 7"], 2)
    assert result.data["ids"] == [hit.passage.id for hit in hits]
    assert not DenseRetriever.blocking and DenseRetriever.batches


def brute_force(matrix, queries, k):
    scores = queries.astype(np.float64) @ matrix.astype(np.float64).T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


def split(matrix, places):
    return [part for part in np.split(matrix, sorted(places)) if len(part)]


@settings(max_examples=10)
@given(
    rows=st.sampled_from([1, 2, 7, 25, 90]),
    queries=st.integers(1, QUERIES + 3),
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


def test_scores_of_all_rows_are_never_held():
    rows, block, k = 65_536, 1024, 5
    matrix = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    queries = jax.ShapeDtypeStruct((QUERIES, 64), jnp.float32)

    def search(queries, matrix):
        return best_of_blocks(queries, matrix, jnp.int32(0), rows, block, k)

    memory = jax.jit(search).lower(queries, matrix).compile().memory_analysis()
    # The scores of a block, a few times over, and its rows.
    assert memory.temp_size_in_bytes < 6 * 4 * block * (QUERIES + 64)


COLOURS = [Passage(f"p{i}", f"Title {i}", f"text {word} number {i}") for i, word in enumerate(["red", "green", "blue"])]
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
    first = make_retriever(config, COLOURS, 2, lambda function: dispatches[-1](function))
    compiles = CompileCounter()
    found = ids(first, "title 1 text green number 1", "red")
    assert compiles.count == 0 and all(len(hits) == 2 for hits in found)
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "dense").iterdir()}
    assert set(written) == {"meta.json", "vectors-00000.npy"}
    again = make_retriever(config, COLOURS, 2)
    assert ids(again, "title 1 text green number 1", "red") == found
    assert written == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "dense").iterdir()}

    asked = []

    async def engines(function):
        asked.append(function)
        return function()

    dispatches.append(engines)
    assert ids(first, "title 1 text green number 1", "red") == found and len(asked) == 1

    for changes, corpus in (({"passage_prefix": "text "}, COLOURS), ({"pooling": "cls"}, COLOURS), ({}, COLOURS[:2])):
        other = dataclasses.replace(config, **changes)
        with pytest.raises(
            UserError, match=r"task.multihop.retriever: .*dense: these vectors cannot be used: they were made with"
        ):
            make_retriever(other, corpus, 2)


def test_prefixes_go_to_what_they_are_for(encoder, tmp_path):
    plain, prefixed, both = (
        make_retriever(config_of(kind="dense", encoder=encoder, tokens=16, **prefixes), COLOURS, 2)
        for prefixes in ({}, {"query_prefix": "query: "}, {"query_prefix": "query: ", "passage_prefix": "query: "})
    )

    def scores(retriever, query):
        return [hit.score for hit in retriever.find([query], 3)[0]]

    np.testing.assert_allclose(scores(prefixed, "red"), scores(plain, "query: red"), atol=1e-6)
    same = both.find([f"{COLOURS[1].title} {COLOURS[1].text}"], 1)[0][0]
    assert same.passage == COLOURS[1] and same.score == pytest.approx(1, abs=1e-5)


def test_an_encoder_that_is_not_there_or_broken_is_refused(encoder, tmp_path):
    def dense(path, **keys):
        return make_retriever(config_of(kind="dense", encoder=str(path), **keys), COLOURS, 2)

    with pytest.raises(UserError, match=r"task.multihop.retriever: .*nowhere: no such folder"):
        dense(tmp_path / "nowhere")
    with pytest.raises(UserError, match="task.multihop.retriever.tokens is 4; it must be greater than or equal to 16"):
        dense(encoder, tokens=4)
    checkpoint(tmp_path / "cut", words=WORDS)
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"task.multihop.retriever: .*cut/model\.safetensors: truncated"):
        dense(tmp_path / "cut")


class Recorder(DenseRetriever):
    """Remembers what was asked and found."""

    def find(self, queries, top_k):
        found = super().find(queries, top_k)
        self.record = [*getattr(self, "record", []), *zip(queries, found, strict=True)]
        self.threads = {*getattr(self, "threads", ()), threading.current_thread().name.split("_")[0]}
        return found


class Searcher:
    """Samples a few tokens from the engine at each step; what it does is what the task's expert says."""

    def __init__(self, task):
        self.task = task

    async def run(self, session, row):
        env, expert, said = self.task.env(), self.task.expert(row, 0), None
        await env.reset(row, 0)
        prompt = np.asarray([1 + session.seed % 50, 2, 3], np.int32)
        while True:
            done = await session.generate(prompt, 6)
            transition = await env.step(Action(done.ids, expert(said)))
            session.record(transition.reward, tool_calls=transition.tool_calls)
            if transition.outcome is not None:
                return session.finish(transition.outcome, metrics=transition.metrics)
            said = transition.observation.text
            prompt = np.concatenate([prompt, done.ids, np.asarray([4, 5], np.int32)])


def test_a_rollout_searches_on_the_engines_thread(data_dir, tmp_path):
    """Real questions and passages, a random encoder on two devices, a random policy that the expert overrules."""
    embedders = []

    def dense_over(settings, corpus, top_k, dispatch):
        words = {word for p in corpus for word in f"{p.title} {p.text}".lower().split() if word.isalpha()}
        folder = checkpoint(tmp_path / "bert", words=words, num_hidden_layers=1)
        embedder = Embedder(folder, max_tokens=16, devices=jax.devices()[:2])
        embedders.append(embedder)
        vectors = corpus_vectors(corpus, embedder.embed, embedder.identity, tmp_path / "index")
        queries = functools.partial(embedder.embed, tokens_per_call=QUERY_TOKENS)
        return Recorder(corpus, vectors, queries, devices=jax.devices()[:2], dispatch=engine.dispatcher)

    engine, params = engine_of(3)
    engine.reset_counters()
    wrap = functools.partial(wrap_tool, config=ToolsConfig(), metrics=ToolMetrics())
    task = multihop_task(data_dir, corpus="mini", top_k=3, make_retriever=dense_over, wrap=wrap)
    assert len(task.retriever.corpus) == len(task.corpus)  # Made before the engine runs: it uses its devices.
    groups = [
        TaskGroup(task.row("train", i), [Identity(f"t/{i}/{k}", i, k, task.name, 10 * i + k) for k in range(2)])
        for i in range(3)
    ]
    out = list(run_groups(engine, params, Searcher(task), groups, sampling=SamplingConfig(), policy_version=0))
    trajectories = [t for group in out for t in group]
    assert len(trajectories) == 6 and all(t.outcome is Outcome.ANSWERED for t in trajectories), trajectories[0].info
    assert task.retriever.threads == {"dispatch"}
    assert engine.counters.decode_tokens == 6 * sum(len(t.steps) for t in trajectories)

    queries, found = zip(*task.retriever.record, strict=True)
    assert len(queries) >= 6 and all(len(hits) == 3 for hits in found)
    for hits, best in zip(found, nearest(task.corpus, queries, 3, embedders[0].embed), strict=True):
        # Other shapes round in another way: passages that are as near may change places.
        np.testing.assert_allclose([hit.score for hit in hits], [score for _, score in best], atol=1e-5)

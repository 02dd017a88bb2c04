"""DenseRetriever retrieval: the index on disk, the retriever against brute force, and searches during a rollout."""

from __future__ import annotations

import asyncio
import functools
import json
import threading

import jax
import numpy as np
import pytest
from encoders import checkpoint
from plays import multihop_task
from schedules import engine_of

from agentr1_jax.agents.session import Identity
from agentr1_jax.contrib.dense_retrieval.embedder import QUERY_TOKENS, Embedder
from agentr1_jax.contrib.dense_retrieval.retriever import DenseRetriever
from agentr1_jax.contrib.dense_retrieval.vectors import corpus_vectors
from agentr1_jax.envs.base import Action
from agentr1_jax.envs.registry import call_directly
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.runner import TaskGroup, run_groups
from agentr1_jax.tools.search import Passage, SearchTool
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.trajectory import Outcome

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


def changed(meta, **keys):
    meta.write_text(json.dumps(json.loads(meta.read_text()) | keys))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda meta: changed(meta, corpus="0"), "they were made with corpus '0', here it is '"),
        (lambda meta: changed(meta, encoder="sounds"), "they were made with encoder 'sounds', here it is 'letters'"),
        (lambda meta: changed(meta, passages=49), "they were made with passages 49, here it is 50"),
        (lambda meta: changed(meta, version=1), "they were made with version 1, here it is 2"),
        (lambda meta: changed(meta, part=0), r"its meta\.json is damaged \(ValueError: part is 0\)"),
        (lambda meta: changed(meta, part="x"), r"its meta\.json is damaged"),
        (lambda meta: meta.write_text("{"), r"its meta\.json is damaged"),
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


def test_vectors_of_another_corpus_are_refused(tmp_path):
    corpus_vectors(CORPUS, Counting(), "letters", tmp_path)
    with pytest.raises(ValueError, match="made with corpus '"):
        corpus_vectors(CORPUS[:-1], pytest.fail, "letters", tmp_path)


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-30] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda path: np.save(path, np.full((20, 8), np.nan, np.float32)),
        lambda path: np.save(path, np.float32(1)),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"abc"),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
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


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (np.ones(()), r"embed: vectors are float32 \[\], they should be float32 \[50, width\]"),
        (np.ones(50), r"embed: vectors are float32 \[50\], they should be"),
        (np.ones((49, 8)), r"embed: vectors are float32 \[49, 8\], they should be float32 \[50, width\]"),
        (np.full((50, 8), np.inf), "embed: vectors hold numbers that are not finite"),
    ],
)
def test_what_is_no_vector_for_each_passage_is_not_kept(tmp_path, made, message):
    with pytest.raises(ValueError, match=message):
        corpus_vectors(CORPUS, lambda texts: made, "letters", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["meta.json"]


def test_parts_of_two_widths_are_refused(tmp_path):
    corpus_vectors(CORPUS, Counting(), "letters", tmp_path, part=20)
    (tmp_path / "vectors-00001.npy").unlink()
    with pytest.raises(ValueError, match=r"embed: vectors are float32 \[20, 7\], they should be float32 \[20, 8"):
        corpus_vectors(CORPUS, Counting(7), "letters", tmp_path)
    corpus_vectors(CORPUS, Counting(7), "letters", tmp_path / "other", part=20)
    (tmp_path / "other" / "vectors-00001.npy").rename(tmp_path / "vectors-00001.npy")
    with pytest.raises(ValueError, match=r"00001\.npy: vectors are float32 \[20, 7\], they should be float32 \[20, 8"):
        corpus_vectors(CORPUS, Counting(), "letters", tmp_path)


def test_no_passages_are_refused():
    with pytest.raises(ValueError, match="the corpus is empty"):
        corpus_vectors([], Counting(), "letters")
    with pytest.raises(ValueError, match="part is 0; a file must have at least 1 passage"):
        corpus_vectors(CORPUS, Counting(), "letters", part=0)


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


def test_vectors_that_do_not_fit_the_corpus_are_refused():
    with pytest.raises(ValueError, match="there are 50 vectors for 49 passages"):
        DenseRetriever(CORPUS[:-1], corpus_vectors(CORPUS, Counting(), ""), Counting())


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


class Kept(DenseRetriever):
    """Keeps what was asked and found."""

    def find(self, queries, top_k):
        found = super().find(queries, top_k)
        self.kept = [*getattr(self, "kept", []), *zip(queries, found, strict=True)]
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
        return Kept(corpus, vectors, queries, devices=jax.devices()[:2], dispatch=engine.dispatcher)

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

    queries, found = zip(*task.retriever.kept, strict=True)
    assert len(queries) >= 6 and all(len(hits) == 3 for hits in found)
    for hits, best in zip(found, nearest(task.corpus, queries, 3, embedders[0].embed), strict=True):
        # Other shapes round in another way: passages that are as near may change places.
        np.testing.assert_allclose([hit.score for hit in hits], [score for _, score in best], atol=1e-5)

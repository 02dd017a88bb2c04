"""Texts to vectors: buckets change nothing, nothing recompiles, and what does not belong together is refused."""

from __future__ import annotations

import functools
import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers
from encoders import checkpoint, padded, write_tokenizer

from agentr1_jax.contrib.dense_retrieval import weights
from agentr1_jax.contrib.dense_retrieval.embedder import QUERY_TOKENS, Embedder
from agentr1_jax.contrib.dense_retrieval.encoder import embed_tokens
from agentr1_jax.runtime.compile_cache import CompileCounter

WORDS = [f"w{i}" for i in range(60)] + ["query", "passage", ":"]
TEXTS = [
    " ".join(WORDS[(i * 7 + k) % 60] for k in range(n)) for i, n in enumerate([3, 90, 14, 15, 0, 30, 1, 31, 22, 3])
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("encoder") / "tiny-bert", words=WORDS)


@pytest.fixture(scope="module")
def embedder(folder):
    return Embedder(folder, max_tokens=32, devices=jax.devices()[:2])


def test_vectors_are_those_of_each_text_by_itself(folder, embedder):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = weights.read_config(folder)
    params = weights.load(folder, config)
    reference = jax.jit(functools.partial(embed_tokens, config, pooling="mean", normalised=True))
    vectors = embedder.embed(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), 32)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = tokenizer.encode(text).ids
        ids = [*ids[:31], 3] if len(ids) > 32 else ids  # Cut texts keep their [SEP].
        batch = padded([ids], 1, 32)
        np.testing.assert_allclose(vector, reference(params, *batch)[0], atol=2e-6)


def test_a_vector_depends_on_no_other_text(embedder):
    together = embedder.embed(TEXTS)
    assert embedder.lengths == (16, 32)
    for i, text in enumerate(TEXTS):
        np.testing.assert_array_equal(embedder.embed([text])[0], together[i])
    np.testing.assert_array_equal(embedder.embed(TEXTS[::-1] * 3)[: len(TEXTS)], together[::-1])
    assert embedder.embed([]).shape == (0, 32)


def test_a_prefix_stands_before_each_text(embedder):
    prefixed = embedder.embed(["w1 w2", "w3"], prefix="query: ")
    np.testing.assert_array_equal(prefixed, embedder.embed(["query: w1 w2", "query: w3"]))
    assert not np.allclose(prefixed, embedder.embed(["w1 w2", "w3"]))


def test_nothing_compiles_after_compile(embedder):
    assert embedder.compile(QUERY_TOKENS) == 2
    compiles = CompileCounter()
    for count in range(1, len(TEXTS)):
        embedder.embed(TEXTS[:count], tokens_per_call=QUERY_TOKENS)
    assert compiles.count == 0


def test_any_text_has_a_vector(embedder):
    odd = ["", " ", "\ud800 w1", "\x00", "[SEP][SEP] [CLS]", "w1 " * 5000, "é" * 300, "\u202e\U0001f600"]
    assert np.isfinite(embedder.embed(odd)).all()


def test_the_identity_names_what_vectors_depend_on(folder, tmp_path):
    def identity(path=folder, **settings):
        return Embedder(path, **settings).identity

    moved = shutil.copytree(folder, tmp_path / folder.name)
    (moved / "README.md").write_text("a card")
    assert identity() == identity(moved, devices=jax.devices()[:1])
    assert identity().startswith("tiny-bert ")
    others = [identity(pooling="cls"), identity(normalised=False), identity(dtype="bfloat16"), identity(max_tokens=40)]
    checkpoint(moved, words=WORDS, change=lambda tensors: tensors["embeddings.LayerNorm.bias"].__iadd__(1))
    others.append(identity(moved))
    assert len({identity(), *others}) == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "max"}, "pooling is 'max'; choose one of mean, cls"),
        ({"dtype": "float16"}, "dtype is 'float16'; choose one of float32, bfloat16"),
        ({"max_tokens": 8}, "tokens is 8; it must be at least 16"),
    ],
)
def test_settings_that_make_no_sense_are_refused(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        Embedder(folder, **settings)


def test_a_tokenizer_that_is_missing_broken_or_another_is_refused(tmp_path):
    checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"no tokenizer\.json; save the tokenizer there with save_pretrained"):
        Embedder(tmp_path)
    size = write_tokenizer(tmp_path, WORDS)
    with pytest.raises(ValueError, match=f"its tokenizer has ids up to {size - 1}, but its encoder knows 50 tokens"):
        Embedder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer .*; download it again"):
        Embedder(tmp_path)


def test_weights_that_give_no_numbers_are_named(tmp_path):
    def spoil(tensors):
        tensors["encoder.layer.2.output.dense.bias"][3] = np.nan

    checkpoint(tmp_path / "spoilt", words=WORDS, change=spoil)
    with pytest.raises(ValueError, match=r"spoilt [0-9a-f]{32}: the encoder's vectors are not finite"):
        Embedder(tmp_path / "spoilt", max_tokens=16).embed(["w1"])


def test_all_devices_compute_what_one_computes(folder, embedder):
    everywhere = Embedder(folder, max_tokens=32)
    short = [text for text in TEXTS if len(text) < 40]
    np.testing.assert_allclose(everywhere.embed(short, tokens_per_call=64), embedder.embed(short), atol=1e-6)


def test_half_precision_and_cls(folder, embedder):
    exact, half = (
        Embedder(folder, pooling="cls", dtype=dtype, max_tokens=32).embed(TEXTS[:1])
        for dtype in ("float32", "bfloat16")
    )
    assert 0 < np.abs(exact - half).max() < 0.03
    assert not np.allclose(exact, embedder.embed(TEXTS[:1]), atol=0.01)

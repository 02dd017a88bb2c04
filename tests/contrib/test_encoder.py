"""The encoder against PyTorch, vectors of texts in buckets, and what is refused of a checkpoint."""

from __future__ import annotations

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import make_golden_encoder as golden
import numpy as np
import pytest
import tokenizers
from encoders import checkpoint, pad, write_tokenizer
from safetensors.numpy import load_file, save_file

from agentr1_jax.contrib.dense_retrieval import weights
from agentr1_jax.contrib.dense_retrieval.embedder import QUERY_TOKENS, Embedder
from agentr1_jax.contrib.dense_retrieval.encoder import Encoder, EncoderConfig, embed_tokens
from agentr1_jax.policy.weights import files
from agentr1_jax.runtime.compile_cache import CompileCounter

TOLERANCE = 2e-5


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, tokens, lengths):
    return Encoder(config).apply({"params": params}, tokens, jnp.arange(tokens.shape[1]) < lengths[:, None])


def hidden_states(folder):
    config = weights.read_config(folder)
    ids = golden.sequences()
    out = forward(config, weights.load(folder, config), *pad(ids, len(ids), max(golden.LENGTHS)))
    return [np.asarray(row[: len(text)]) for row, text in zip(out, ids, strict=True)]


@pytest.mark.parametrize("case", golden.CASES)
def test_hidden_states_equal_the_stored_ones_of_pytorch(case, tmp_path):
    ours = np.concatenate(hidden_states(checkpoint(tmp_path, case)))[:: golden.EVERY]
    with np.load(golden.GOLDEN) as stored:
        assert np.abs(ours - stored[case]).max() <= TOLERANCE


@pytest.mark.parametrize("case", golden.CASES)
def test_hidden_states_equal_pytorch(case, tmp_path):
    pytest.importorskip("torch")
    model = golden.torch_model(golden.CASES[case])
    model.save_pretrained(tmp_path)
    theirs = golden.torch_hidden(model, golden.CASES[case].get("pad_token_id", 0))
    assert max(np.abs(a - b).max() for a, b in zip(hidden_states(tmp_path), theirs, strict=True)) <= TOLERANCE


def with_head(tensors):
    """What a checkpoint of a masked language model holds beside the encoder."""
    tensors["cls.predictions.bias"] = np.zeros(50, np.float32)
    tensors["bert.pooler.dense.weight"] = np.zeros((32, 32), np.float32)
    tensors["bert.embeddings.position_ids"] = np.arange(64)[None]
    for old, new in (("gamma", "weight"), ("beta", "bias")):
        for name in [name for name in tensors if name.endswith(f"LayerNorm.{new}")]:
            tensors[name.replace(new, old)] = tensors.pop(name)


def test_prefixes_heads_old_names_and_shards_change_nothing(tmp_path):
    plain = hidden_states(checkpoint(tmp_path / "plain"))
    folder = checkpoint(tmp_path / "prefixed", prefix="bert.", change=with_head)
    same = hidden_states(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(2):
        held = dict(list(tensors.items())[part::2])
        save_file(held, folder / f"model-{part}.safetensors")
        weight_map |= dict.fromkeys(held, f"model-{part}.safetensors")
    (folder / files.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for other in (same, hidden_states(folder)):
        for a, b in zip(plain, other, strict=True):
            np.testing.assert_array_equal(a, b)


SHAPE = EncoderConfig(vocab_size=50, width=32, layers=3, heads=4, hidden=48, positions=64)


def test_pooling_is_what_its_names_say(tmp_path):
    folder = checkpoint(tmp_path)
    config = weights.read_config(folder)
    assert config == SHAPE
    params, ids = weights.load(folder, config), golden.sequences()
    embed = jax.jit(functools.partial(embed_tokens, config, params), static_argnames=("pooling", "normalised"))
    batch = pad(ids, len(ids) + 1, max(golden.LENGTHS))
    hidden = hidden_states(folder)
    mean = embed(*batch, pooling="mean", normalised=False)
    np.testing.assert_allclose(mean[:-1], [states.mean(0) for states in hidden], atol=2e-6)
    first = embed(*batch, pooling="cls", normalised=False)
    np.testing.assert_allclose(first[:-1], [states[0] for states in hidden], atol=2e-6)
    unit = embed(*batch, pooling="mean", normalised=True)
    np.testing.assert_allclose(unit[:-1], (mean / np.linalg.norm(mean, axis=-1, keepdims=True))[:-1], atol=2e-6)
    assert np.isfinite(unit).all(), "a row without a text is finite, too"


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
        batch = pad([ids], 1, 32)
        np.testing.assert_allclose(vector, reference(params, *batch)[0], atol=2e-6)


def test_a_vector_depends_on_no_other_text(embedder):
    together = embedder.embed(TEXTS)
    assert embedder.lengths == (16, 32)
    for i, text in enumerate(TEXTS):
        np.testing.assert_array_equal(embedder.embed([text])[0], together[i])
    np.testing.assert_array_equal(embedder.embed(TEXTS[::-1] * 3)[: len(TEXTS)], together[::-1])
    assert embedder.embed([]).shape == (0, 32)


def test_any_text_has_a_vector_and_a_prefix_stands_before_it(embedder):
    odd = ["", " ", "\ud800 w1", "\x00", "[SEP][SEP] [CLS]", "w1 " * 5000, "é" * 300, "\u202e\U0001f600"]
    assert np.isfinite(embedder.embed(odd)).all()
    prefixed = embedder.embed(["w1 w2", "w3"], prefix="query: ")
    np.testing.assert_array_equal(prefixed, embedder.embed(["query: w1 w2", "query: w3"]))
    assert not np.allclose(prefixed, embedder.embed(["w1 w2", "w3"]))


def test_nothing_compiles_after_compile(embedder):
    embedder.compile(QUERY_TOKENS)
    compiles = CompileCounter()
    for count in range(1, len(TEXTS)):
        embedder.embed(TEXTS[:count], tokens_per_call=QUERY_TOKENS)
    assert compiles.count == 0


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "distilbert"}, "model_type is 'distilbert'; encoders that are known are bert, roberta"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new', but only gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', but only absolute"),
        ({"is_decoder": True}, "is_decoder is True, but only encoders"),
        ({"quantization_config": {"bits": 8}}, "quantization_config is .*, but quantised"),
        ({"num_attention_heads": 5}, r"config.json: heads \(5\) must divide the width \(32\)"),
        ({"layer_norm_eps": "small"}, "config.json: layer_norm_eps is 'small'"),
        ({"model_type": "roberta", "pad_token_id": None}, "pad_token_id is None; roberta counts positions from it"),
        ({"model_type": "roberta", "pad_token_id": 63}, "64 positions of which the first used is 64: none left"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        weights.from_hf(golden.CASES["bert"] | changes, "config.json")


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(QUERY), rf"tensor '{QUERY}' is missing, which config.json asks for"),
        (put(QUERY, np.ones((32, 31), np.float32)), rf"'{QUERY}' has shape \(32, 31\); .* \(32, 32\)"),
        (put("encoder.layer.3.output.dense.bias", np.ones(32, np.float32)), r"'encoder.layer.3.* is unexpected"),
        (put(QUERY, np.ones((32, 32), np.int8)), rf"tensor '{QUERY}' is stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
    folder = checkpoint(tmp_path, change=change)
    with pytest.raises(ValueError, match=message):
        weights.load(folder, weights.read_config(folder))


def test_a_truncated_file_and_a_missing_folder_are_named(tmp_path):
    folder = checkpoint(tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated, .*download it again"):
        weights.load(folder, SHAPE)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"cut: not a Hugging Face folder \(no config.json\)"):
        weights.read_config(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        weights.read_config(folder)

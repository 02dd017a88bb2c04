"""The encoder against PyTorch, its pooling, and what is refused of a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import make_golden_encoder as golden
import numpy as np
import pytest
from encoders import checkpoint, padded
from safetensors.numpy import load_file, save_file

from agentr1_jax.contrib.dense_retrieval import weights
from agentr1_jax.contrib.dense_retrieval.encoder import Encoder, EncoderConfig, embed_tokens, pool
from agentr1_jax.policy.weights import files

TOLERANCE = 2e-5


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, tokens, lengths):
    return Encoder(config).apply({"params": params}, tokens, jnp.arange(tokens.shape[1]) < lengths[:, None])


def hidden_states(folder):
    config = weights.read_config(folder)
    ids = golden.sequences()
    out = forward(config, weights.load(folder, config), *padded(ids, len(ids), max(golden.LENGTHS)))
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


@pytest.fixture(scope="module")
def embed(tmp_path_factory):
    """(ids, rows, length, pooling, normalised) -> vectors of a random checkpoint."""
    folder = checkpoint(tmp_path_factory.mktemp("encoder"))
    config = weights.read_config(folder)
    assert config == SHAPE
    params = weights.load(folder, config)
    program = jax.jit(functools.partial(embed_tokens, config, params), static_argnames=("pooling", "normalised"))

    def run(ids, rows=3, length=60, pooling="mean", normalised=True):
        return program(*padded(ids, rows, length), pooling=pooling, normalised=normalised)

    return run


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_text_has_the_same_vector_alone_and_in_a_padded_batch(embed, pooling):
    ids = golden.sequences()
    together = embed(ids, rows=5, length=64, pooling=pooling)
    assert np.isfinite(together).all(), "rows without a text are finite, too"
    for i, text in enumerate(ids):
        alone = embed([text], rows=1, length=len(text), pooling=pooling)
        np.testing.assert_allclose(together[i], alone[0], atol=2e-6)
    swapped = embed(ids[::-1], rows=5, length=64, pooling=pooling)
    np.testing.assert_allclose(swapped[:3][::-1], together[:3], atol=1e-6)


def test_pooling_is_what_its_names_say(embed):
    hidden = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    mask = np.asarray([[1, 1, 0, 0], [1, 1, 1, 1]], bool)
    hidden[0, 2:] = np.nan  # What is at padding must not count, whatever it is.
    mean = pool(jnp.asarray(hidden), jnp.asarray(mask), "mean", False)
    np.testing.assert_allclose(mean, [hidden[0, :2].mean(0), hidden[1].mean(0)], rtol=1e-6)
    np.testing.assert_array_equal(pool(jnp.asarray(hidden), jnp.asarray(mask), "cls", False), hidden[:, 0])
    unit = pool(jnp.asarray(hidden), jnp.asarray(mask), "mean", True)
    np.testing.assert_allclose(unit, mean / np.linalg.norm(mean, axis=-1, keepdims=True), rtol=1e-6)
    with pytest.raises(ValueError, match="pooling is 'max'; choose one of mean, cls"):
        pool(jnp.asarray(hidden), jnp.asarray(mask), "max", False)
    np.testing.assert_allclose(np.linalg.norm(embed(golden.sequences()), axis=-1), 1, rtol=1e-5)


def test_half_precision_stays_near(tmp_path):
    folder = checkpoint(tmp_path)
    config = weights.read_config(folder)
    params = weights.load(folder, config)
    batch = [jnp.asarray(x) for x in padded(golden.sequences(), 3, 60)]
    exact, half = (
        embed_tokens(dataclasses.replace(config, dtype=dtype), params, *batch, pooling="mean", normalised=True)
        for dtype in ("float32", "bfloat16")
    )
    assert half.dtype == jnp.float32
    assert 0 < np.abs(half - exact).max() < 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "distilbert"}, "model_type is 'distilbert'; encoders that are known are bert, roberta"),
        ({"model_type": ["bert"]}, r"model_type is \['bert'\]"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new', but only gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', but only absolute"),
        ({"is_decoder": True}, "is_decoder is True, but only encoders"),
        ({"quantization_config": {"bits": 8}}, "quantization_config is .*, but quantised"),
        ({"num_attention_heads": 5}, r"config.json: heads \(5\) must divide the width \(32\)"),
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers is 0; it must be a positive"),
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

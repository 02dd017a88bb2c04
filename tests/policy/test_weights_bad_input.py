"""What is wrong with a checkpoint is said with its name."""

import dataclasses
import json

import huggingface_hub
import make_golden_logits as golden
import numpy as np
import pytest
import tiny
from checkpoints import check_equal, checkpoint, layout, read

from agentr1_jax.policy import weights
from agentr1_jax.policy.weights import files


def test_a_repeated_head_of_a_tied_model_is_ignored(tmp_path):
    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    _, plain = read(checkpoint(tmp_path / "plain", "qwen2_tied"))
    _, params = read(checkpoint(tmp_path / "repeated", "qwen2_tied", change=repeat))
    check_equal(plain, params)

    def differ(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    with pytest.raises(
        ValueError, match=r'safetensors: tensor .lm_head.weight. differs .*"tie_word_embeddings": false'
    ):
        read(checkpoint(tmp_path / "other", "qwen2_tied", change=differ))


def drop(name):
    return lambda tensors: tensors.pop(name)


def add(name, value):
    return lambda tensors: tensors.update({name: value})


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (drop(NORM), rf"tensor '{NORM}' is missing, which .*; download"),
        (drop("lm_head.weight"), r"'lm_head.weight' is missing.*tie_word_embeddings"),
        (
            add("model.layers.0.mlp.gate_proj.bias", np.ones(3, np.float32)),
            r"safetensors: tensor '.*gate_proj.bias' is unexp",
        ),
        (add(NORM, np.ones(31, np.float32)), rf"-of-00002.safetensors: tensor '{NORM}' has shape \(31,\); .* \(32,\)"),
        (add("model.norm.weight", np.ones(32, np.int8)), r"safetensors: tensor 'model.norm.weight' is stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(checkpoint(tmp_path, change=change))


def test_another_config_than_the_folders_is_refused(tmp_path):
    folder = checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"tensors 'model.layers.2.* and 5 more are unexpected"):
        read(folder, layers=2)
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' has shape \(40, 32\).* \(41, 32\)"):
        read(folder, vocab_size=41)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_truncated_file_is_named(keep, tmp_path):
    folder = checkpoint(tmp_path)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors: truncated, .* download it again"):
        read(folder)


def break_index(folder, **record):
    (folder / files.INDEX).write_text(json.dumps(record))


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: (f / files.INDEX).unlink(), r"neither model.safetensors nor .*has model-00001.* but no"),
        (lambda f: (f / files.INDEX).write_text("{"), r"index.json: not valid JSON"),
        (lambda f: break_index(f, weights={}), r"index.json: weight_map must tell"),
        (lambda f: break_index(f, weight_map={"a": "../x.safetensors"}), r"index.json: weight_map must tell"),
        (lambda f: break_index(f, weight_map={"a": "x.safetensors"}), r"index.json: names x.safetensors, which is not"),
        (
            lambda f: break_index(f, weight_map={"a": "model-00001-of-00002.safetensors"}),
            r"index.json: says that tensor 'a' is in model-00001-of-00002.safetensors, which does not",
        ),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], r"it has no \*.safetensors"),
        (lambda f: (f / "config.json").write_text("[]"), r"config.json: not a JSON object"),
        (lambda f: (f / "config.json").write_text("{"), r"config.json: not valid JSON"),
    ],
)
def test_a_broken_folder_is_described(damage, message, tmp_path):
    damage(checkpoint(tmp_path))
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_paths_that_are_not_there_fail_without_the_network(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("no network\nin this test")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("models/qwen", "qwen", "./qwen/2.5", "../models/qwen", "a/b/c", str(tmp_path / "qwen"), "~/no/qwen"):
        with pytest.raises(
            FileNotFoundError, match=r"qwen|a/b/c: no such folder; give a folder with weights, or a hub id"
        ):
            weights.read_config(path)
    with pytest.raises(FileNotFoundError, match=r"models: no Hugging Face folder, since it has no config.json"):
        weights.read_config("models")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match=r"Qwen/Qwen2: .*ConnectionError: no network\); check"):
        weights.load("Qwen/Qwen2", tiny.POLICY, layout())


def test_hub_ids_are_downloaded_without_what_nobody_reads(tmp_path, monkeypatch):
    asked = {}

    def download(spec, **kwargs):
        asked[spec] = kwargs
        return str(checkpoint(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert weights.read_config("Qwen/Qwen2") == weights.from_hf(golden.CASES["llama"], "")
    assert set(asked) == {"Qwen/Qwen2"} and "*.bin" not in asked["Qwen/Qwen2"]["allow_patterns"]


def test_saving_refuses_what_does_not_belong_together(tmp_path):
    config, params = read(checkpoint(tmp_path / "in"))
    with pytest.raises(ValueError, match=r"in: holds weights already \(model.*safetensors"):
        weights.save(tmp_path / "in", config, params)
    with pytest.raises(ValueError, match=r"parameter head has shape \(32, 40\), the config asks for None"):
        weights.save(tmp_path / "out", dataclasses.replace(config, tied=True), params)
    with pytest.raises(ValueError, match=r"dtype is 'int8'; choose one of"):
        weights.save(tmp_path / "out", config, params, dtype="int8")
    assert not (tmp_path / "out").exists()

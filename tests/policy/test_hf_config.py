"""`config.json` of the families and the presets; what is wrong with a checkpoint is said with its name."""

import dataclasses
import json

import huggingface_hub
import jax
import make_golden_logits as golden
import numpy as np
import pytest
import tiny
from checkpoints import check_equal, checkpoint, layout, read

from agentr1_jax.errors import UserError
from agentr1_jax.policy import weights
from agentr1_jax.policy.config import PolicyConfig, RopeScaling, YarnConfig
from agentr1_jax.policy.presets import PRESETS, decoder_config
from agentr1_jax.policy.weights import files, names

CASES = golden.CASES


@pytest.mark.parametrize(
    "case, changes, message",
    [
        ("llama", {"model_type": "mamba"}, r"model_type is 'mamba'; known families are llama, qwen2, qwen3"),
        ("llama", {"hidden_size": None}, r"hidden_size is missing"),
        ("llama", {"hidden_size": "32"}, r"hidden_size is '32'; it must be a positive number"),
        ("llama", {"num_hidden_layers": 2.5}, r"num_hidden_layers is 2.5; it must be a whole number"),
        ("llama", {"num_key_value_heads": 3}, r"kv_heads \(3\) must divide"),
        ("llama", {"num_attention_heads": 5}, r"num_attention_heads \(5\) does not divide hidden_size"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act is 'gelu', but only silu is known; choose"),
        ("qwen3_tied", {"attention_bias": True}, r"attention_bias is True"),
        ("llama", {"mlp_bias": True}, r"mlp_bias is True"),
        ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor must be 1"),
        ("qwen2_tied", {"use_sliding_window": True, "max_window_layers": 2}, r"use_sliding_window is True"),
        ("qwen2_tied", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types is \["),
        (
            "llama",
            {"rope_scaling": {"type": "longrope", "factor": 4.0}},
            r"rope_scaling has rope_type 'longrope'; known .* take",
        ),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale of yarn is not known"),
        ("llama", {"rope_scaling": {"type": "linear"}}, r"rope_scaling: factor is missing"),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"rope_parameters must be one flat",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            r"rope_parameters: low_freq_factor is miss",
        ),
    ],
)
def test_configs_that_the_decoder_cannot_compute_are_refused(case, changes, message):
    with pytest.raises(ValueError, match=rf"some/config.json: .*{message}|some/config.json: {message}"):
        weights.from_hf(CASES[case] | changes, "some/config.json")


def test_what_a_config_leaves_out_means_what_it_means_to_transformers():
    record = {k: v for k, v in CASES["llama"].items() if k not in ("rope_theta", "rms_norm_eps", "hidden_act")}
    config = weights.from_hf(record, "")
    assert (config.kv_heads, config.head_dim, config.rope_theta, config.norm_eps) == (4, 8, 10_000.0, 1e-6)
    assert not config.tied and config.rope_scaling is None
    assert weights.from_hf(record | {"head_dim": None, "num_key_value_heads": None}, "") == config
    assert weights.from_hf(record | {"model_type": "qwen3"}, "").head_dim == 128
    unused = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3, "attention_bias": False}
    assert weights.from_hf(record | unused | {"model_type": "qwen2"}, "").qkv_bias
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for where in ({"rope_theta": 5.0, "rope_scaling": llama3}, {"rope_parameters": llama3 | {"rope_theta": 5.0}}):
        found = weights.from_hf(record | where, "")
        assert (found.rope_theta, found.rope_scaling) == (5.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 256))


def test_configs_survive_a_round_trip():
    for name, preset in PRESETS.items():
        config = dataclasses.replace(preset, vocab_size=preset.vocab_size or 128)
        assert weights.from_hf(json.loads(json.dumps(weights.to_hf(config))), "") == config, name


def test_shapes_that_no_family_has_are_not_exported():
    with pytest.raises(ValueError, match=r"qkv_bias and policy.qk_norm"):
        weights.to_hf(dataclasses.replace(tiny.POLICY, qkv_bias=True, qk_norm=True))
    with pytest.raises(ValueError, match=r"policy.heads \(3\) does not divide policy.width"):
        weights.to_hf(dataclasses.replace(tiny.POLICY, heads=3, kv_heads=3))


PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
}


def test_presets_have_the_published_numbers_of_parameters():
    counted = {name: sum(x.size for x in jax.tree.leaves(names.parameter_shapes(PRESETS[name]))) for name in PUBLISHED}
    assert counted == PUBLISHED and set(PRESETS) == {*PUBLISHED, "tiny"}


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


@pytest.mark.parametrize("keep", [4, -1])
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


def test_a_preset_is_stretched_as_the_published_config_says_to():
    """https://huggingface.co/Qwen/Qwen3-8B#processing-long-texts"""
    published = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    record = CASES["qwen3_tied"] | {"rope_scaling": published, "max_position_embeddings": 40960}
    read = weights.from_hf(record, "config.json")
    assert read.max_positions == 131_072
    stretched = decoder_config(PolicyConfig(preset="qwen3-8b", yarn=YarnConfig(4.0, 32768)), 0)
    assert stretched.rope_scaling == read.rope_scaling and stretched.max_positions == 131_072
    assert decoder_config(PolicyConfig(preset="qwen2.5-3b", yarn=YarnConfig(2.0)), 0).max_positions == 65_536
    with pytest.raises(UserError, match="policy.yarn.factor is 2.0, and the policy is stretched already"):
        decoder_config(PolicyConfig(preset="llama-3.1-8b", yarn=YarnConfig(2.0)), 0)

"""`config.json` of the families, and the presets."""

import dataclasses
import json

import jax
import make_golden_logits as golden
import pytest
import tiny

from agentr1_jax.policy import weights
from agentr1_jax.policy.config import RopeScaling
from agentr1_jax.policy.presets import PRESETS
from agentr1_jax.policy.weights import names

CASES = golden.CASES


@pytest.mark.parametrize(
    "case, changes, message",
    [
        ("llama", {"model_type": "mamba"}, r"model_type is 'mamba'; known families are llama, qwen2, qwen3"),
        ("llama", {"model_type": None}, r"model_type is None"),
        ("llama", {"hidden_size": None}, r"hidden_size is missing"),
        ("llama", {"hidden_size": "32"}, r"hidden_size is '32'; it must be a positive number"),
        ("llama", {"num_hidden_layers": 2.5}, r"num_hidden_layers is 2.5; it must be a whole number"),
        ("llama", {"num_hidden_layers": 0}, r"num_hidden_layers is 0"),
        ("llama", {"num_key_value_heads": 3}, r"kv_heads \(3\) must divide"),
        ("llama", {"num_attention_heads": 5}, r"num_attention_heads \(5\) does not divide hidden_size"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act is 'gelu', but only silu is known; choose"),
        ("llama", {"attention_bias": True}, r"attention_bias is True"),
        ("qwen3_tied", {"attention_bias": True}, r"attention_bias is True"),
        ("llama", {"mlp_bias": True}, r"mlp_bias is True"),
        ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor must be 1"),
        ("qwen2_tied", {"use_sliding_window": True, "max_window_layers": 2}, r"use_sliding_window is True"),
        ("qwen2_tied", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types is \["),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            r"rope_scaling has rope_type 'yarn'; known .* take",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, r"rope_scaling: factor is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, r"rope_scaling: factor is 0"),
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


@pytest.mark.parametrize("name", PRESETS)
def test_configs_survive_a_round_trip(name):
    config = dataclasses.replace(PRESETS[name], vocab_size=PRESETS[name].vocab_size or 128)
    record = json.loads(json.dumps(weights.to_hf(config)))
    assert weights.from_hf(record, "") == config


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

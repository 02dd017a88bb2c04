"""From config to parts: a policy and a tokenizer that do not belong together are refused."""

from __future__ import annotations

import dataclasses
import types

import pytest
from letters import Letters

from agentr1_jax.errors import UserError
from agentr1_jax.policy import presets
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.tasks import make_task
from agentr1_jax.train import build
from configs import quickstart
from experiments.setup import read_settings


def tokenizer(vocab_size):
    return types.SimpleNamespace(name="some/tokenizer", vocab_size=vocab_size)


@pytest.fixture
def config():
    """The quickstart's, without changes to the preset."""
    config = quickstart.get_config()
    config.policy.preset = "qwen2.5-0.5b"
    return config


def test_a_tokenizer_larger_than_the_embedding_is_refused(config):
    assert build.make_policy(read_settings(config), tokenizer(151_665)).vocab_size == 151_936
    assert build.make_policy(read_settings(config), tokenizer(151_936)).vocab_size == 151_936
    message = (
        r"tokenizer some/tokenizer has ids up to 151936, .* has 151936 rows \(qwen2\.5-0\.5b\): .*set tokenizer\.path"
    )
    with pytest.raises(UserError, match=message):
        build.make_policy(read_settings(config), tokenizer(151_937))


def test_a_tokenizer_larger_than_the_embedding_of_weights_is_refused(config, monkeypatch):
    shape = DecoderConfig(vocab_size=100, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, hidden=8)
    monkeypatch.setattr(presets, "read_config", lambda path: dataclasses.replace(shape))
    config.policy.preset, config.policy.weights = "", "owner/name"
    assert build.make_policy(read_settings(config), tokenizer(100)).vocab_size == 100
    with pytest.raises(UserError, match=r"has ids up to 100, but the policy's embedding has 100 rows \(owner/name\)"):
        build.make_policy(read_settings(config), tokenizer(101))


def test_a_preset_without_a_vocabulary_gets_the_tokenizers_padded(config):
    config.policy.preset = "tiny"
    assert [build.make_policy(read_settings(config), tokenizer(n)).vocab_size for n in (1, 128, 129)] == [128, 128, 256]


def test_a_tokenizer_that_cannot_serve_an_agent_with_tools_is_refused(config):
    without_tags = Letters()
    with pytest.raises(UserError, match=r"tokenizer\.path: letters: its chat template writes no tool calls"):
        build.make_agent(read_settings(config), make_task("hopworld"), without_tags)
    many = Letters()
    many.added = {**Letters.added, "<tool_call>": 2, "</tool_call>": 3}
    assert build.make_agent(read_settings(config), make_task("hopworld"), many).call_format.name == "hermes"
    many.stop_ids = (1, 2, 3, 4, 5)
    with pytest.raises(UserError, match="letters has 5 stop ids, the engine knows at most 4; shorten eos_token_id"):
        build.make_agent(read_settings(config), make_task("hopworld"), many)


def test_the_call_format_and_how_strictly_it_is_read_come_from_the_config(config):
    config.agent.call_format, config.tools.lenient = "react", True
    agent = build.make_agent(read_settings(config), make_task("hopworld"), Letters())
    assert agent.call_format.name == "react" and agent.lenient

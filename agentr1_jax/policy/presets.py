"""Named shapes of decoders: the published sizes of the families, from each model's `config.json`, and a tiny one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import DecoderConfig, PolicyConfig, RopeScaling, YarnConfig
from agentr1_jax.policy.weights import read_config
from agentr1_jax.validation import from_section

_qwen = functools.partial(DecoderConfig, vocab_size=151_936, rope_theta=1_000_000.0, norm_eps=1e-6)
_qwen25 = functools.partial(_qwen, qkv_bias=True, head_dim=128, max_positions=32_768)
_qwen3 = functools.partial(_qwen, qk_norm=True, head_dim=128, kv_heads=8, max_positions=40_960)
_llama3 = functools.partial(
    DecoderConfig, vocab_size=128_256, kv_heads=8, rope_theta=500_000.0, norm_eps=1e-5, max_positions=131_072
)
_llama31 = functools.partial(_llama3, rope_scaling=RopeScaling("llama3", factor=8.0))
_llama32 = functools.partial(_llama3, rope_scaling=RopeScaling("llama3", factor=32.0))

PRESETS: Mapping[str, DecoderConfig] = {
    # Vocabulary of the run's tokenizer.
    "tiny": DecoderConfig(vocab_size=0, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, hidden=352),
    "qwen2.5-0.5b": _qwen25(width=896, layers=24, heads=14, kv_heads=2, hidden=4864, head_dim=64),
    "qwen2.5-1.5b": _qwen25(width=1536, layers=28, heads=12, kv_heads=2, hidden=8960),
    "qwen2.5-3b": _qwen25(width=2048, layers=36, heads=16, kv_heads=2, hidden=11_008),
    "qwen2.5-7b": _qwen25(width=3584, layers=28, heads=28, kv_heads=4, hidden=18_944, vocab_size=152_064, tied=False),
    "qwen3-0.6b": _qwen3(width=1024, layers=28, heads=16, hidden=3072),
    "qwen3-1.7b": _qwen3(width=2048, layers=28, heads=16, hidden=6144),
    "qwen3-4b": _qwen3(width=2560, layers=36, heads=32, hidden=9728),
    "qwen3-8b": _qwen3(width=4096, layers=36, heads=32, hidden=12_288, tied=False),
    "llama-3.2-1b": _llama32(width=2048, layers=16, heads=32, head_dim=64, hidden=8192),
    "llama-3.2-3b": _llama32(width=3072, layers=28, heads=24, head_dim=128, hidden=8192),
    "llama-3.1-8b": _llama31(width=4096, layers=32, heads=32, head_dim=128, hidden=14_336, tied=False),
}


def decoder_config(config: PolicyConfig, vocab_size: int) -> DecoderConfig:
    """Return the shape of its weights or its preset, with the changes that the config names.

    `vocab_size` is that of a preset that has no vocabulary of its own.

    Raises:
      UserError: an unknown preset, weights that cannot be read, or a shape that cannot be.
    """
    if config.preset and config.preset not in PRESETS:
        raise UserError(f"unknown policy.preset {config.preset!r}; choose one of {', '.join(PRESETS)}")
    try:
        shape = read_config(config.weights) if config.weights else PRESETS[config.preset]
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"policy.weights: {error}") from error
    fields = {f.name: getattr(shape, f.name) for f in dataclasses.fields(shape)} | _stretch(shape, config.yarn)
    return from_section(
        DecoderConfig, "policy", fields | {"vocab_size": shape.vocab_size or vocab_size} | config.changes
    )


def _stretch(shape: DecoderConfig, yarn: YarnConfig) -> dict[str, Any]:
    """Return the fields of a decoder that YaRN changes."""
    if yarn.factor == 1:
        return {}
    original = yarn.original_positions or shape.max_positions
    if shape.rope_scaling or not original:
        fault = "is stretched already" if shape.rope_scaling else "does not tell its longest context"
        raise UserError(f"policy.yarn.factor is {yarn.factor}, and the policy {fault}; set policy.yarn.factor=1")
    scaling = RopeScaling("yarn", yarn.factor, 1.0, 32.0, original, 0.1 * math.log(yarn.factor) + 1)
    return {"rope_scaling": scaling, "max_positions": int(yarn.factor * original)}

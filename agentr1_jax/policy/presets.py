"""Named shapes: the families' published sizes, and a tiny one. From the `config.json` of each model on the hub."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from agentr1_jax.policy.config import DecoderConfig, RopeScaling

_qwen = functools.partial(DecoderConfig, vocab_size=151_936, rope_theta=1_000_000.0, norm_eps=1e-6)
_qwen25 = functools.partial(_qwen, qkv_bias=True, head_dim=128, max_positions=32_768)
_qwen3 = functools.partial(_qwen, qk_norm=True, head_dim=128, kv_heads=8, max_positions=40_960)
_llama3 = functools.partial(
    DecoderConfig, vocab_size=128_256, kv_heads=8, rope_theta=500_000.0, norm_eps=1e-5, max_positions=131_072
)
_stretched = functools.partial(RopeScaling, "llama3", low_frequency=1.0, high_frequency=4.0, original_positions=8192)

PRESETS: Mapping[str, DecoderConfig] = {
    # As many embeddings as the run's tokenizer needs.
    "tiny": DecoderConfig(vocab_size=0, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, hidden=352),
    "qwen2.5-0.5b": _qwen25(width=896, layers=24, heads=14, kv_heads=2, hidden=4864, head_dim=64),
    "qwen2.5-1.5b": _qwen25(width=1536, layers=28, heads=12, kv_heads=2, hidden=8960),
    "qwen2.5-3b": _qwen25(width=2048, layers=36, heads=16, kv_heads=2, hidden=11_008),
    "qwen2.5-7b": _qwen25(width=3584, layers=28, heads=28, kv_heads=4, hidden=18_944, vocab_size=152_064, tied=False),
    "qwen3-0.6b": _qwen3(width=1024, layers=28, heads=16, hidden=3072),
    "qwen3-1.7b": _qwen3(width=2048, layers=28, heads=16, hidden=6144),
    "qwen3-4b": _qwen3(width=2560, layers=36, heads=32, hidden=9728),
    "qwen3-8b": _qwen3(width=4096, layers=36, heads=32, hidden=12_288, tied=False),
    "llama-3.2-1b": _llama3(
        width=2048, layers=16, heads=32, head_dim=64, hidden=8192, rope_scaling=_stretched(factor=32.0)
    ),
    "llama-3.2-3b": _llama3(
        width=3072, layers=28, heads=24, head_dim=128, hidden=8192, rope_scaling=_stretched(factor=32.0)
    ),
    "llama-3.1-8b": _llama3(
        width=4096,
        layers=32,
        heads=32,
        head_dim=128,
        hidden=14_336,
        tied=False,
        rope_scaling=_stretched(factor=8.0),
    ),
}

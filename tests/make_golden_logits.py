"""Tiny models of each family, and their logits by PyTorch, for machines without PyTorch.

    python tests/make_golden_logits.py

writes golden_logits.npz beside this file. It needs the extra `parity` of pyproject.toml. Weights come from a generator
that is seeded by the name of the tensor, hence logits are all that is stored.
"""

from __future__ import annotations

import pathlib
import zlib

import numpy as np

GOLDEN = pathlib.Path(__file__).with_name("golden_logits.npz")
LENGTHS = (64, 41)
VOCAB = 40
EVERY = 4
"""Of the logits so many-th positions are stored."""

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES = {
    "qwen2_tied": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2_untied": {"model_type": "qwen2", "num_key_value_heads": 1, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
    "qwen3_tied": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_untied": {
        "model_type": "qwen3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "llama_linear": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "llama3": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
        "head_dim": 16,
        "rope_scaling": _LLAMA3,
    },
    "qwen3_yarn": {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
}
CASES = {name: _BASE | case for name, case in CASES.items()}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's random content, float32, such that logits have a size of about 1."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:
        return (1 + 0.2 * drawn).astype(np.float32)
    return (0.5 * drawn if len(shape) == 1 else drawn * shape[1] ** -0.5).astype(np.float32)


def sequences() -> list[np.ndarray]:
    """Token ids of the inputs."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n) for n in LENGTHS]


def torch_model(record):
    """The model of a `config.json` with the weights of `weight`."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**record)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    return model


def torch_logits(model) -> list[np.ndarray]:
    """Logits of each sequence, one batch padded on the right."""
    import torch

    ids = sequences()
    tokens, mask = torch.zeros(len(ids), max(LENGTHS), dtype=torch.long), torch.zeros(len(ids), max(LENGTHS))
    for i, row in enumerate(ids):
        tokens[i, : len(row)] = torch.from_numpy(row)
        mask[i, : len(row)] = 1
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).logits.numpy()
    return [logits[i, : len(row)] for i, row in enumerate(ids)]


if __name__ == "__main__":
    stored = {name: np.concatenate(torch_logits(torch_model(case)))[::EVERY] for name, case in CASES.items()}
    np.savez_compressed(GOLDEN, **stored)

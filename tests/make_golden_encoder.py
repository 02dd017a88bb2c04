"""Tiny encoders, and their hidden states by PyTorch, for machines without PyTorch.

    python tests/make_golden_encoder.py

writes golden_encoder.npz beside this file. It needs the extra `parity` of pyproject.toml. Weights come from a generator
that is seeded by the name of the tensor, hence hidden states are all that is stored.
"""

from __future__ import annotations

import pathlib

import make_golden_logits
import numpy as np

GOLDEN = pathlib.Path(__file__).with_name("golden_encoder.npz")
LENGTHS = (60, 37, 1)
VOCAB = 50
EVERY = 4
"""Of the hidden states so many-th positions are stored."""

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "max_position_embeddings": 64,
}

CASES = {
    "bert": {"model_type": "bert", "layer_norm_eps": 1e-12, "pad_token_id": 0},
    "bert_other_types": {"model_type": "bert", "type_vocab_size": 3, "layer_norm_eps": 1e-5, "num_attention_heads": 2},
    "roberta": {"model_type": "roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1},
    "xlm-roberta": {"model_type": "xlm-roberta", "type_vocab_size": 1, "pad_token_id": 3},
}
CASES = {name: _BASE | case for name, case in CASES.items()}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's random content, float32."""
    return make_golden_logits.weight(name.lower(), shape)


def sequences() -> list[np.ndarray]:
    """Token ids of the inputs, none of them a padding id."""
    rng = np.random.default_rng(0)
    return [rng.integers(5, VOCAB, n) for n in LENGTHS]


def torch_model(record):
    """The model of a `config.json` with the weights of `weight`."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**record)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    return model


def torch_hidden(model, padding: int) -> list[np.ndarray]:
    """Final hidden states of each sequence, one batch padded on the right."""
    import torch

    ids = sequences()
    tokens = torch.full((len(ids), max(LENGTHS)), padding, dtype=torch.long)
    mask = torch.zeros(len(ids), max(LENGTHS))
    for i, row in enumerate(ids):
        tokens[i, : len(row)] = torch.from_numpy(row)
        mask[i, : len(row)] = 1
    with torch.no_grad():
        hidden = model(tokens, attention_mask=mask).last_hidden_state.numpy()
    return [hidden[i, : len(row)] for i, row in enumerate(ids)]


def all_hidden(case: str) -> list[np.ndarray]:
    """Those of a case."""
    return torch_hidden(torch_model(CASES[case]), CASES[case].get("pad_token_id", 0))


if __name__ == "__main__":
    stored = {name: np.concatenate(all_hidden(name))[::EVERY] for name in CASES}
    np.savez_compressed(GOLDEN, **stored)

"""The real checkpoint of the data folder (llama2.c format, version 0) as a Hugging Face folder."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_folder(file: Path, folder: Path) -> None:
    """Write a llama2.c checkpoint as `config.json` and safetensors of a Llama.

    The format: width, hidden, layers, heads, key heads, vocabulary, positions as int32 (a positive vocabulary says that
    the head is the embedding), then float32 tensors, those of a kind for all layers together.
    """
    stored = file.read_bytes()
    width, hidden, layers, heads, kv_heads, vocab, positions = struct.unpack_from("<7i", stored)
    numbers, at = np.frombuffer(stored, "<f4", offset=28), 0
    kv = kv_heads * (width // heads)
    tensors = {}

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += int(np.prod(shape))
        return numbers[at - int(np.prod(shape)) : at].reshape(shape)

    def half_split(x: np.ndarray, heads: int) -> np.ndarray:
        """Rotary dimensions (2i, 2i + 1) of each head to (i, i + dim / 2)."""
        return x.reshape(heads, len(x) // heads // 2, 2, width).swapaxes(1, 2).reshape(x.shape)

    tensors["model.embed_tokens.weight"] = take(vocab, width)
    for name, *shape in (
        ("input_layernorm", width),
        ("self_attn.q_proj", width, width),
        ("self_attn.k_proj", kv, width),
        ("self_attn.v_proj", kv, width),
        ("self_attn.o_proj", width, width),
        ("post_attention_layernorm", width),
        ("mlp.gate_proj", hidden, width),
        ("mlp.down_proj", width, hidden),
        ("mlp.up_proj", hidden, width),
    ):
        turned = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(name)
        for i, x in enumerate(take(layers, *shape)):
            tensors[f"model.layers.{i}.{name}.weight"] = half_split(x, turned) if turned else x
    tensors["model.norm.weight"] = take(width)
    folder.mkdir(parents=True)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / "model.safetensors")
    record = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(record))


def text_of(tokenizer: Path, ids: list[int]) -> str:
    """Text of ids of a llama2.c tokenizer: records of score (float32), length (int32), bytes."""
    stored = tokenizer.read_bytes()
    pieces, at = [], 4
    while at < len(stored):
        _, length = struct.unpack_from("<fi", stored, at)
        pieces.append(stored[at + 8 : at + 8 + length])
        at += 8 + length
    return b"".join(pieces[i] for i in ids).decode()

"""Checkpoints of llama2.c (https://github.com/karpathy/llama2.c), version 0: a header, then float32 tensors.

They are shown as if they were a Hugging Face Llama, under its names, so that loading is the same.
"""

from __future__ import annotations

import functools
import math
import struct
from pathlib import Path

import numpy as np

from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.weights.files import Tensor

HEADER = struct.Struct("<7i")
MAGIC = 0x616B3432
"""First number of versions 1 and 2, which have another layout."""

NORM_EPS = 1e-5


def find(path: Path) -> Path | None:
    """The llama2.c checkpoint that is, or lies in, `path`; None if there is none."""
    if path.is_file():
        return path if path.suffix == ".bin" else None
    if (path / "config.json").exists():
        return None
    # Tokenizers are tok*.bin; PyTorch's weights are no concern of ours.
    names = [p for p in sorted(path.glob("*.bin")) if not p.name.startswith(("tok", "pytorch_model"))]
    return names[0] if len(names) == 1 else None


def read_config(file: Path) -> DecoderConfig:
    """The decoder that a checkpoint's header describes.

    Raises:
      ValueError: it is no such checkpoint, one of another version, or not as long as its header says.
    """
    with file.open("rb") as opened:
        header = opened.read(HEADER.size)
    numbers = HEADER.unpack(header) if len(header) == HEADER.size else (0,) * 7
    if numbers[0] == MAGIC:
        raise ValueError(f"{file}: not version 0 of the llama2.c format; export it with `export.py --version 0`")
    width, hidden, layers, heads, kv_heads, vocab_size, positions = numbers
    if min(width, hidden, layers, heads, kv_heads, abs(vocab_size), positions) < 1 or width % heads:
        raise ValueError(f"{file}: not a llama2.c checkpoint (its header says {numbers}); download it again")
    try:
        config = DecoderConfig(
            vocab_size=abs(vocab_size),
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width // heads,
            hidden=hidden,
            norm_eps=NORM_EPS,
            tied=vocab_size > 0,  # Its sign is a flag.
            max_positions=positions,
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    size = HEADER.size + 4 * sum(math.prod(shape) for _, shape in _layout(config))
    if file.stat().st_size != size:
        raise ValueError(
            f"{file}: has {file.stat().st_size} bytes where its header asks for {size}: truncated, or no llama2.c "
            "checkpoint; download it again"
        )
    return config


def open_file(file: Path) -> dict[str, Tensor]:
    """All tensors under their names in a Hugging Face Llama, queries and keys in its layout."""
    config = read_config(file)
    stored, offset = {}, HEADER.size
    for name, shape in _layout(config):
        stored[name] = np.memmap(file, "<f4", "r", offset, shape)
        offset += 4 * math.prod(shape)
    tensors: dict[str, Tensor] = {}
    for name, array in stored.items():
        if name == "rope":
            continue
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2], 0)
        if "{layer}" not in name:
            tensors[name] = Tensor(str(file), array.shape, array.__getitem__)
            continue
        for layer in range(config.layers):
            read = functools.partial(_read_layer, array, layer, heads)
            tensors[name.format(layer=layer)] = Tensor(str(file), array.shape[1:], read)
    return tensors


def _layout(config: DecoderConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the order of the file; layers are stacked."""
    c = config
    kv, layer = c.kv_heads * c.head_dim, "model.layers.{layer}"
    head = [] if c.tied else [("lm_head.weight", (c.vocab_size, c.width))]
    return [
        ("model.embed_tokens.weight", (c.vocab_size, c.width)),
        (f"{layer}.input_layernorm.weight", (c.layers, c.width)),
        (f"{layer}.self_attn.q_proj.weight", (c.layers, c.width, c.width)),
        (f"{layer}.self_attn.k_proj.weight", (c.layers, kv, c.width)),
        (f"{layer}.self_attn.v_proj.weight", (c.layers, kv, c.width)),
        (f"{layer}.self_attn.o_proj.weight", (c.layers, c.width, c.width)),
        (f"{layer}.post_attention_layernorm.weight", (c.layers, c.width)),
        (f"{layer}.mlp.gate_proj.weight", (c.layers, c.hidden, c.width)),
        (f"{layer}.mlp.down_proj.weight", (c.layers, c.width, c.hidden)),
        (f"{layer}.mlp.up_proj.weight", (c.layers, c.hidden, c.width)),
        ("model.norm.weight", (c.width,)),
        ("rope", (c.max_positions, c.head_dim)),  # Cosines and sines, which we compute.
        *head,
    ]


def _read_layer(stacked: np.ndarray, layer: int, heads: int, index: tuple[slice, ...]) -> np.ndarray:
    """A part of one layer. Queries and keys (`heads` > 0) turn dimensions (2i, 2i + 1) there, (i, i + dim/2) here."""
    whole = stacked[layer]
    if heads:
        rows, width = whole.shape
        whole = whole.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
    return whole[index]

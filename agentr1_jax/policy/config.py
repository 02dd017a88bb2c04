"""The shape of a decoder: Qwen2.5, Qwen3, Llama and what lies between them."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

REMAT = ("none", "dots", "full")
ATTENTION = ("xla", "dense", "cudnn", "splash", "splash_tree")
PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts; see `policy.rope`.

    Attributes:
      kind: `linear`, or `llama3` (Llama 3.1, https://arxiv.org/abs/2407.21783).
      factor: how much longer the slow waves become.
      low_frequency, high_frequency: of `llama3`: waves of which fewer, or more, than so many fit into
        `original_positions` are stretched whole, or not at all.
      original_positions: of `llama3`: context length of the first training.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685): y = xW + α/r · (xA)B.

    Attributes:
      rank: r, columns of A; 0 for no adapters.
      alpha: α.
      targets: which of `PROJECTIONS` have one.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        unknown = sorted(set(self.targets) - set(PROJECTIONS))
        if unknown:
            raise ValueError(f"policy.lora.targets names {unknown}; choose among {', '.join(PROJECTIONS)}")
        if self.rank < 0 or (self.rank and not self.targets):
            raise ValueError("policy.lora: rank must be at least 0, and adapters need targets")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and numerics of a decoder.

    Attributes:
      vocab_size: rows of the embedding; every token id is below it.
      width: size of the residual stream.
      layers: number of blocks, scanned.
      heads: query heads.
      kv_heads: key and value heads; divides `heads`.
      head_dim: size of one head.
      hidden: inner size of the SwiGLU.
      rope_theta: base of the rotary frequencies.
      rope_scaling: stretches them; None for none.
      norm_eps: epsilon of RMSNorm.
      qkv_bias: True if query, key and value have a bias (Qwen2).
      qk_norm: True if each query and key head is normalised before its rotation (Qwen3).
      tied: True if the output head is the embedding.
      max_positions: longest context it was made for; 0 if unknown.
      dtype: of activations and matmuls; norms, softmax and logits are float32 in any case.
      param_dtype: of parameters.
      remat: what the backward pass computes again: `none`, `dots` (all but matmuls with weights), `full` (each block).
      attention: implementation for packed rows in training; see `policy.attention`.
      lora: low-rank adapters, which are then all that is trained of the decoder.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = True
    max_positions: int = 0
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"
    attention: str = "xla"
    lora: Lora = Lora()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"policy.kv_heads ({self.kv_heads}) must divide policy.heads ({self.heads})")
        if self.head_dim % 2:
            raise ValueError(f"policy.head_dim is {self.head_dim}; rotary embeddings need an even number")
        for name, known in (("remat", REMAT), ("attention", ATTENTION)):
            if getattr(self, name) not in known:
                raise ValueError(f"policy.{name} is {getattr(self, name)!r}; choose one of {', '.join(known)}")
        for name in ("dtype", "param_dtype"):
            if not jnp.issubdtype(jnp.dtype(getattr(self, name)), jnp.floating):
                raise ValueError(f"policy.{name} is {getattr(self, name)!r}; it must be a floating-point dtype")

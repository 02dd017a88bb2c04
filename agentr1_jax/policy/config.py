"""The shape of a decoder."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and numerics of a Llama-style decoder.

    Attributes:
      vocab_size: rows of the embedding; every token id is below it.
      width: size of the residual stream.
      layers: number of blocks, scanned.
      heads: query heads.
      kv_heads: key and value heads; divides `heads`.
      head_dim: size of one head.
      hidden: inner size of the SwiGLU.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of RMSNorm.
      tied: True if the output head is the embedding.
      dtype: of activations and matmuls; norms, softmax and logits are float32 in any case.
      param_dtype: of parameters.
      remat: `none`, or `full`: recompute each block in the backward pass.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"policy.kv_heads ({self.kv_heads}) must divide policy.heads ({self.heads})")
        if self.head_dim % 2:
            raise ValueError(f"policy.head_dim is {self.head_dim}; rotary embeddings need an even number")
        if self.remat not in ("none", "full"):
            raise ValueError(f"policy.remat is {self.remat!r}; choose 'none' or 'full'")
        for name in ("dtype", "param_dtype"):
            if not jnp.issubdtype(jnp.dtype(getattr(self, name)), jnp.floating):
                raise ValueError(f"policy.{name} is {getattr(self, name)!r}; it must be a floating-point dtype")

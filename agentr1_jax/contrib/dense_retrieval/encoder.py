"""Encoder of the BERT family: post-norm blocks over whole texts, and pooling of hidden states to one vector.

BERT, RoBERTa and XLM-RoBERTa are this module with other numbers. It is never trained.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.policy.attention import grouped_attention

Params = Any


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Shape and numerics of an encoder.

    Attributes:
      hidden: inner size of the MLP.
      positions: rows of the position embedding.
      first_position: position of a text's first token; RoBERTa leaves out those up to its padding id.
      types: rows of the token-type embedding, of which the first is used.
      dtype: dtype of activations and matmuls; norms, softmax and pooling are float32 in any case.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    hidden: int
    positions: int
    first_position: int = 0
    types: int = 2
    norm_eps: float = 1e-12
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads ({self.heads}) must divide the width ({self.width})")
        if self.max_tokens < 1:
            raise ValueError(f"{self.positions} positions of which the first used is {self.first_position}: none left")

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text."""
        return self.positions - self.first_position


class EncoderBlock(nn.Module):
    """One layer: attention, then the MLP, each added to its input and normalised afterwards."""

    config: EncoderConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "rows length width"], visible: Bool[Array, "rows length length"]
    ) -> tuple[Float[Array, "rows length width"], None]:
        c = self.config
        dense = functools.partial(nn.DenseGeneral, dtype=c.dtype)
        norm = functools.partial(nn.LayerNorm, c.norm_eps, dtype=c.dtype, use_fast_variance=False)

        query, key, value = (dense((c.heads, c.width // c.heads), name=name)(x) for name in ("query", "key", "value"))
        mixed = grouped_attention(query * query.shape[-1] ** -0.5, key, value, visible)
        x = norm(name="attention_norm")(x + dense(c.width, axis=(-2, -1), name="out")(mixed))
        inner = nn.gelu(dense(c.hidden, name="up")(x), approximate=False)
        return norm(name="mlp_norm")(x + dense(c.width, name="down")(inner)), None


class Encoder(nn.Module):
    """Token ids to hidden states after the last layer's norm; those at padding (`mask` is False) are meaningless."""

    config: EncoderConfig

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "rows length"], mask: Bool[Array, "rows length"]
    ) -> Float[Array, "rows length width"]:
        c, length = self.config, tokens.shape[1]
        embed = functools.partial(nn.Embed, features=c.width, dtype=c.dtype)
        x = embed(c.vocab_size, name="token")(tokens)
        x += embed(c.positions, name="position")(c.first_position + jnp.arange(length))
        x += embed(c.types, name="type")(jnp.zeros(1, jnp.int32))
        x = nn.LayerNorm(c.norm_eps, dtype=c.dtype, use_fast_variance=False, name="embed_norm")(x)
        layers = nn.scan(
            EncoderBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=c.layers,
        )
        x, _ = layers(c, name="layers")(x, jnp.broadcast_to(mask[:, None], (*mask.shape, length)))
        return x


def embed_tokens(
    config: EncoderConfig,
    params: Params,
    tokens: Int[Array, "rows length"],
    lengths: Int[Array, " rows"],
    *,
    pooling: str,
    normalised: bool,
) -> Float[Array, "rows width"]:
    """Return the float32 vectors of texts.

    Args:
      tokens: text i is tokens[i, : lengths[i]]; what follows is padding of any id.
      pooling: `mean` of a text's hidden states, or `cls`: the first one.
      normalised: scale vectors to length 1, so that their dot product is the cosine.
    """
    mask = jnp.arange(tokens.shape[1]) < lengths[:, None]
    states: Any = Encoder(config).apply({"params": params}, tokens, mask)
    wide = states.astype(jnp.float32)
    if pooling == "cls":
        vector = wide[:, 0]
    else:
        total = jnp.sum(jnp.where(mask[..., None], wide, 0), axis=1)
        vector = total / jnp.maximum(lengths[:, None], 1)
    if not normalised:
        return vector
    return vector / jnp.maximum(jnp.linalg.norm(vector, axis=-1, keepdims=True), 1e-12)

"""The decoder: pre-norm blocks of grouped-query attention and SwiGLU, scanned over layers.

`Decoder` is used functionally: policy, reference and old policy are this module with other parameter trees.
It returns hidden states; logits are made where and when they are needed (`head_kernel`), since they decide memory.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentr1_jax.policy.attention import Memory, PackedRows, rotate
from agentr1_jax.policy.config import DecoderConfig

Params = Any


class RMSNorm(nn.Module):
    """x / rms(x) · scale, in float32 or wider."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.config.param_dtype)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.config.norm_eps)
        return (normed * scale).astype(x.dtype)


class Block(nn.Module):
    """One layer; `carry` is the residual stream and the memory's state."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "rows length width"], Any],
        layer: Int[Array, ""],
        position: Int[Array, "rows length"],
        memory: Memory,
    ) -> tuple[tuple[Float[Array, "rows length width"], Any], None]:
        c = self.config
        x, state = carry
        dtype, init = jnp.dtype(c.dtype), nn.initializers.lecun_normal()
        # Each layer adds two terms to the residual stream; scaled so that their sum has the size of one.
        residual_init = nn.initializers.variance_scaling(0.5 / c.layers, "fan_in", "truncated_normal")

        def dense(name: str, features: int, kernel_init: Any = init) -> nn.Dense:
            return nn.Dense(
                features, use_bias=False, dtype=dtype, param_dtype=c.param_dtype, kernel_init=kernel_init, name=name
            )

        def split(y: Array, heads: int) -> Array:
            return y.reshape(*y.shape[:2], heads, c.head_dim)

        y = RMSNorm(c, name="attention_norm")(x)
        query = split(dense("query", c.heads * c.head_dim)(y), c.heads)
        key = split(dense("key", c.kv_heads * c.head_dim)(y), c.kv_heads)
        value = split(dense("value", c.kv_heads * c.head_dim)(y), c.kv_heads)
        query, key = rotate(query, position, c.rope_theta), rotate(key, position, c.rope_theta)
        mixed, state = memory.attend(query, key, value, layer, state)
        x = x + dense("out", c.width, residual_init)(mixed.reshape(*mixed.shape[:2], -1))

        y = RMSNorm(c, name="mlp_norm")(x)
        gated = nn.silu(dense("gate", c.hidden)(y)) * dense("up", c.hidden)(y)
        x = x + dense("down", c.width, residual_init)(gated)
        return (x, state), None


class Decoder(nn.Module):
    """Token ids to final hidden states."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "rows length"],
        position: Int[Array, "rows length"],
        memory: Memory,
        state: Any = None,
    ) -> tuple[Float[Array, "rows length width"], Any]:
        """Runs the decoder.

        Args:
          tokens: ids.
          position: rotary position of each token.
          memory: what the tokens attend to.
          state: what `memory` carries through the layers (the KV cache), or None.

        Returns:
          hidden: after the final norm; the hidden state of token k predicts token k + 1.
          state: the updated state.
        """
        c = self.config
        init = nn.initializers.normal(c.width**-0.5)
        embedding = self.param("embed", init, (c.vocab_size, c.width), c.param_dtype)
        if not c.tied:
            self.param("head", init, (c.width, c.vocab_size), c.param_dtype)
        block = nn.remat(Block, prevent_cse=False) if c.remat == "full" else Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=c.layers,
        )
        x = jnp.take(embedding, tokens, axis=0).astype(c.dtype)
        (x, state), _ = layers(c, name="layers")((x, state), jnp.arange(c.layers), position, memory)
        return RMSNorm(c, name="final_norm")(x), state


def head_kernel(params: Params) -> Float[Array, "width vocab"]:
    """The output head: logits = hidden @ head_kernel(params)."""
    return params["head"] if "head" in params else params["embed"].T


def init_params(config: DecoderConfig, key: Array, critic: bool) -> Params:
    """Random parameters: `{"decoder": ..., "value": ...}`, the value head only with a critic.

    The value head starts at zero, so that the first advantages are returns to go.
    """
    ids = jnp.zeros((1, 2), jnp.int32)
    memory = PackedRows(subtree_end=jnp.full((1, 2), 2, jnp.int32))
    params = {"decoder": Decoder(config).init(key, ids, ids, memory)["params"]}
    if critic:
        wide = jnp.promote_types(config.param_dtype, jnp.float32)
        params["value"] = {"kernel": jnp.zeros((config.width,), wide), "bias": jnp.zeros((), wide)}
    return params


def values(params: Params, hidden: Float[Array, "*batch width"]) -> Float[Array, "*batch"]:
    """V at a hidden state: a linear head on the policy's trunk, in float32 or wider."""
    kernel = params["value"]["kernel"]
    return hidden.astype(kernel.dtype) @ kernel + params["value"]["bias"]

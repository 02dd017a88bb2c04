"""The decoder: pre-norm blocks of rotary grouped-query attention and SwiGLU, scanned over layers.

`Decoder` is used functionally: policy, critic, reference and old policy are this module with other parameter trees. It
returns hidden states; logits, which dominate memory, are computed where they are needed (`head_kernel`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from agentr1_jax.policy.attention import Memory
from agentr1_jax.policy.config import DecoderConfig, RopeScaling
from agentr1_jax.policy.sharding import GATHERED, constrain, gather, look_up

Params = Any


class RMSNorm(nn.Module):
    """x / rms(x) · scale over the last axis, in float32 or wider."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.config.param_dtype)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.config.norm_eps)
        return (normed * scale).astype(x.dtype)


def parameter(module: nn.Module, name: str, init: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a parameter of a module, or the shard of it that `over_rows` left: flax's own `param` refuses a shard."""
    if module.is_initializing() or not module.has_variable("params", name):
        return module.param(name, init, shape, dtype)
    return module.get_variable("params", name)


class Projection(nn.Module):
    """xW (+ b) over the last axes of x, W of shape [*inputs, *outputs]; + α/r · (xA)B where the module has an adapter.

    Heads are axes of their own, so that the table of shardings can see them.
    """

    config: DecoderConfig
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bias: bool = False
    variance: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "rows length *inputs"]) -> Float[Array, "rows length *outputs"]:
        c, n = self.config, len(self.inputs)
        dtype = jnp.dtype(c.dtype)

        def fan_in(variance: float, inputs: int, outputs: int) -> Any:
            axes = range(inputs + outputs)
            return nn.initializers.variance_scaling(
                variance, "fan_in", "truncated_normal", in_axis=axes[:inputs], out_axis=axes[inputs:]
            )

        def whole(name: str, init: Any, *shape: int) -> Array:
            found = parameter(self, name, init, shape, c.param_dtype)
            return gather(found, shape, dtype, c.reduce_dtype)

        kernel = whole("kernel", fan_in(self.variance, n, len(self.outputs)), *self.inputs, *self.outputs)
        y = jnp.tensordot(x, kernel, axes=n)
        if self.bias:
            y = y + self.param("bias", nn.initializers.zeros, self.outputs, c.param_dtype).astype(dtype)
        if c.lora.rank and self.name in c.lora.targets:
            # B starts at zero: an adapter that was never trained changes nothing.
            a = whole("lora_a", fan_in(1.0, n, 1), *self.inputs, c.lora.rank)
            b = whole("lora_b", nn.initializers.zeros, c.lora.rank, *self.outputs)
            low = jnp.tensordot(x, a, axes=n)
            y = y + c.lora.alpha / c.lora.rank * jnp.tensordot(low, b, axes=1)
        return y


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Return the angle per position of each pair of dimensions, float64 [head_dim / 2]: θ^(−2i/d), then scaled.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.

    `llama3` leaves waves shorter than original/high_frequency positions as they are, stretches those longer than
    original/low_frequency by `factor`, and interpolates linearly (in the number of waves that fit) between the two.
    `yarn` does the same, linearly in i.
    """
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return plain
    stretched = plain / scaling.factor
    if scaling.kind == "linear":
        return stretched
    if scaling.kind == "yarn":
        # The (fractional) pairs of which so many waves fit; rounded outwards, as in the published code.
        waves = np.asarray([scaling.high_frequency, scaling.low_frequency])
        pair = head_dim * np.log(scaling.original_positions / (waves * 2 * np.pi)) / (2 * np.log(theta))
        first, last = max(np.floor(pair[0]), 0), min(np.ceil(pair[1]), head_dim - 1)
        share = 1 - np.clip((np.arange(head_dim // 2) - first) / max(last - first, 0.001), 0, 1)
        return share * plain + (1 - share) * stretched
    waves = scaling.original_positions * plain / (2 * np.pi)
    share = np.clip((waves - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency), 0, 1)
    return share * plain + (1 - share) * stretched


def rotate(
    x: Float[Array, "rows length heads dim"],
    position: Int[Array, "rows length"],
    frequency: np.ndarray,
    magnitude: float = 1.0,
) -> Float[Array, "rows length heads dim"]:
    """Rotate dimensions (i, i + dim/2) by position · frequency[i]: the half-split layout of Hugging Face weights."""
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    angle = position[..., None, None].astype(wide) * jnp.asarray(frequency, wide)
    cos, sin = magnitude * jnp.cos(angle), magnitude * jnp.sin(angle)
    first, second = x[..., :half].astype(wide), x[..., half:].astype(wide)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Block(nn.Module):
    """One layer; `carry` is the residual stream and the memory's state."""

    config: DecoderConfig
    mesh: Mesh | None

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
        frequency = frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        # Each layer adds two terms to the residual stream; scaled so that their sum has the size of one.
        residual = 0.5 / c.layers

        def heads(name: str, count: int, y: Array) -> Array:
            split = Projection(c, (c.width,), (count, c.head_dim), bias=c.qkv_bias, name=name)(y)
            return constrain(split, self.mesh, None, None, "tensor", None)

        y = RMSNorm(c, name="attention_norm")(x)
        query, key, value = heads("query", c.heads, y), heads("key", c.kv_heads, y), heads("value", c.kv_heads, y)
        if c.qk_norm:
            query, key = RMSNorm(c, name="query_norm")(query), RMSNorm(c, name="key_norm")(key)
        magnitude = c.rope_scaling.magnitude if c.rope_scaling else 1.0
        # The scale of scores goes with the rotation, which is in float32: it rounds nothing once more.
        query = rotate(query, position, frequency, magnitude * c.head_dim**-0.5)
        key = rotate(key, position, frequency, magnitude)
        mixed, state = memory.attend(query, key, value, layer, state)
        x = x + Projection(c, (c.heads, c.head_dim), (c.width,), variance=residual, name="out")(mixed)
        x = constrain(x, self.mesh, None, None, None)

        y = RMSNorm(c, name="mlp_norm")(x)
        gate, up = (Projection(c, (c.width,), (c.hidden,), name=name)(y) for name in ("gate", "up"))
        gated = constrain(nn.silu(gate) * up, self.mesh, None, None, "tensor")
        x = x + Projection(c, (c.hidden,), (c.width,), variance=residual, name="down")(gated)
        return (constrain(x, self.mesh, None, None, None), state), None


def _remat(config: DecoderConfig, mesh: Mesh | None) -> type[Block]:
    policies = jax.checkpoint_policies
    if config.remat == "none":
        if mesh is None or mesh.shape["fsdp"] == 1:
            return Block
        policy = policies.save_anything_except_these_names(GATHERED)
    else:
        policy = policies.dots_with_no_batch_dims_saveable if config.remat == "dots" else policies.nothing_saveable
    return nn.remat(Block, prevent_cse=False, policy=policy)


class Decoder(nn.Module):
    """Token ids to final hidden states; with a mesh, inside of `sharding.over_rows`."""

    config: DecoderConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "rows length"],
        position: Int[Array, "rows length"],
        memory: Memory,
        state: Any = None,
    ) -> tuple[Float[Array, "rows length width"], Any]:
        """Return hidden states after the final norm, and the state that `memory` carried through the layers (KV cache).

        The hidden state of token k predicts token k + 1.
        """
        c = self.config
        init = nn.initializers.normal(c.width**-0.5)
        block = _remat(c, self.mesh)
        embedding = parameter(self, "embed", init, (c.vocab_size, c.width), c.param_dtype)
        if not c.tied:
            parameter(self, "head", init, (c.width, c.vocab_size), c.param_dtype)
        x = constrain(look_up(embedding, tokens, c.width, c.dtype), self.mesh, None, None, None)
        if self.has_variable("params", "layers_0"):  # See `params.split_layers`.
            for i in range(c.layers):
                (x, state), _ = block(c, self.mesh, name=f"layers_{i}")((x, state), jnp.int32(i), position, memory)
        else:
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast, nn.broadcast),
                length=c.layers,
            )
            (x, state), _ = layers(c, self.mesh, name="layers")((x, state), jnp.arange(c.layers), position, memory)
        return RMSNorm(c, name="final_norm")(x), state


def at_precision(config: DecoderConfig, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose matmuls, those of its gradients among them, have the precision of a policy."""
    if config.precision == "default":
        return function

    def precise(*arguments: Any) -> Any:
        with jax.default_matmul_precision(config.precision):
            return function(*arguments)

    return precise


def output_logits(params: Params, hidden: Float[Array, "... width"]) -> Float[Array, "... vocab"]:
    """Return logits in float32, without another copy of a tied head."""
    weights, axis = (params["head"], 0) if "head" in params else (params["embed"], 1)
    dims = (((hidden.ndim - 1,), (axis,)), ((), ()))
    return jax.lax.dot_general(hidden, weights.astype(hidden.dtype), dims, preferred_element_type=jnp.float32)


def head_kernel(params: Params) -> Float[Array, "width vocab"]:
    """Return the output head: logits = hidden @ head_kernel(params)."""
    return params["head"] if "head" in params else params["embed"].T

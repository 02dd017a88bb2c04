"""Small things that tests of the policy, the engine and the agents share: a decoder, meshes, a slow forward pass."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from agentr1_jax.policy.attention import PackedRows
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Decoder, head_kernel
from agentr1_jax.policy.params import init_params
from agentr1_jax.runtime.mesh import AXES

POLICY = DecoderConfig(vocab_size=64, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=24)


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh over the first devices."""
    devices = np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


@functools.cache
def decoder_params(policy: DecoderConfig = POLICY, seed: int = 0):
    """Random decoder parameters with logits of some size, so that distributions are far from uniform."""
    params = jax.jit(init_params, static_argnums=(0, 2))(policy, jax.random.key(seed), "none")["decoder"]
    return {**params, "final_norm": {"scale": params["final_norm"]["scale"] * 2}}


@functools.cache
def _forward(policy: DecoderConfig):
    @jax.jit
    def logits(params, tokens):
        rows, length = tokens.shape
        position = jnp.broadcast_to(jnp.arange(length), (rows, length))
        memory = PackedRows(subtree_end=jnp.full((rows, length), length))
        hidden, _ = Decoder(policy).apply({"params": params}, tokens, position, memory)
        return hidden @ head_kernel(params)

    return logits


def full_logits(policy: DecoderConfig, params, sequences, length: int, rows: int = 16) -> list[np.ndarray]:
    """Logits [T, vocab] of each id sequence by one forward pass without any cache; float32."""
    out = []
    for start in range(0, len(sequences), rows):
        part = sequences[start : start + rows]
        tokens = np.zeros((rows, length), np.int32)
        for row, ids in zip(tokens, part, strict=False):
            row[: len(ids)] = ids
        logits = np.asarray(_forward(policy)(params, tokens))
        out += [logits[i, : len(ids)] for i, ids in enumerate(part)]
    return out


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, float64."""
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))

"""Check of the configured attention by a tiny call, before anything is loaded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from agentr1_jax.policy.attention import PackedRows
from agentr1_jax.policy.config import DecoderConfig

SPLASH_BLOCK = 128
"""Rows for splash attention must be a multiple of this many tokens."""


def check_attention(policy: DecoderConfig, mesh: Mesh, row_tokens: int, packing: str, *, call: bool = True) -> None:
    """Run `policy.attention` and its gradient once on the mesh, over one short row for each shard of a batch.

    Args:
      policy: shape of the decoder; its attention, head sizes and dtype are used.
      mesh: the learner's; all its processes call this.
      row_tokens: length of a packed row.
      packing: mode of the rows.
      call: False leaves out the call, for a mesh whose devices are not here.

    Raises:
      ValueError: the devices, the rows or the dtype do not suit the implementation, or the call failed.
    """
    fault = _fault(policy, mesh.devices.flat[0].platform, row_tokens, packing)
    if fault:
        raise ValueError(f"policy.attention={policy.attention} {fault}; policy.attention=xla works everywhere")
    if policy.attention in ("xla", "dense") or not call:
        return
    try:
        jax.block_until_ready(_tiny_call(policy, mesh))
    except Exception as error:  # A backend may raise anything.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"policy.attention={policy.attention} fails on {mesh.devices.flat[0].device_kind} with {policy.heads} "
            f"query heads, {policy.kv_heads} key heads, head_dim {policy.head_dim} and {policy.dtype}: {reason}; "
            "policy.attention=xla works everywhere"
        ) from error


def _fault(policy: DecoderConfig, platform: str, row_tokens: int, packing: str) -> str | None:
    """Return why the implementation does not suit, as the end of a sentence, or None."""
    if policy.attention in ("splash", "splash_tree"):
        if platform != "tpu":
            return f"needs a TPU, and the devices here are of platform {platform!r}"
        if row_tokens % SPLASH_BLOCK:
            return f"needs rows of a multiple of {SPLASH_BLOCK} tokens, and learner.row_tokens is {row_tokens}"
        if policy.attention == "splash" and packing == "prefix_tree":
            return "needs segments (learner.packing is prefix_tree); policy.attention=splash_tree takes any rows"
    return None


def _tiny_call(policy: DecoderConfig, mesh: Mesh) -> Array:
    """Return the sum of gradients of one short row per shard, made within the program: no process holds an input."""
    rows, length = mesh.shape["data"] * mesh.shape["fsdp"], SPLASH_BLOCK

    def loss(query: Array, key: Array, value: Array) -> Array:
        memory = PackedRows(jnp.full((rows, length), length), policy.attention, mesh)
        return memory.attend(query, key, value, jnp.zeros((), jnp.int32), None)[0].astype(jnp.float32).sum()

    def call() -> Array:
        heads = (policy.heads, policy.kv_heads, policy.kv_heads)
        inputs = [jnp.ones((rows, length, n, policy.head_dim), policy.dtype) for n in heads]
        return sum((g.astype(jnp.float32).sum() for g in jax.grad(loss, argnums=(0, 1, 2))(*inputs)), jnp.zeros(()))

    return jax.jit(call, out_shardings=NamedSharding(mesh, P()))()

"""Parameters of a run: their parts, and the split into trained and frozen ones.

    decoder   the policy
    value     a linear value head, float32
    critic    decoder under the value head (`critic = separate`); without it the head is on the policy's trunk

Under LoRA, training changes only adapters (and the value head): the rest is frozen, and policy and critic share it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentr1_jax.policy.attention import PackedRows
from agentr1_jax.policy.config import Critic, DecoderConfig
from agentr1_jax.policy.decoder import Decoder, Params

DECODERS = ("decoder", "critic")


def init_decoder(config: DecoderConfig, key: Array) -> Params:
    """Return random parameters of one decoder."""
    ids = jnp.zeros((1, 2), jnp.int32)
    memory = PackedRows(subtree_end=jnp.full((1, 2), 2, jnp.int32))
    return Decoder(config).init(key, ids, ids, memory)["params"]


def with_critic(config: DecoderConfig, decoder: Params, critic: Critic) -> Params:
    """Return all parts for a policy, of which `decoder` may be the trained parameters only.

    A separate critic starts as its copy, the value head at zero: the first advantages are returns to go.
    """
    params = {"decoder": decoder}
    if critic == "separate":
        params["critic"] = jax.tree.map(jnp.copy, decoder)  # Both are donated to the update, hence two buffers.
    if critic != "none":
        wide = jnp.promote_types(config.param_dtype, jnp.float32)
        params["value"] = {"kernel": jnp.zeros(config.width, wide), "bias": jnp.zeros((), wide)}
    return params


def init_params(config: DecoderConfig, key: Array, critic: Critic = "none") -> Params:
    """Return random parameters of all parts: `{"decoder": ..., "value": ..., "critic": ...}`."""
    return with_critic(config, init_decoder(config, key), critic)


def split(config: DecoderConfig, params: Params) -> tuple[Params, Params]:
    """Return (trained, frozen): all and nothing; under LoRA adapters and value head, and the rest of the decoder."""
    if not config.lora.rank:
        return params, {}
    trained = {part: adapters(tree) if part in DECODERS else tree for part, tree in params.items()}
    return trained, {"decoder": without_adapters(params["decoder"])}


def join(trained: Params, frozen: Params) -> Params:
    """Inverse of `split`; frozen parameters of the policy serve the critic too."""
    base = frozen.get("decoder", {})
    return {part: _merge(base, tree) if part in DECODERS else tree for part, tree in trained.items()}


def adapters(decoder: Params) -> Params:
    """Return the low-rank adapters of a decoder."""
    return _select(decoder, lambda name: name.startswith("lora_"))


def without_adapters(decoder: Params) -> Params:
    """Return a decoder's parameters except its adapters."""
    return _select(decoder, lambda name: not name.startswith("lora_"))


def merge_adapters(config: DecoderConfig, decoder: Params) -> Params:
    """Return a decoder without adapters that computes the same: W + α/r · AB, summed in float32 or wider."""

    def merge(tree: Params) -> Params:
        if "lora_a" not in tree:
            return {name: merge(x) if isinstance(x, dict) else x for name, x in tree.items()}
        kernel, a, b = (tree[name] for name in ("kernel", "lora_a", "lora_b"))
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        # Layer by layer: the leading axis is the scan's.
        product = jax.vmap(lambda a, b: jnp.tensordot(a, b, axes=1))(a.astype(wide), b.astype(wide))
        total = kernel.astype(wide) + config.lora.alpha / config.lora.rank * product
        return {**without_adapters(tree), "kernel": total.astype(kernel.dtype)}

    return merge(decoder)


def cast_for_compute(config: DecoderConfig, decoder: Params) -> Params:
    """Return a decoder's parameters in its compute dtype, which spares the engine a cast for each token.

    Scales of norms are used in float32 and stay as they are.
    """

    def cast(path: Any, x: Array) -> Array:
        return x if path[-1].key == "scale" else x.astype(config.dtype)

    return jax.tree_util.tree_map_with_path(cast, decoder)


def split_layers(decoder: Params) -> Params:
    """Return a decoder's parameters with those of each layer apart, `layers_0`, `layers_1`, ..., not in one stack.

    A GPU's compiler copies a layer out of a stack before it multiplies, which is three times the memory traffic.
    """
    stacks, tree = jax.tree.flatten(decoder["layers"])
    apart = {f"layers_{i}": jax.tree.unflatten(tree, layer) for i, layer in enumerate(zip(*stacks, strict=True))}
    return {name: x for name, x in decoder.items() if name != "layers"} | apart


def values(params: Params, hidden: Float[Array, "*batch width"]) -> Float[Array, "*batch"]:
    """Return V at hidden states of the critic's trunk: a linear head, in float32 or wider."""
    kernel = params["value"]["kernel"]
    return hidden.astype(kernel.dtype) @ kernel + params["value"]["bias"]


def _select(tree: Params, wanted: Any) -> Params:
    """Return the leaves whose name is wanted, without empty subtrees."""
    out: dict[str, Any] = {}
    for name, x in tree.items():
        if isinstance(x, dict):
            if part := _select(x, wanted):
                out[name] = part
        elif wanted(name):
            out[name] = x
    return out


def _merge(one: Params, other: Params) -> Params:
    """Return the union of two nested dicts without a leaf in common."""
    out = dict(one)
    for name, x in other.items():
        out[name] = _merge(out[name], x) if name in out else x
    return out

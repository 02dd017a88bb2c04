"""Table between our parameters and the tensors of Hugging Face checkpoints, used by load and save alike.

Our parameters are stacked over layers, kernels are [*inputs, *outputs] and heads are axes of their own; their tensors
are per layer, [outputs, inputs], with heads and their dimensions as one axis.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from agentr1_jax.policy.config import DecoderConfig, LoraConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.params import init_decoder

_LAYER = "model.layers.{layer}"

# path: (their name, our axes without that of the layers, their axes); a*b is one axis of a blocks of size b.
TABLE: dict[str, tuple[str, str, str]] = {
    "embed": ("model.embed_tokens.weight", "vocab width", "vocab width"),
    "layers/attention_norm/scale": (f"{_LAYER}.input_layernorm.weight", "width", "width"),
    "layers/query/kernel": (f"{_LAYER}.self_attn.q_proj.weight", "width heads dim", "heads*dim width"),
    "layers/key/kernel": (f"{_LAYER}.self_attn.k_proj.weight", "width heads dim", "heads*dim width"),
    "layers/value/kernel": (f"{_LAYER}.self_attn.v_proj.weight", "width heads dim", "heads*dim width"),
    "layers/query/bias": (f"{_LAYER}.self_attn.q_proj.bias", "heads dim", "heads*dim"),
    "layers/key/bias": (f"{_LAYER}.self_attn.k_proj.bias", "heads dim", "heads*dim"),
    "layers/value/bias": (f"{_LAYER}.self_attn.v_proj.bias", "heads dim", "heads*dim"),
    "layers/query_norm/scale": (f"{_LAYER}.self_attn.q_norm.weight", "dim", "dim"),
    "layers/key_norm/scale": (f"{_LAYER}.self_attn.k_norm.weight", "dim", "dim"),
    "layers/out/kernel": (f"{_LAYER}.self_attn.o_proj.weight", "heads dim width", "width heads*dim"),
    "layers/mlp_norm/scale": (f"{_LAYER}.post_attention_layernorm.weight", "width", "width"),
    "layers/gate/kernel": (f"{_LAYER}.mlp.gate_proj.weight", "width hidden", "hidden width"),
    "layers/up/kernel": (f"{_LAYER}.mlp.up_proj.weight", "width hidden", "hidden width"),
    "layers/down/kernel": (f"{_LAYER}.mlp.down_proj.weight", "hidden width", "width hidden"),
    "final_norm/scale": ("model.norm.weight", "width", "width"),
    "head": ("lm_head.weight", "width vocab", "vocab width"),
}


def parameter_shapes(config: DecoderConfig) -> Params:
    """Return shape structs of a decoder's parameters, without adapters."""
    plain = dataclasses.replace(config, lora=LoraConfig())
    return jax.eval_shape(functools.partial(init_decoder, plain), jax.random.key(0))


def flatten(tree: Params) -> dict[str, Any]:
    """Return leaves by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}


def is_stacked(path: str) -> bool:
    """Return True for a parameter with a leading axis of layers."""
    return path.startswith("layers/")


def tensor_name(path: str, layer: int | None = None) -> str:
    """Return their name of our parameter, in one layer where it is stacked."""
    return TABLE[path][0].format(layer=layer)


def their_shape(path: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of their tensor for one of our parameters (of one layer)."""
    sizes, groups = _axes(path, shape)
    return tuple(math.prod(sizes[axis] for axis in group) for group in groups)


def to_theirs(path: str, ours: np.ndarray) -> np.ndarray:
    """Return our parameter (of one layer) as they store it; contiguous."""
    sizes, groups = _axes(path, ours.shape)
    order = [list(sizes).index(axis) for group in groups for axis in group]
    return np.ascontiguousarray(ours.transpose(order).reshape(their_shape(path, ours.shape)))


def read_ours(
    path: str, shape: Sequence[int], index: Sequence[slice], read: Callable[[tuple[slice, ...]], np.ndarray]
) -> np.ndarray:
    """Return a part of our parameter (of one layer), from the part of their tensor that holds it.

    Where heads and dimensions are one axis of theirs, heads are cut by `read` and dimensions afterwards; no rule of
    `policy.sharding` cuts dimensions.

    Args:
      shape: of the whole parameter.
      index: the part, a slice with start and stop for each axis.
      read: slices of their tensor -> its content.
    """
    sizes, groups = _axes(path, shape)
    wanted = dict(zip(sizes, index, strict=True))
    cuts, blocks, within = [], [], []
    for outer, *inner in groups:
        block = math.prod(sizes[axis] for axis in inner)
        cut = wanted[outer]
        cuts.append(slice(cut.start * block, cut.stop * block))
        blocks += [cut.stop - cut.start, *(sizes[axis] for axis in inner)]
        within += [slice(None), *(wanted[axis] for axis in inner)]
    part = read(tuple(cuts)).reshape(blocks)[tuple(within)]
    flat = [axis for group in groups for axis in group]
    return part.transpose([flat.index(axis) for axis in sizes])


def _axes(path: str, shape: Sequence[int]) -> tuple[dict[str, int], list[list[str]]]:
    """Return the sizes of our axes by name, and their axes as lists of our axes."""
    _, ours, theirs = TABLE[path]
    return dict(zip(ours.split(), shape, strict=True)), [axis.split("*") for axis in theirs.split()]

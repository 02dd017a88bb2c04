"""Shardings on the mesh `(data, fsdp, tensor)`: one table from parameter path to PartitionSpec.

A mesh axis that does not divide its axis of the array is dropped: two key heads on four devices of `tensor` are
replicated.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

ROWS = ("data", "fsdp")
"""Mesh axes over which rows of a batch are sharded."""

# First match wins. Layer parameters have a leading [layers] axis, heads are axes of their own: query [layers, width,
# heads, dim], out [layers, heads, dim, width].
RULES: tuple[tuple[str, P], ...] = (
    (r"layers/(query|key|value)/kernel$", P(None, "fsdp", "tensor", None)),
    (r"layers/out/kernel$", P(None, "tensor", None, "fsdp")),
    (r"layers/(gate|up)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/down/kernel$", P(None, "tensor", "fsdp")),
    (r"layers/(query|key|value)/bias$", P(None, "tensor", None)),
    (r"layers/(query|key|value|gate|up)/lora_a$", P(None, "fsdp", None)),
    (r"layers/(query|key|value|gate|up)/lora_b$", P(None, None, "tensor")),
    (r"layers/(out|down)/lora_a$", P(None, "tensor")),
    (r"layers/(out|down)/lora_b$", P(None, None, "fsdp")),
    (r"embed$", P("tensor", "fsdp")),
    (r"head$", P("fsdp", "tensor")),
    (r"scale$", P()),
)


def spec_of(path: str) -> P:
    """Return the PartitionSpec of the parameter at a path such as `decoder/layers/query/kernel`.

    Raises:
      KeyError: no rule matches.
    """
    for pattern, spec in RULES:
        if re.search(pattern, path):
            return spec
    raise KeyError(f"no sharding rule for parameter {path!r}; add one to policy/sharding.py")


def fit(spec: P | Sequence[Any], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array by a spec, without the mesh axes that do not divide their axis of the array."""

    def dividing(axes: Any, size: int) -> Any:
        names = (axes,) if isinstance(axes, str) else axes or ()
        return axes if size % math.prod(mesh.shape[name] for name in names) == 0 else None

    return NamedSharding(mesh, P(*map(dividing, spec, shape)))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Return a NamedSharding for every leaf of a tree of parameters, or of a tree shaped like them (optimizer state).

    Scalars and vectors are replicated.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        if leaf.ndim < 2:
            return NamedSharding(mesh, P())
        return fit(spec_of(jax.tree_util.keystr(path, simple=True, separator="/")), leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def constrain(x: jax.Array, mesh: Mesh | None, *spec: Any) -> jax.Array:
    """Constrain the layout of an activation to a spec; without a mesh, leave it to the compiler."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, fit(spec, x.shape, mesh))


def on_shards(
    attention: Callable[[Array, Array, Array, Array], Array],
    query: Float[Array, "rows length heads dim"],
    key: Float[Array, "rows length kv_heads dim"],
    value: Float[Array, "rows length kv_heads dim"],
    subtree_end: Int[Array, "rows length"],
    mesh: Mesh | None,
) -> Float[Array, "rows length heads dim"]:
    """Run `attention(query, key, value, subtree_end)` on each device's own rows and heads.

    Rows are sharded over (data, fsdp) and heads over tensor, where it divides both kinds of heads. A mesh of None
    stands for one device.
    """
    if mesh is None:
        return attention(query, key, value, subtree_end)
    if key.shape[2] % mesh.shape["tensor"]:  # Each device needs the key heads of its own query heads.
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    spec = functools.partial(fit, (ROWS, None, "tensor", None), mesh=mesh)
    ends = fit((ROWS, None), subtree_end.shape, mesh).spec
    specs = (*(spec(shape=x.shape).spec for x in (query, key, value)), ends)
    return jax.shard_map(attention, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(
        query, key, value, subtree_end
    )

"""Shardings on the mesh `(data, fsdp, tensor)`: one table from parameter path to PartitionSpec.

A mesh axis that does not divide its axis of the array is dropped: two key heads on four devices of `tensor` are
replicated.

The learner's programs run by rows (`over_rows`): each device sees its own rows and its own shards of the parameters,
gathers a parameter over `fsdp` where it is used, and its gradient comes back as a sum, scattered (`gather`). Only
`tensor` is left to the compiler. Left alone with `fsdp`, it multiplies in rings over the devices that add partial sums
in the compute dtype, and sums whole gradients for every layer of every microbatch.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

ROWS = ("data", "fsdp")
"""Mesh axes over which rows of a batch are sharded."""
GATHERED = "gathered"
"""Name of gathered parameters, which the backward pass gathers again instead of keeping them."""

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
    stacked, apart = re.subn(r"layers_\d+/", "layers/", path)
    for pattern, spec in RULES:
        if re.search(pattern, stacked):
            return P(*spec[1:]) if apart else spec
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


def engine_formats(tree: Any, mesh: Mesh, *, always: bool = False) -> Any:
    """Return `shardings`, on TPU (or always) with the memory layout in which the engine multiplies: heads before width.

    With the default layout its programs lay the kernels of query, key and value anew in every call.
    """
    if not always and mesh.devices.flat[0].platform != "tpu":
        return shardings(tree, mesh)

    def format_of(path: Any, sharding: NamedSharding) -> NamedSharding | Format:
        heads = re.search(r"layers/(query|key|value)/kernel$", jax.tree_util.keystr(path, simple=True, separator="/"))
        return Format(Layout((0, 2, 1, 3)), sharding) if heads else sharding

    return jax.tree_util.tree_map_with_path(format_of, shardings(tree, mesh))


def row_specs(tree: Any, mesh: Mesh) -> Any:
    """Return the specs of a tree of parameters inside and outside of `over_rows`: of their shardings, `fsdp` alone."""

    def spec(sharding: NamedSharding) -> P:
        return P(*("fsdp" if axis == "fsdp" else None for axis in sharding.spec))

    return jax.tree.map(spec, shardings(tree, mesh))


def over_rows(f: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return f on each device's own rows and shards: by hand over `data` and `fsdp`; `tensor` is the compiler's."""
    if mesh is None:
        return f
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(ROWS), check_vma=False)


def gather(x: jax.Array, shape: Sequence[int], dtype: Any, reduce_dtype: Any = None) -> jax.Array:
    """Return a parameter in another dtype, gathered over `fsdp` where its shape shows that it is a shard.

    Its gradient, inside of `over_rows`, is that of the shard: summed over `fsdp`, not over `data`.

    Args:
      x: a parameter, or a shard of it.
      shape: shape of the whole.
      dtype: of the result, which is cast before it is sent.
      reduce_dtype: in which the gradient is summed; None for the parameter's.
    """
    axes = [axis for axis, (own, all_) in enumerate(zip(x.shape, shape, strict=True)) if own != all_]
    if not axes:
        return x.astype(dtype)
    return checkpoint_name(_gather(x, axes[0], jnp.dtype(dtype), jnp.dtype(reduce_dtype or x.dtype)), GATHERED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x: jax.Array, axis: int, dtype: Any, reduce_dtype: Any) -> jax.Array:
    return jax.lax.all_gather(x.astype(dtype), "fsdp", axis=axis, tiled=True)


def _gather_forward(x: jax.Array, axis: int, dtype: Any, reduce_dtype: Any) -> tuple[jax.Array, jax.Array]:
    return _gather(x, axis, dtype, reduce_dtype), jnp.zeros((), x.dtype)


def _gather_backward(axis: int, dtype: Any, reduce_dtype: Any, like: jax.Array, slope: jax.Array) -> tuple[jax.Array]:
    return (scatter_sum(slope, axis, reduce_dtype).astype(like.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def scatter_sum(x: jax.Array, axis: int, dtype: Any) -> jax.Array:
    """Return this device's part along an axis of the sum over `fsdp`, inside of `over_rows`; summed in a dtype.

    In two stages, within groups of devices and then over the groups, which send as much as one would: of one over a
    whole slice the TPU compiler makes the sum of everything on every device.
    """
    devices = jax.lax.axis_size("fsdp")
    groups = max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
    members = devices // groups  # Device g · members + m gets part g · members + m.
    parts = jnp.moveaxis(x.astype(dtype), axis, 0)
    parts = parts.reshape(groups, -1, *parts.shape[1:])
    number = np.arange(devices).reshape(groups, members)
    for scattered, stage in ((False, number.T), (True, number)):
        parts = jax.lax.psum_scatter(
            parts, "fsdp", scatter_dimension=0, tiled=scattered, axis_index_groups=stage.tolist()
        )
    return jnp.moveaxis(parts, 0, axis)


def sum_over_devices(grads: Any, specs: Any) -> Any:
    """Sum gradients of parameters over the mesh axes over which they are not summed yet, inside of `over_rows`."""
    return jax.tree.map(lambda x, spec: jax.lax.psum(x, "data" if "fsdp" in spec else ROWS), grads, specs)


def look_up(
    embedding: Float[Array, "vocab columns"], ids: Int[Array, "rows length"], width: int, dtype: Any
) -> Float[Array, "rows length width"]:
    """Return the embeddings of ids; with a shard over `fsdp` ids and columns are sent instead of the embedding."""
    if embedding.shape[1] == width:
        return jnp.take(embedding, ids, axis=0).astype(dtype)
    columns = jnp.take(embedding, jax.lax.all_gather(ids, "fsdp", axis=0, tiled=True), axis=0).astype(dtype)
    return jax.lax.all_to_all(columns, "fsdp", split_axis=0, concat_axis=2, tiled=True)


def constrain(x: jax.Array, mesh: Mesh | None, *spec: Any) -> jax.Array:
    """Constrain the layout of an activation over `tensor`, inside of `over_rows`; a mesh of None constrains nothing."""
    if mesh is None or mesh.shape["tensor"] == 1:
        return x
    return jax.lax.with_sharding_constraint(x, fit(spec, x.shape, mesh).spec)


def on_shards(
    attention: Callable[[Array, Array, Array, Array], Array],
    query: Float[Array, "rows length heads dim"],
    key: Float[Array, "rows length kv_heads dim"],
    value: Float[Array, "rows length kv_heads dim"],
    subtree_end: Int[Array, "rows length"],
    mesh: Mesh | None,
) -> Float[Array, "rows length heads dim"]:
    """Run `attention(query, key, value, subtree_end)` on each device's own heads.

    Inside of `over_rows`: heads are sharded over `tensor`, where it divides both kinds of heads. A mesh of None stands
    for one device.
    """
    if mesh is None:
        return attention(query, key, value, subtree_end)
    if key.shape[2] % mesh.shape["tensor"]:  # Each device needs the key heads of its own query heads.
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    specs = (*(fit((None, None, "tensor", None), x.shape, mesh).spec for x in (query, key, value)), P())
    return jax.shard_map(attention, in_specs=specs, out_specs=specs[0], axis_names={"tensor"}, check_vma=False)(
        query, key, value, subtree_end
    )

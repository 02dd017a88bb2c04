"""Where each parameter lives: one table from parameter path to PartitionSpec over the mesh `(data, fsdp, tensor)`."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# First match wins. Layer parameters have a leading [layers] axis.
RULES: tuple[tuple[str, P], ...] = (
    (r"layers/(query|key|value|gate|up)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/(out|down)/kernel$", P(None, "tensor", "fsdp")),
    (r"embed$", P("tensor", "fsdp")),
    (r"head$", P("fsdp", "tensor")),
    (r"scale$", P()),
)


def spec_of(path: str) -> P:
    """PartitionSpec of the parameter at `path` (`decoder/layers/query/kernel`). Raises KeyError if no rule matches."""
    for pattern, spec in RULES:
        if re.search(pattern, path):
            return spec
    raise KeyError(f"no sharding rule for parameter {path!r}; add one to policy/sharding.py")


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every leaf of a tree of parameters, or of anything shaped like them (optimizer moments).

    Scalars and vectors are replicated, and so is an axis that does not divide its dimension.
    """

    def fit(path: Any, leaf: Any) -> NamedSharding:
        if leaf.ndim < 2:
            return NamedSharding(mesh, P())
        spec = spec_of(jax.tree_util.keystr(path, simple=True, separator="/"))
        axes = [
            a if a is not None and size % mesh.shape[a] == 0 else None
            for a, size in zip(spec, leaf.shape, strict=False)
        ]
        return NamedSharding(mesh, P(*axes))

    return jax.tree_util.tree_map_with_path(fit, tree)

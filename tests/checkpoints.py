"""Checkpoints in the format of Hugging Face that tests write, and how they read them."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import make_golden_logits as golden
import numpy as np
import tiny
from safetensors.numpy import save_file

from agentr1_jax.policy import weights
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.policy.weights import files, names


def layout(data=1, fsdp=1, tensor=1):
    return functools.partial(shardings, mesh=tiny.mesh(data, fsdp, tensor))


def tensors_of(config):
    """Hugging Face names and shapes of a decoder."""
    out = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(names.parameter_shapes(config)):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        for layer in range(config.layers) if names.is_stacked(path) else (None,):
            shape = leaf.shape if layer is None else leaf.shape[1:]
            out[names.tensor_name(path, layer)] = names.their_shape(path, shape)
    return out


def checkpoint(folder, case="llama", *, dtype=np.float32, parts=2, change=None, **record):
    """A folder as transformers would write it, in several files; `change` edits its tensors."""
    record = golden.CASES[case] | record
    tensors = {
        name: golden.weight(name, s).astype(dtype) for name, s in tensors_of(weights.from_hf(record, "")).items()
    }
    if change:
        change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for part in range(parts):
        name = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        held = dict(list(tensors.items())[part::parts])
        save_file(held, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, name)
    (folder / files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(record))
    return folder


def read(folder, where=None, **changes):
    config = dataclasses.replace(weights.read_config(folder), **changes)
    return config, weights.load(folder, config, where or layout())


def check_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

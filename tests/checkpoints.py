"""Checkpoints and tokenizers in the format of Hugging Face that tests write, and how they read them."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import make_golden_logits as golden
import numpy as np
import tiny
import tokenizers
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


CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("in", "g"), ("|", ">"))


def write_tokenizer(folder, added=CHATML_TOKENS, *, eos_token="<|im_end|>", chat_template=CHATML, merges=MERGES):
    """A tokenizer of bytes, a few longer pieces and added tokens."""
    words = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(added))
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: x for k, x in config.items() if x is not None}))
    return str(folder)


def write_model(folder, vocab_size=272, **changes):
    """A published model of 0.02M parameters with its tokenizer; `changes` are those of the tokenizer."""
    checkpoint(folder, "qwen2_tied", vocab_size=vocab_size, max_position_embeddings=4096)
    return write_tokenizer(folder, **changes)


def read(folder, where=None, **changes):
    config = dataclasses.replace(weights.read_config(folder), **changes)
    return config, weights.load(folder, config, where or layout())


def check_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

"""Encoder checkpoints in the format of Hugging Face that tests write."""

from __future__ import annotations

import json

import make_golden_encoder as golden
import numpy as np
import tokenizers
from safetensors.numpy import save_file

LAYER = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")


def tensors_of(record):
    """Names and contents of a checkpoint's tensors, by the rule of the stored hidden states."""
    width, hidden = record["hidden_size"], record["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (record["vocab_size"], width),
        "embeddings.position_embeddings.weight": (record["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (record.get("type_vocab_size", 2), width),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(record["num_hidden_layers"]):
        dense = dict.fromkeys(LAYER, (width, width))
        dense |= {"intermediate.dense": (hidden, width), "output.dense": (width, hidden)}
        for name, shape in dense.items():
            shapes[f"encoder.layer.{i}.{name}.weight"] = shape
            shapes[f"encoder.layer.{i}.{name}.bias"] = shape[:1]
        norms += [f"encoder.layer.{i}.{part}.LayerNorm" for part in ("attention.output", "output")]
    shapes |= {f"{norm}.{leaf}": (width,) for norm in norms for leaf in ("weight", "bias")}
    return {name: golden.weight(name, shape) for name, shape in shapes.items()}


def checkpoint(folder, case="bert", *, prefix="", change=None, words=(), **changes):
    """A folder as transformers would write it; `change` edits its tensors, `words` are those of a tokenizer."""
    record = golden.CASES[case] | changes
    if words:
        record["vocab_size"] = write_tokenizer(folder, words)
    tensors = {prefix + name: tensor for name, tensor in tensors_of(record).items()}
    if change:
        change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(record))
    return folder


def write_tokenizer(folder, words):
    """A tokenizer of whole lower-cased words between [CLS] and [SEP]; returns the size of its vocabulary."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {word: i for i, word in enumerate([*special, *sorted(set(words))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(special)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocab)


def pad(ids, rows, length):
    """Tokens [rows, length] and lengths [rows]."""
    tokens = np.zeros((rows, length), np.int32)
    for row, text in zip(tokens, ids, strict=False):
        row[: len(text)] = text
    return tokens, np.asarray([len(text) for text in ids] + [0] * (rows - len(ids)), np.int32)

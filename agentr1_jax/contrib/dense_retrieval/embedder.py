"""Texts to vectors: the tokenizer and the encoder of one checkpoint, compiled for a few shapes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import tokenizers
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentr1_jax.contrib.dense_retrieval import weights
from agentr1_jax.contrib.dense_retrieval.encoder import embed_tokens
from agentr1_jax.policy.weights import files

MIN_LENGTH = 16
IDENTIFYING = ("config.json", "tokenizer.json", "*.safetensors")
PASSAGE_TOKENS = 8192
QUERY_TOKENS = 512
"""Tokens of a call, padding included: many are efficient, few are soon done."""

_embed_tokens = jax.jit(embed_tokens, static_argnames=("config", "pooling", "normalised"))


class Embedder:
    """An encoder on this process's devices and the tokenizer that belongs to it.

    Texts are sorted into calls of fixed shapes: the length is the least of 16, 32, 64, ..., `max_tokens` that holds
    the text, and the number of rows follows from the length. So nothing recompiles, and a text's vector depends on no
    other text.

    Args:
      path_or_hub_id: a folder of config.json, safetensors and tokenizer, or `owner/name` on the hub.
      pooling, normalised: see `embed_tokens`.
      dtype: dtype of activations, float32 or bfloat16.
      max_tokens: tokens of a text, at least `MIN_LENGTH`; longer texts are truncated, also to the encoder's positions.
      devices: devices of this process that share the rows of a call; None for all.

    Attributes:
      identity: name, and a hash of all that vectors depend on but for the prefix.
      lengths: numbers of tokens to which texts are padded.

    Raises:
      FileNotFoundError: there is nothing at that path.
      ValueError: there is something else than an encoder and its tokenizer.
    """

    def __init__(
        self,
        path_or_hub_id: str | os.PathLike[str],
        *,
        pooling: str = "mean",
        normalised: bool = True,
        dtype: str = "float32",
        max_tokens: int = 512,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        folder = files.locate(path_or_hub_id)
        self._config = dataclasses.replace(weights.read_config(folder), dtype=dtype)
        max_tokens = min(max_tokens, self._config.max_tokens)
        doublings = itertools.takewhile(lambda n: n < max_tokens, (MIN_LENGTH << i for i in itertools.count()))
        self.lengths = (*doublings, max_tokens)
        self._tokenizer = _load_tokenizer(folder, self._config.vocab_size, max_tokens)
        settings = [pooling, normalised, dtype, max_tokens]
        self.identity = f"{Path(path_or_hub_id).name} {_hash_files(folder, settings)}"

        mesh = Mesh(np.array(devices or jax.local_devices()), ("shard",), axis_types=(AxisType.Auto,))
        self._rows = NamedSharding(mesh, P("shard"))
        params = jax.device_put(weights.load(folder, self._config), NamedSharding(mesh, P()))
        self._program = functools.partial(_embed_tokens, self._config, params, pooling=pooling, normalised=normalised)

    def embed(self, texts: Sequence[str], prefix: str = "", tokens_per_call: int = PASSAGE_TOKENS) -> np.ndarray:
        """Return the vectors of texts of any length, float32 [texts, width].

        Args:
          prefix: stands before each text.
          tokens_per_call: see `PASSAGE_TOKENS` and `QUERY_TOKENS`.

        Raises:
          ValueError: a vector is not finite.
        """
        # What policies write may hold halves of surrogate pairs, which a tokenizer cannot read.
        whole = [f"{prefix}{text}".encode("utf-8", "replace").decode("utf-8") for text in texts]
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(whole)]
        out = np.zeros((len(ids), self._config.width), np.float32)
        calls = self._calls(ids, tokens_per_call)
        # All are enqueued before the first is waited for.
        for places, vectors in [(places, self._call([ids[i] for i in places], *shape)) for places, shape in calls]:
            out[places] = np.asarray(vectors)[: len(places)]
        if not np.isfinite(out).all():
            raise ValueError(f"{self.identity}: the encoder's vectors are not finite; its weights must be damaged")
        return out

    def compile(self, tokens_per_call: int) -> None:
        """Compile every program that `embed` can need, by running each once."""
        for length in self.lengths:
            jax.block_until_ready(self._call([], self._rows_of(length, tokens_per_call), length))

    def _calls(self, ids: Sequence[Sequence[int]], tokens_per_call: int) -> Iterator[tuple[list[int], tuple[int, int]]]:
        """Yield the indices of the texts of each call, and its shape (rows, length)."""

        def bucket(i: int) -> int:
            return next(length for length in self.lengths if len(ids[i]) <= length)

        for length, same in itertools.groupby(sorted(range(len(ids)), key=bucket), bucket):
            rows = self._rows_of(length, tokens_per_call)
            while places := list(itertools.islice(same, rows)):
                yield places, (rows, length)

    def _rows_of(self, length: int, tokens_per_call: int) -> int:
        devices = self._rows.mesh.devices.size
        return max(tokens_per_call // (length * devices), 1) * devices

    def _call(self, ids: Sequence[Sequence[int]], rows: int, length: int) -> jax.Array:
        tokens, lengths = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
        for i, text in enumerate(ids):
            tokens[i, : len(text)], lengths[i] = text, len(text)
        return self._program(*jax.device_put((tokens, lengths), self._rows))


def _load_tokenizer(folder: Path, vocab_size: int, max_tokens: int) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no tokenizer.json; save the tokenizer there with save_pretrained of transformers")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing more special.
        raise ValueError(f"{path}: not a tokenizer ({error}); download it again") from error
    ids = backend.get_vocab(with_added_tokens=True).values()
    if max(ids) >= vocab_size:
        raise ValueError(
            f"{folder}: its tokenizer has ids up to {max(ids)}, but its encoder knows {vocab_size} tokens: they do not "
            "belong together"
        )
    backend.no_padding()
    backend.enable_truncation(max_tokens)
    return backend


def _hash_files(folder: Path, settings: Sequence[object]) -> str:
    """Return a hash of the files and settings that vectors depend on."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for path in sorted({path for pattern in IDENTIFYING for path in folder.glob(pattern)}):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()

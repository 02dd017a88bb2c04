"""One small adapter over Hugging Face and SentencePiece tokenizers.

Text has two kinds of origin. *Template* text is ours or the tokenizer's and may contain added tokens (`<|im_end|>`).
*Data* text comes from tools, users and data sets, and never becomes an added-token id, whatever it says.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from agentr1_jax import files

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
"""Files of which the folder of a tokenizer has at least one."""


@runtime_checkable
class Tokenizer(Protocol):
    """Contract of tokenizers.

    Attributes:
      name: path or hub id, for error messages.
      vocab_size: every id is below it.
      added: added-token string -> id; only templates and the policy produce these ids.
      stop_id: the id that ends an assistant turn; an id of `added`.
      stop_ids: all ids that end a response, `stop_id` first.
      pad_id: an id for padding; it carries no weight anywhere.
    """

    name: str
    vocab_size: int
    added: Mapping[str, int]
    stop_id: int
    stop_ids: tuple[int, ...]
    pad_id: int

    def encode_template(self, text: str) -> list[int]:
        """Ids of template text: strings of added tokens become their ids."""

    def encode_data(self, text: str) -> list[int]:
        """Ids of data text: never contains an id of `added`."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids, added tokens included; ids outside the vocabulary decode to nothing."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Template text of a conversation up to where the assistant speaks. Raises ValueError if there is no way."""


def load_tokenizer(spec: str, template_args: Mapping[str, Any] | None = None) -> Tokenizer:
    """Return the tokenizer at `spec`: a `*.model` file (SentencePiece), a folder, or a Hugging Face hub id.

    Args:
      spec: path or hub id. A folder whose only tokenizer is `tokenizer.model` counts as that file.
      template_args: further variables of a Hugging Face chat template, e.g. `{"enable_thinking": False}`.

    Raises:
      FileNotFoundError: there is no such file or folder, and `spec` is no hub id that can be fetched.
      ValueError: the tokenizer cannot be read, or lacks what a chat needs.
    """
    # Both libraries are imported only where used: transformers alone takes a second.
    path = _find_model(spec)
    if path is not None:
        from agentr1_jax.text.sentencepiece import SentencePieceTokenizer

        return SentencePieceTokenizer(path)
    from agentr1_jax.text.hf import HFTokenizer

    return HFTokenizer(spec, template_args)


def _find_model(spec: str) -> Path | None:
    """Return the file of a SentencePiece model; None for a Hugging Face tokenizer.

    Raises:
      FileNotFoundError: there is no such file or folder, and `spec` is no hub id.
    """
    path = files.path(spec)
    if path.is_dir() and (path / "tokenizer.model").exists() and not (path / "tokenizer_config.json").exists():
        path = path / "tokenizer.model"
    if path.suffix == ".model":
        return path
    # A path that starts with a dot, or lies in a folder that exists here, is mistyped.
    parent = Path(spec).parent
    may_be_hub_id = HUB_ID.fullmatch(spec) and not spec.startswith(".") and (parent == Path() or not parent.is_dir())
    if not path.is_dir() and not may_be_hub_id:
        raise FileNotFoundError(f"{spec}: no such tokenizer; give a folder, a hub id (owner/name) or a *.model file")
    return None


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What the ids of a tokenizer stand for.

    Attributes:
      added: string of each added token -> id.
      pieces: every other piece, as the tokenizer's model writes it -> id.
    """

    added: Mapping[str, int]
    pieces: Mapping[str, int]

    def difference(self, other: Vocabulary) -> str:
        """Return in what this vocabulary differs from another one; "" where every id stands for the same."""
        here, there = self.added.items() - other.added.items(), other.added.items() - self.added.items()
        if here or there:
            told = [f"{which} {_list_tokens(tokens)}" for which, tokens in (("has", here), ("lacks", there)) if tokens]
            return f"of the added tokens it {' and '.join(told)}"
        differing = len(self.pieces.items() ^ other.pieces.items())
        if differing:
            return f"its vocabulary is another one ({len(self.pieces):,} and {len(other.pieces):,} pieces)"
        return ""


def read_vocabulary(spec: str) -> Vocabulary:
    """Return the vocabulary of the tokenizer at `spec`, which need not have a chat template; see `load_tokenizer`."""
    path = _find_model(spec)
    if path is not None:
        from agentr1_jax.text.sentencepiece import read_pieces

        return read_pieces(path)
    from agentr1_jax.text.hf import read_pieces as read_hf_pieces

    return read_hf_pieces(spec)


def has_tokenizer(folder: str) -> bool:
    """Return False where a folder holds no tokenizer; True for one that does, and for what is no folder here."""
    return not os.path.isdir(folder) or any(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZER_FILES)


def _list_tokens(tokens: Iterable[tuple[str, int]]) -> str:
    shown = sorted(tokens, key=lambda token: token[1])
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(f"{string!r} ({i})" for string, i in shown[:3]) + more


def match_any(strings: Iterable[str]) -> str:
    """Return a regular expression for any of `strings`, the longest first; for none it matches nothing."""
    return _join_longest_first(tuple(strings))


@functools.lru_cache(maxsize=64)  # Every message of every chat asks for the same few.
def _join_longest_first(strings: tuple[str, ...]) -> str:
    return "|".join(re.escape(s) for s in sorted(strings, key=len, reverse=True)) or r"(?!)"


def split_at_tokens(text: str, added: Iterable[str], mark: str | None = None) -> list[str]:
    """Split template text at added-token strings: [text, added, text, ..., text]; joined again it is `text`.

    A string right behind the character `mark` is not split off.
    """
    unmarked = f"(?<!{mark})" if mark else ""
    return re.split(f"{unmarked}({match_any(added)})", text)


def encode_parts(tokenizer: Tokenizer, parts: Sequence[str]) -> list[int]:
    """Return the ids of the parts from `split_at_tokens`: added tokens at odd places, data text at even ones."""
    ids = []
    for place, part in enumerate(parts):
        ids += [tokenizer.added[part]] if place % 2 else tokenizer.encode_data(part)
    return ids


def replace_surrogates(text: str) -> str:
    """Return `text` with lone surrogates (JSON can carry them) replaced by `?`: no tokenizer encodes them."""
    return text.encode("utf-8", "replace").decode("utf-8")

"""One small adapter over Hugging Face and SentencePiece tokenizers.

Text has two kinds of origin. *Template* text is ours or the tokenizer's and may contain added tokens (`<|im_end|>`).
*Data* text comes from tools, users and data sets, and never becomes an added-token id, whatever it says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from agentr1_jax import files

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


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
    path = files.path(spec)
    if path.is_dir() and (path / "tokenizer.model").exists() and not (path / "tokenizer_config.json").exists():
        path = path / "tokenizer.model"
    if path.suffix == ".model":
        from agentr1_jax.text.sentencepiece import SentencePieceTokenizer

        return SentencePieceTokenizer(path)
    # A path that starts with a dot, or lies in a folder that exists here, is mistyped.
    parent = Path(spec).parent
    may_be_hub_id = HUB_ID.fullmatch(spec) and not spec.startswith(".") and (parent == Path() or not parent.is_dir())
    if not path.is_dir() and not may_be_hub_id:
        raise FileNotFoundError(f"{spec}: no such tokenizer; give a folder, a hub id (owner/name) or a *.model file")
    from agentr1_jax.text.hf import HFTokenizer

    return HFTokenizer(spec, template_args)


def match_any(strings: Iterable[str]) -> str:
    """Return a regular expression for any of `strings`, the longest first; for none it matches nothing."""
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

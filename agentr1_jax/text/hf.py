"""Hugging Face tokenizers behind the `Tokenizer` protocol."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import tokenizers

# Without PyTorch, which nothing here needs, importing transformers warns.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
import transformers

from agentr1_jax.text.tokenizer import Vocabulary, encode_parts, replace_surrogates, split_at_tokens

TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
RESPONSE = "\U000f0000"
"""Stands for what the assistant says where a template is asked how it goes on."""


def _download(hub_id: str) -> str:
    """Folder with the tokenizer's files; one attempt, then what an earlier one left in the cache."""
    try:
        return huggingface_hub.snapshot_download(hub_id, allow_patterns=TOKENIZER_FILES)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{hub_id}: no such folder here, and the hub gives no tokenizer of that name ({type(error).__name__}: "
            f"{reason}); correct the path, or the hub id and the connection"
        ) from error


def read_pieces(path: str) -> Vocabulary:
    """Return the vocabulary of a tokenizer as its files have it, whatever the class of its model would add.

    Raises:
      FileNotFoundError: the hub id cannot be fetched, or the files are of another kind.
      ValueError: a file is damaged.
    """
    folder = Path(path if os.path.isdir(path) else _download(path))
    if (folder / "tokenizer.json").is_file():
        spec = _read_json(folder / "tokenizer.json")
        added = {token["content"]: token["id"] for token in spec.get("added_tokens", [])}
        vocab = spec["model"]["vocab"]
        pieces = vocab if isinstance(vocab, dict) else {piece: i for i, (piece, *_) in enumerate(vocab)}
    else:
        pieces = _read_json(folder / "vocab.json")
        tokens = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
        added = {token["content"]: int(i) for i, token in tokens.items()}
    return Vocabulary(added, {piece: i for piece, i in pieces.items() if piece not in added})


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); download it again") from error


class HFTokenizer:
    """A fast tokenizer with a chat template, from a local folder or a hub id.

    A `generation_config.json` beside it may name further stop ids.

    Raises:
      FileNotFoundError: the hub id cannot be fetched.
      ValueError: it cannot be loaded, or lacks a chat template or an end-of-turn token; the message says which.
    """

    def __init__(self, path: str | os.PathLike[str], template_args: Mapping[str, Any] | None = None) -> None:
        self.name = os.fspath(path)
        self._template_args = dict(template_args or {})
        folder = self.name if os.path.isdir(self.name) else _download(self.name)
        try:
            self._hf = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self.name}: no Hugging Face tokenizer could be loaded ({type(error).__name__}: {reason})"
            ) from error
        self.added: Mapping[str, int] = {token.content: i for i, token in self._hf.added_tokens_decoder.items()}
        missing = {
            "a chat template (chat_template)": not self._hf.chat_template,
            "a token that ends a turn (eos_token, among its added tokens)": self._hf.eos_token not in self.added,
            "a fast implementation (tokenizer.json)": not self._hf.is_fast,
        }
        if any(missing.values()):
            raise ValueError(
                f"{self.name}: this tokenizer lacks {' and '.join(k for k, v in missing.items() if v)}; take that of "
                "an instruction-tuned model with tool use (e.g. Qwen/Qwen2.5-0.5B-Instruct), or complete its "
                "tokenizer_config.json"
            )
        self._backend: tokenizers.Tokenizer = self._hf.backend_tokenizer
        # The same without added tokens. `split_special_tokens` would leave those that are not marked special (Qwen's
        # `<tool_call>`).
        spec = json.loads(self._backend.to_str())
        self._plain = tokenizers.Tokenizer.from_str(json.dumps({**spec, "added_tokens": []}))
        self._added_ids = frozenset(self.added.values())
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.stop_ids = self._stop_ids(Path(folder) / "generation_config.json")
        self.stop_id = self.stop_ids[0]
        self.pad_id = self.stop_id if self._hf.pad_token_id is None else self._hf.pad_token_id

    def encode_template(self, text: str) -> list[int]:
        return encode_parts(self, split_at_tokens(text, self.added))

    def encode_data(self, text: str) -> list[int]:
        ids = self._encode_plain(replace_surrogates(text))
        if self._added_ids.isdisjoint(ids):
            return ids
        # The model itself (a word list, say) holds an added token as one of its words: spell the text instead.
        spelled = [i for character in replace_surrogates(text) for i in self._encode_plain(character)]
        return [i for i in spelled if i not in self._added_ids]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._backend.decode_batch([[int(i) for i in ids]], skip_special_tokens=False)[0]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                tokenize=False,
                **self._template_args,
            )
        except Exception as error:  # A template may do anything with them.
            raise ValueError(f"{self.name}: its chat template refuses these messages: {error}") from error
        return str(text)

    def _stop_ids(self, generation_config: Path) -> tuple[int, ...]:
        """eos_token and those of the generation config; first the one that ends an assistant's turn in the template."""
        stops = [self.added[self._hf.eos_token]]
        if generation_config.exists():
            try:
                ids = json.loads(generation_config.read_text(encoding="utf-8")).get("eos_token_id")
                stops += [] if ids is None else [int(i) for i in (ids if isinstance(ids, list) else [ids])]
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{generation_config}: not a generation config ({error}); repair or remove it"
                ) from error
        unknown = [i for i in stops if i not in self._added_ids]
        if unknown:
            raise ValueError(
                f"{generation_config}: eos_token_id {unknown} are no added tokens of this tokenizer; take the file "
                "that belongs to it, or remove it"
            )
        strings = {i: string for string, i in self.added.items()}
        ended = self.render_chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": RESPONSE}])
        after = ended.partition(RESPONSE)[2]
        return tuple(sorted(dict.fromkeys(stops), key=lambda i: not after.startswith(strings[i])))

    def _encode_plain(self, text: str) -> list[int]:
        # As a batch of one, like in `decode`: the library lets other threads run in calls for batches only.
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

"""SentencePiece tokenizers behind the `Tokenizer` protocol, and the training of a small one."""

from __future__ import annotations

import collections
import io
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece

from agentr1_jax import files
from agentr1_jax.text.tokenizer import Vocabulary, encode_parts, match_any, replace_surrogates, split_at_tokens

PAD, TURN_START, TURN_END = "<pad>", "<|im_start|>", "<|im_end|>"
ADDED = (
    TURN_START,
    TURN_END,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<answer>",
    "</answer>",
)
SYNTAX = ('{"name": "', '", "arguments": {"', '": "', '"}}')
"""The fixed strings of a JSON tool call, one piece each."""

TEMPLATE_WORDS = ("system", "user", "assistant", "Tools")
"""Words that `render_chat` adds to texts."""

WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?[^\w\s]+|\s|_+")
"""A piece lies within one word, so that ` Corvin`, ` Corvin.` and ` Corvin"}}` begin with the same piece."""

MAX_CHARACTERS = 256

SPACE = "\u2581"
"""What SentencePiece writes for a space; in a text of its own it would decode to a space."""


class SentencePieceTokenizer:
    """A SentencePiece model whose control symbols are the added tokens, with a ChatML template of its own.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no SentencePiece model, or has no chat tokens or no byte pieces.
    """

    def __init__(self, model_file: str | os.PathLike[str]) -> None:
        self.name = os.fspath(model_file)
        self._model = _read_model(self.name)
        self.vocab_size = len(self._model)
        control = [i for i in range(self.vocab_size) if self._model.is_control(i)]
        self.added: Mapping[str, int] = {self._model.id_to_piece(i): i for i in control}
        missing = [token for token in (TURN_START, TURN_END) if token not in self.added]
        if not any(self._model.is_byte(i) for i in range(self.vocab_size)):
            missing.append("byte pieces (byte_fallback)")
        if missing:
            raise ValueError(
                f"{self.name}: this model lacks {', '.join(missing)}, which a chat needs; "
                "train one with agentr1_jax.text.sentencepiece.train_sentencepiece"
            )
        self._strings = {i: string for string, i in self.added.items()}
        self._space = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self.stop_id = self.added[TURN_END]
        self.stop_ids: tuple[int, ...] = (self.stop_id,)
        self.pad_id = self.added.get(PAD, self.stop_id)

    def encode_template(self, text: str) -> list[int]:
        return encode_parts(self, split_at_tokens(text, self.added))

    def encode_data(self, text: str) -> list[int]:
        # One by one: for a list the library starts threads, which takes longer than the work itself.
        first, *rest = (self._model.encode(part) for part in replace_surrogates(text).split(SPACE))
        return list(itertools.chain(first, *(self._space + part for part in rest)))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        known = [int(i) for i in ids if i < self.vocab_size]
        runs = itertools.groupby(known, self._strings.get)
        return "".join(self._model.decode(list(run)) if s is None else s * len(list(run)) for s, run in runs)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """ChatML. Of the tools only names and arguments are told, `search(query)`, behind the system message."""
        turns = [(message["role"], message["content"]) for message in messages]
        if tools:
            system = [turns.pop(0)[1]] if turns and turns[0][0] == "system" else []
            signatures = [_signature(tool["function"]) for tool in tools]
            turns.insert(0, ("system", "\n".join([*system, "Tools:", *signatures])))
        return f"{''.join(_turn(role, content) for role, content in turns)}{TURN_START}assistant\n"


def read_pieces(model_file: str | os.PathLike[str]) -> Vocabulary:
    """Return the vocabulary of a SentencePiece model, whose control symbols are the added tokens."""
    model = _read_model(os.fspath(model_file))
    ids = range(len(model))
    added = {model.id_to_piece(i): i for i in ids if model.is_control(i)}
    return Vocabulary(added, {model.id_to_piece(i): i for i in ids if not model.is_control(i)})


def _read_model(name: str) -> Any:
    if not files.is_file(name):
        raise FileNotFoundError(f"{name}: no such SentencePiece model")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=files.read_bytes(name))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{name}: not a SentencePiece model ({error})") from error


def _signature(function: Mapping[str, Any]) -> str:
    return f"{function['name']}({', '.join(function['parameters'].get('properties', {}))})"


def _turn(role: str, content: str) -> str:
    if role == "tool":
        return _turn("user", f"<tool_response>\n{content}\n</tool_response>")
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def train_sentencepiece(texts: Iterable[str], path: str | os.PathLike[str], vocab_size: int) -> None:
    """Train a BPE model of at most `vocab_size` pieces and write it to `path`; equal texts give equal bytes.

    Every sufficiently frequent word (` Corvin`, ` 1962`, `."`) becomes one piece, and no piece reaches over the edge
    of a word. Newline and the strings of `SYNTAX` are pieces from the start. At most `MAX_CHARACTERS` pieces are single
    characters; rarer ones are spelled in bytes. Strings of added tokens in the texts are left out.

    Raises:
      ValueError: `vocab_size` has no room for the pieces that must be there.
    """
    fixed = ["\n", *SYNTAX]
    apart = re.compile(match_any([*ADDED, *fixed]))
    words: collections.Counter[str] = collections.Counter()
    for text in texts:
        words.update(TEMPLATE_WORDS)
        for part in apart.split(text):
            words.update(WORD.findall(part))
    characters: collections.Counter[str] = collections.Counter()
    for word, count in words.items():
        characters.update({c: count * word.count(c) for c in set(word)})
    printable = [c for c, _ in characters.most_common() if c.isprintable() and c != SPACE]
    common = set(printable[:MAX_CHARACTERS])
    needed = 2 + len(ADDED) + 256 + len(fixed) + len(common)
    if not common:
        raise ValueError(f"{os.fspath(path)}: no texts to train a tokenizer on")
    if vocab_size <= needed:
        raise ValueError(
            f"{os.fspath(path)}: a vocab_size of {vocab_size} has no room for words; for these texts {needed} pieces "
            "are needed before the first word"
        )
    # A word with its count as one line of TSV: words never see their neighbours, and training takes milliseconds.
    lines = [f"{w}\t{n}" for w, n in sorted(words.items(), key=lambda x: (-x[1], x[0])) if common.issuperset(w)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        input_format="tsv",
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_unicode_script=False,
        split_by_number=False,
        control_symbols=list(ADDED),
        user_defined_symbols=[symbol.replace(" ", SPACE) for symbol in fixed],
        unk_id=0,
        pad_id=1,
        pad_piece=PAD,
        bos_id=-1,
        eos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    with files.atomic_write(path, "wb") as out:
        out.write(model.getvalue())

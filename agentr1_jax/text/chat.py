"""Append-only chat rendering: an opening by the tokenizer's chat template, later turns by fixed glue strings.

A template is rendered once, for the opening. Rendering the whole conversation again at every step would change what
came before (Qwen3's template drops earlier thinking), and text would be tokenised twice. So the strings between an
assistant's response and its next one are taken from the template once, and later turns are appended as ids.

Contents are data: within them, strings of added tokens stay plain text. For ordinary contents the ids are those of
`apply_chat_template` over the whole conversation, since text runs are tokenised together with their glue.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax.text.tokenizer import Tokenizer, encode_parts, one_of, split_added

CUT_MARKER = " [cut]"
DELIMITER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclasses.dataclass(frozen=True)
class Glue:
    """Template text around one later turn of the environment.

    Attributes:
      before: what stands between the assistant's end-of-turn token and the content.
      after: what stands between the content and the assistant's next response.
      delimiters: strings of `before` and `after` that are plain text to the tokenizer, to be escaped in contents.
    """

    before: str
    after: str
    delimiters: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """How conversations become ids for one tokenizer; made by `chat_format`."""

    tokenizer: Tokenizer
    glue: Mapping[str, Glue]

    def render_opening(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        """Ids of the opening messages and tool schemas, up to where the assistant speaks.

        Args:
          messages: `{"role", "content"}` each; contents are data.
          tools: JSON schemas as `tools.base.schema` gives them; their strings are data.

        Returns:
          int32 [P].
        """
        mark = _unused_character(json.dumps([list(messages), list(tools)], ensure_ascii=False))
        guarded = _map_strings([messages, tools], lambda s: _guard(s, self.tokenizer.added, mark))
        return self._encode(self.tokenizer.render_chat(*guarded), mark)

    def render_observation(
        self, text: str, role: str = "tool", response_ends_with_stop: bool = True, *, max_tokens: int | None = None
    ) -> np.ndarray:
        """Ids between an assistant's response and its next one.

        Args:
          text: content of the turn; data.
          role: `tool` or `user`.
          response_ends_with_stop: False if the response was cut; then its end-of-turn token is added here, as glue.
          max_tokens: longer contents are cut to this many tokens, the marker ` [cut]` among them.

        Returns:
          int32 [N].

        Raises:
          ValueError: the chat template knows no such turn, or `max_tokens` has no room for the marker.
        """
        if role not in self.glue:
            known = ", ".join(sorted(self.glue))
            raise ValueError(f"{self.tokenizer.name}: its chat template renders no {role!r} turn (it knows {known})")
        glue = self.glue[role]
        text = escape(text, glue.delimiters)
        if max_tokens is not None:
            text = cut(self.tokenizer, text, max_tokens)
        mark = _unused_character(text)
        ids = self._encode(glue.before + _guard(text, self.tokenizer.added, mark) + glue.after, mark)
        end_of_turn = np.asarray([] if response_ends_with_stop else [self.tokenizer.stop_id], np.int32)
        return np.concatenate([end_of_turn, ids])

    def _encode(self, text: str, mark: str) -> np.ndarray:
        parts = [part.replace(mark, "") for part in split_added(text, self.tokenizer.added, mark)]
        return np.asarray(encode_parts(self.tokenizer, parts), np.int32)


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """The chat format of a tokenizer.

    Raises:
      ValueError: its template does not end an assistant's turn with its stop token, or renders no later turns at all.
    """
    glue = {}
    problems = []
    for role in ("tool", "user"):
        try:
            glue[role] = _glue(tokenizer, role)
        except ValueError as error:
            problems.append(str(error))
    if "user" not in glue:
        raise ValueError(problems[-1])
    return ChatFormat(tokenizer, glue)


def _glue(tokenizer: Tokenizer, role: str) -> Glue:
    response, content = map(chr, PRIVATE_USE[:2])
    opening = {"role": "user", "content": "?"}
    text = tokenizer.render_chat(
        [opening, {"role": "assistant", "content": response}, {"role": role, "content": content}]
    )
    parts = re.split(f"[{response}{content}]", text)
    if len(parts) != 3:
        raise ValueError(f"{tokenizer.name}: its chat template renders no {role!r} turn after an assistant's")
    _, between, after = parts
    stop = next(string for string, i in tokenizer.added.items() if i == tokenizer.stop_id)
    if not between.startswith(stop):
        raise ValueError(
            f"{tokenizer.name}: its chat template ends an assistant's turn with {between[:16]!r}, but its end-of-turn "
            f"token is {stop!r}; set eos_token in tokenizer_config.json to the token that the template uses"
        )
    before = between.removeprefix(stop)
    delimiters = sorted(set(DELIMITER.findall(before) + DELIMITER.findall(after)) - set(tokenizer.added))
    return Glue(before, after, tuple(delimiters))


def escape(text: str, delimiters: Sequence[str]) -> str:
    r"""Data text in which plain-text delimiters are visibly broken: `</tool_response>` becomes `<\/tool_response>`."""
    return re.sub(one_of(delimiters), lambda found: f"{found[0][0]}\\{found[0][1:]}", text)


def cut(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    """The beginning of data text with ` [cut]` behind it where it has more than `max_tokens` tokens.

    Raises:
      ValueError: `max_tokens` has no room for the marker.
    """
    ids = tokenizer.encode_data(text)
    if len(ids) <= max_tokens:
        return text
    for keep in range(max_tokens - len(tokenizer.encode_data(CUT_MARKER)), -1, -1):
        # The last token may hold only the first bytes of a character.
        shorter = tokenizer.decode(ids[:keep]).rstrip("\ufffd") + CUT_MARKER
        if len(tokenizer.encode_data(shorter)) <= max_tokens:
            return shorter
    raise ValueError(f"a limit of {max_tokens} tokens has no room for the marker {CUT_MARKER!r}")


def _unused_character(text: str) -> str:
    """A private-use character that does not occur in `text`."""
    return next(c for c in map(chr, PRIVATE_USE) if c not in text)


def _guard(text: str, added: Mapping[str, int], mark: str) -> str:
    """Data text with `mark` before every string of an added token, overlapping ones included."""
    return re.sub(f"(?={one_of(added)})", mark, text)


def _map_strings(value: Any, function: Any) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, function) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(item, function) for item in value]
    return value

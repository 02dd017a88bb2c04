"""Append-only chat rendering: an opening by the tokenizer's chat template, later turns by fixed glue strings.

A template is rendered once, for the opening. Rendering the whole conversation again at every step would change what
came before (Qwen3's template drops earlier thinking), and text would be tokenised twice. So the strings between an
assistant's response and its next one are taken from the template once, and later turns are appended as ids.

Contents are data: within them, strings of added tokens stay plain text. For ordinary contents the ids are those of
`apply_chat_template` over the whole conversation, since text runs are tokenised together with their glue.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax.text.call_formats import CallFormat, hermes
from agentr1_jax.text.call_formats.base import Schemas, escape
from agentr1_jax.text.tokenizer import Tokenizer, encode_parts, match_any, split_at_tokens

TRUNCATION_MARKER = " [cut]"
MOST_CHARACTERS_PER_TOKEN = 64
"""Characters of a text that are tokenised for each token of its limit: what lies behind them cannot survive."""
SEAM_TOKENS = 4
"""Tokens over which joining two texts may change how many there are."""
DELIMITER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclasses.dataclass(frozen=True)
class Glue:
    """Template text around one later turn of the environment.

    Attributes:
      before: text between the assistant's end-of-turn token and the content.
      after: text between the content and the assistant's next response.
      between: text between two contents of one turn; None where the template renders only one.
      quoted: True if the template writes contents as JSON strings, as Llama 3's does.
    """

    before: str
    after: str
    between: str | None = None
    quoted: bool = False


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """Rendering of conversations as ids for one tokenizer; made by `chat_format`.

    Attributes:
      glue: template text by the role of the turn.
      marks: delimiters that are plain text to the tokenizer, escaped in text of the environment.
      result_marks: those of them that delimit results; only these are escaped in an opening, whose instructions may
        name the others.
      instructions: tool schemas -> text for the system message; None where the chat template describes tools.
    """

    tokenizer: Tokenizer
    glue: Mapping[str, Glue]
    marks: tuple[str, ...]
    result_marks: tuple[str, ...]
    instructions: Callable[[Schemas], str] | None

    def render_opening(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        """Return the ids of the opening messages and tool schemas, int32 [P], up to where the assistant writes.

        Args:
          messages: `{"role", "content"}` each; none gives an added token, and in all but system messages the marks of
            results are escaped.
          tools: JSON schemas as `tools.base.schema` gives them; their strings are data. Where the chat template does
            not describe them, `instructions` do, at the end of the system message.

        Raises:
          ValueError: the chat template refuses the messages, or leaves out a tool.
        """
        escaped = functools.partial(_escape_marks, self.tokenizer, self.result_marks)
        said = [m if m["role"] == "system" else _map_strings(m, escaped) for m in messages]
        offered = _map_strings(tools, escaped)
        if self.instructions and offered:
            if instructions := self.instructions(offered):
                said = _with_instructions(said, instructions)
            offered = []
        mark = _unused_character(json.dumps([said, offered], ensure_ascii=False))
        guarded = _map_strings([said, offered], lambda s: _guard(s, self.tokenizer.added, mark))
        text = self.tokenizer.render_chat(*guarded)
        said_names = text.replace(mark, "")
        for name in (tool.get("function", tool)["name"] for tool in offered):
            if name not in said_names and json.dumps(name)[1:-1] not in said_names:
                raise ValueError(
                    f"{self.tokenizer.name}: its chat template does not tell the tools (there is no {name!r} in the "
                    "prompt); set agent.call_format to react or code, which tell them in words, or put a "
                    "chat_template.jinja that renders `tools` beside the tokenizer"
                )
        return self._encode(text, mark)

    def render_observation(
        self,
        text: str | Sequence[str],
        role: str = "tool",
        response_ends_with_stop: bool = True,
        *,
        max_tokens: int | None = None,
    ) -> np.ndarray:
        """Return the ids between an assistant's response and its next one, int32 [N].

        Args:
          text: content of the turn, or several contents; data.
          role: `tool` or `user`.
          response_ends_with_stop: False for a truncated response; then its end-of-turn token is added here, as glue.
          max_tokens: each longer content is truncated to this many tokens, the marker ` [cut]` included.

        Raises:
          ValueError: the chat template knows no such turn, or `max_tokens` has no room for the marker.
        """
        if role not in self.glue:
            known = ", ".join(sorted(self.glue))
            raise ValueError(f"{self.tokenizer.name}: its chat template renders no {role!r} turn (it knows {known})")
        glue = self.glue[role]
        written = _within_quotes if glue.quoted else str
        contents = [self.data(part, max_tokens, written) for part in ([text] if isinstance(text, str) else text)]
        mark = _unused_character("".join(contents))
        guarded = [_guard(written(content), self.tokenizer.added, mark) for content in contents]
        between = written("\n") if glue.between is None else glue.between
        ids = self._encode(glue.before + between.join(guarded) + glue.after, mark)
        end_of_turn = np.asarray([] if response_ends_with_stop else [self.tokenizer.stop_id], np.int32)
        return np.concatenate([end_of_turn, ids])

    def data(self, text: str, max_tokens: int | None = None, written: Callable[[str], str] = str) -> str:
        """Return text of the environment as a later turn writes it: marks escaped, then truncated; see `truncate`."""
        if max_tokens is None:
            return _escape_marks(self.tokenizer, self.marks, text)
        bounded = text[: MOST_CHARACTERS_PER_TOKEN * max_tokens]
        escaped = _escape_marks(self.tokenizer, self.marks, bounded)
        return truncate(self.tokenizer, escaped, max_tokens, written, whole=len(bounded) == len(text))

    def _encode(self, text: str, mark: str) -> np.ndarray:
        parts = [part.replace(mark, "") for part in split_at_tokens(text, self.tokenizer.added, mark)]
        return np.asarray(encode_parts(self.tokenizer, parts), np.int32)


def chat_format(tokenizer: Tokenizer, call_format: CallFormat | None = None) -> ChatFormat:
    """Return the chat format of a tokenizer and a call format, by default the common one.

    Raises:
      ValueError: its template does not end an assistant's turn with its stop token, or renders no later turns at all.
    """
    call_format = call_format or hermes.call_format()
    glue = {}
    problems = []
    for role in ("tool", "user"):
        try:
            glue[role] = _glue(tokenizer, role)
        except ValueError as error:
            problems.append(str(error))
    if "user" not in glue:
        raise ValueError(problems[-1])
    if call_format.results:
        user, results = glue["user"], call_format.results
        glue["tool"] = Glue(user.before + results.before, results.after + user.after, results.between, user.quoted)
    strings = [s for g in glue.values() for s in (g.before, g.between or "", g.after)]
    of_results = {found for string in strings for found in DELIMITER.findall(string)}
    if call_format.results:
        parts = dataclasses.astuple(call_format.results)
        of_results |= {line.strip() for part in parts for line in part.split("\n")}
    plain = [{s for s in marks if s} - set(tokenizer.added) for marks in (of_results, call_format.marks)]
    instructions = None if call_format.tools_in_template else call_format.instructions
    return ChatFormat(tokenizer, glue, tuple(sorted(plain[0] | plain[1])), tuple(sorted(plain[0])), instructions)


def _glue(tokenizer: Tokenizer, role: str) -> Glue:
    response, content, second = map(chr, PRIVATE_USE[:3])
    opening = {"role": "user", "content": "?"}

    def render(*contents: str) -> list[str]:
        """Return the template's text around the assistant's response and these contents of one character each."""
        turns = [{"role": role, "content": said} for said in contents]
        text = tokenizer.render_chat([opening, {"role": "assistant", "content": response}, *turns])
        return re.split(f"[{response}{content}{second}]", text)

    parts = render(content)
    if len(parts) != 3:
        raise ValueError(f"{tokenizer.name}: its chat template renders no {role!r} turn after an assistant's")
    _, between, after = parts
    stop = next(string for string, i in tokenizer.added.items() if i == tokenizer.stop_id)
    if not between.startswith(stop):
        raise ValueError(
            f"{tokenizer.name}: its chat template ends an assistant's turn with {between[:16]!r}, but its end-of-turn "
            f"token is {stop!r}; set eos_token in tokenizer_config.json to the token that the template uses"
        )
    try:
        several = render(content, second)
    except ValueError:
        several = []
    together = len(several) == 4 and (several[1], several[3]) == (between, after)
    quoted = render(f'{content}"{second}')[2:3] == ['\\"']
    return Glue(between.removeprefix(stop), after, several[2] if together else None, quoted)


def _with_instructions(messages: Sequence[Mapping[str, Any]], instructions: str) -> list[Mapping[str, Any]]:
    """Return the messages with instructions at the end of the system message, which is added where it is missing."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _escape_marks(tokenizer: Tokenizer, marks: Sequence[str], text: str) -> str:
    """Return `text` escaped, also where only normalisation makes a mark of it (full-width letters, say)."""
    if not marks:
        return text
    text = escape(text, marks)
    seen = tokenizer.decode(tokenizer.encode_data(text))
    escaped = escape(seen, marks)
    return text if escaped == seen else escaped


def truncate(
    tokenizer: Tokenizer, text: str, max_tokens: int, written: Callable[[str], str] = str, whole: bool = True
) -> str:
    """Return the beginning of data text with ` [cut]` behind it where it is longer than `max_tokens` as `written`.

    A text that is not `whole` is itself the beginning of a longer one, and so is always marked.

    Raises:
      ValueError: `max_tokens` has no room for the marker.
    """
    if whole and len(tokenizer.encode_data(written(text))) <= max_tokens:
        return text
    ids, marker = tokenizer.encode_data(text), len(tokenizer.encode_data(TRUNCATION_MARKER))
    most = min(max_tokens - marker, len(ids))

    def shorten(keep: int) -> str:
        # The last token may hold only the first bytes of a character.
        return tokenizer.decode(ids[:keep]).rstrip("\ufffd") + TRUNCATION_MARKER

    def is_too_long(keep: int) -> bool:
        return len(tokenizer.encode_data(written(shorten(keep)))) > max_tokens

    if most >= SEAM_TOKENS and all(is_too_long(keep) for keep in range(most, most - SEAM_TOKENS, -1)):
        # `written` adds much. One token less can be one more as written, but not over more than a few of them.
        start = bisect.bisect_left(range(most - SEAM_TOKENS + 1), True, key=is_too_long) - 1
        most = min(start + SEAM_TOKENS, most)
    for keep in range(most, -1, -1):
        if not is_too_long(keep):
            return shorten(keep)
    raise ValueError(
        f"a limit of {max_tokens} tokens has no room for the marker {TRUNCATION_MARKER!r}, which takes {marker}"
    )


def _within_quotes(text: str) -> str:
    """Return text as it stands within the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _unused_character(text: str) -> str:
    """Return a private-use character that does not occur in `text`."""
    return next(c for c in map(chr, PRIVATE_USE) if c not in text)


def _guard(text: str, added: Mapping[str, int], mark: str) -> str:
    """Return data text with `mark` before every string of an added token, overlapping ones included."""
    return re.sub(f"(?={match_any(added)})", mark, text)


def _map_strings(value: Any, function: Any) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, function): _map_strings(item, function) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(item, function) for item in value]
    return value

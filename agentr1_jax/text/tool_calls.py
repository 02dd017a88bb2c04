"""The text format of actions: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` and `<answer>...</answer>`.

Reading never raises: whatever a policy writes is either a call or a typed error.

Environments and experts know these house tags only. A policy speaks with the tags that its tokenizer was made with
(`call_tags`); they are exchanged where text meets ids, by `to_house` and `from_house`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from agentr1_jax.text.tokenizer import Tokenizer, one_of

ErrorKind = Literal[
    "unclosed_tag", "bad_json", "not_an_object", "missing_name", "missing_arguments", "arguments_not_an_object"
]

# An opening tag without its closing one takes the rest of the text, so that nothing after it is read as a call.
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)

# A call and a content that no template writes by itself.
_NAME, _ARGUMENTS, _CONTENT = "look_up_xyz", {"word": "x"}, "\U000f0000"
_TAGGED = re.compile(r"([^\s{}]*\w[^\s{}]*)\s*(\{.*\})\s*([^\s{}]*\w[^\s{}]*)", re.DOTALL)
_ADDED_TAG = re.compile(r"<(\w*tool_?call\w*)>")


@dataclasses.dataclass(frozen=True)
class CallTags:
    """The strings around a tool call."""

    open: str
    close: str


HOUSE = CallTags("<tool_call>", "</tool_call>")


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call as the policy wrote it; `arguments` is a JSON object, not yet validated against any schema."""

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ParseError:
    """A `<tool_call>` that could not be read; `message` is what the policy is told."""

    kind: ErrorKind
    message: str


def parse_tool_calls(text: str) -> list[ToolCall | ParseError]:
    """Every `<tool_call>` of a text in order, each as a call or as a typed error. Never raises."""
    return [_parse(match[1]) if match[2] else _error("unclosed_tag") for match in _CALL.finditer(text)]


def extract_answer(text: str) -> str | None:
    """The stripped text of the last complete `<answer>...</answer>`, None if there is none."""
    answers = _ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def render_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as text, such that `parse_tool_calls` returns it unchanged."""
    body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False, allow_nan=False)
    # A closing tag inside a string would end the call; JSON reads an escaped slash as a slash.
    escaped = body.replace("</", r"<\/")
    return f"<tool_call>{escaped}</tool_call>"


def render_answer(answer: str) -> str:
    """An answer as text, set off by spaces so that its first word is tokenised as anywhere else."""
    return f"<answer> {answer} </answer>"


def call_tags(tokenizer: Tokenizer) -> CallTags:
    """The tags that a tokenizer's chat template writes around a tool call, else a pair of its added tokens.

    Raises:
      ValueError: it has neither, or the template writes calls in a way that `parse_tool_calls` does not read.
    """
    call = _call_by_template(tokenizer)
    if call is not None and (match := _TAGGED.fullmatch(call)):
        if _parse(match[2]) == ToolCall(_NAME, _ARGUMENTS):
            return CallTags(match[1], match[3])
    pairs = [(s, f"</{match[1]}>") for s in sorted(tokenizer.added) if (match := _ADDED_TAG.fullmatch(s))]
    known = [CallTags(*pair) for pair in pairs if pair[1] in tokenizer.added]
    if call is None and len(known) == 1:
        return known[0]
    what = "its chat template writes no tool calls" if call is None else f"its chat template writes calls as {call!r}"
    raise ValueError(
        f"{tokenizer.name}: {what}, and tools need calls between two tags of their own, as "
        f'{HOUSE.open}{{"name": ..., "arguments": {{...}}}}{HOUSE.close}; give it such a template (chat_template.jinja '
        "beside the tokenizer)"
    )


def to_house(text: str, tags: CallTags) -> str:
    r"""A policy's text with the house's tags for its own; house tags that it wrote are data (`<\tool_call>`)."""
    data = {tag: f"{tag[0]}\\{tag[1:]}" for tag in (HOUSE.open, HOUSE.close)}
    return _exchange(text, data | {tags.open: HOUSE.open, tags.close: HOUSE.close})


def from_house(text: str, tags: CallTags) -> str:
    """An expert's text with a policy's tags for the house's."""
    return _exchange(text, {HOUSE.open: tags.open, HOUSE.close: tags.close})


PARSE_MESSAGES: Mapping[ErrorKind, str] = {
    "unclosed_tag": "Error: the tool call is not closed.",
    "bad_json": "Error: the tool call is not valid JSON.",
    "not_an_object": "Error: the tool call is not a JSON object.",
    "missing_name": "Error: the tool call has no name.",
    "missing_arguments": "Error: the tool call has no arguments.",
    "arguments_not_an_object": "Error: the arguments are not a JSON object.",
}


def _call_by_template(tokenizer: Tokenizer) -> str | None:
    """How the chat template writes a call of an assistant's turn; None if it leaves it out or refuses it."""
    call = {"type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    user = {"role": "user", "content": "?"}
    said: Mapping[str, Any] = {"role": "assistant", "content": _CONTENT}
    called: Mapping[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        plain, text = (tokenizer.render_chat([user, turn, user]) for turn in (said, called))
    except ValueError:
        return None
    before = os.path.commonprefix([plain, text])
    after = os.path.commonprefix([plain[::-1], text[::-1]])
    return text[len(before) : len(text) - len(after)].strip() if _NAME in text else None


def _exchange(text: str, replacements: Mapping[str, str]) -> str:
    return re.sub(one_of(replacements), lambda found: replacements[found[0]], text)


def _error(kind: ErrorKind) -> ParseError:
    return ParseError(kind, PARSE_MESSAGES[kind])


def _parse(body: str) -> ToolCall | ParseError:
    try:
        record = json.loads(body)
        # NaN, infinities and lone surrogates pass json.loads, yet no strict JSON file could hold them.
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return _error("bad_json")
    if not isinstance(record, dict):
        return _error("not_an_object")
    if not isinstance(record.get("name"), str) or not record["name"]:
        return _error("missing_name")
    if "arguments" not in record:
        return _error("missing_arguments")
    if not isinstance(record["arguments"], dict):
        return _error("arguments_not_an_object")
    return ToolCall(record["name"], record["arguments"])

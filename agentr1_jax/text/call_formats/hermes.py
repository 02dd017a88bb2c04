"""Hermes, Qwen: JSON between two tags of the tokenizer, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from agentr1_jax.text.call_formats.base import (
    OF_ANY_POLICY,
    CallFormat,
    Schemas,
    common_call,
    escape,
    escape_common_tags,
)
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.text.tool_calls import CLOSE, OPEN, ToolCall, parse_tool_calls, segments

# A call and a content that no template writes by itself.
_NAME, _ARGUMENTS, _CONTENT = "look_up_xyz", {"word": "x"}, "\U000f0000"
_TAGGED = re.compile(r"([^\s{}]*\w[^\s{}]*)\s*(\{.*\})\s*([^\s{}]*\w[^\s{}]*)", re.DOTALL)
_ADDED_TAG = re.compile(r"<(\w*tool_?call\w*)>")


@dataclasses.dataclass(frozen=True)
class CallTags:
    """The strings around a tool call."""

    open: str
    close: str


COMMON = CallTags(OPEN, CLOSE)


def call_format(tags: CallTags = COMMON) -> CallFormat:
    """Return the call format with these tags; with those of the common format it changes nothing."""
    own = (tags.open, tags.close)
    call = re.compile(rf"{re.escape(tags.open)}(.*?)({re.escape(tags.close)}|\Z)", re.DOTALL)

    def parse(text: str, tools: Schemas = ()) -> str:
        if tags == COMMON:
            return text
        out, at = [], 0
        for match in call.finditer(text):
            out += [escape_common_tags(text[at : match.start()]), common_call(match[1], bool(match[2]))]
            at = match.end()
        return "".join([*out, escape_common_tags(text[at:])])

    def render(text: str) -> str:
        if tags == COMMON:
            return text
        # Inside JSON a mark can only stand in a string, where any character may be written as its number.
        spelled = f"\\u{ord(tags.close[0]):04x}{tags.close[1:]}"
        out = []
        for part in segments(text):
            if part.kind in ("text", "answer"):
                out.append(escape(part.source, own))
            else:
                closing = tags.close if part.kind == "call" else ""
                out.append(f"{tags.open}{part.text.replace(tags.close, spelled)}{closing}")
        return "".join(out)

    return CallFormat("hermes", parse, render, (*own, *OF_ANY_POLICY))


def call_tags(tokenizer: Tokenizer) -> CallTags:
    """Return the tags that a chat template writes around a tool call, else a pair of added tokens.

    Raises:
      ValueError: it has neither, or the template writes calls in a way that `parse_tool_calls` does not read.
    """
    call = call_by_template(tokenizer)
    if call is not None and (match := _TAGGED.fullmatch(call)):
        if parse_tool_calls(common_call(match[2])) == [ToolCall(_NAME, _ARGUMENTS)]:
            return CallTags(match[1], match[3])
    pairs = [(s, f"</{match[1]}>") for s in sorted(tokenizer.added) if (match := _ADDED_TAG.fullmatch(s))]
    known = [CallTags(*pair) for pair in pairs if pair[1] in tokenizer.added]
    if call is None and len(known) == 1:
        return known[0]
    what = "its chat template writes no tool calls" if call is None else f"its chat template writes calls as {call!r}"
    raise ValueError(
        f"{tokenizer.name}: {what}, and tools need calls between two tags of their own, as "
        f'{OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE}; give it such a template (chat_template.jinja '
        "beside the tokenizer), or set agent.call_format to one that needs none: llama3, code or react"
    )


def writes_bare_json(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template writes a call as a JSON object and nothing else, as that of Llama 3 does."""
    call = call_by_template(tokenizer)
    try:
        record = json.loads((call or "").removeprefix("<|python_tag|>"))
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("name") == _NAME and _ARGUMENTS in record.values()


def call_by_template(tokenizer: Tokenizer) -> str | None:
    """Return a call as the chat template writes it in an assistant's turn; None if it omits or refuses calls."""
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

"""The text format of actions: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` and `<answer>...</answer>`.

Reading never raises: whatever a policy writes is either a call or a typed error.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

ErrorKind = Literal[
    "unclosed_tag", "bad_json", "not_an_object", "missing_name", "missing_arguments", "arguments_not_an_object"
]

# An opening tag without its closing one takes the rest of the text, so that nothing after it is read as a call.
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


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


PARSE_MESSAGES: Mapping[ErrorKind, str] = {
    "unclosed_tag": "Error: the tool call is not closed.",
    "bad_json": "Error: the tool call is not valid JSON.",
    "not_an_object": "Error: the tool call is not a JSON object.",
    "missing_name": "Error: the tool call has no name.",
    "missing_arguments": "Error: the tool call has no arguments.",
    "arguments_not_an_object": "Error: the arguments are not a JSON object.",
}


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

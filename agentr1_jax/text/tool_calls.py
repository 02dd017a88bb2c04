"""The common format of actions: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, `<answer>...</answer>`.

Reading never raises: whatever a policy writes is either a call or a typed error. Environments and experts know this
format only; responses in another one (`text/call_formats`) are parsed into it, and demonstrations rendered from it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import json_repair

ErrorKind = Literal[
    "unclosed_tag", "bad_json", "not_an_object", "missing_name", "missing_arguments", "arguments_not_an_object"
]
SegmentKind = Literal["text", "call", "unclosed", "answer"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# An opening tag without its closing one takes the rest of the text, so that nothing after it is read as a call.
_CALL = rf"{OPEN}(?P<call>.*?)(?P<end>{CLOSE}|\Z)"
_ANSWER = rf"<answer>(?P<answer>(?:(?!<answer>|{OPEN}).)*?)</answer>"
_PART = re.compile(f"{_CALL}|{_ANSWER}", re.DOTALL)

# An object that begins with a name and is no value of another one.
_NAMED = re.compile(r"""(?:^|[^\s:])\s*\{\s*["']?name["']?\s*:""")

REPAIRED_CHARACTERS = 2000
REPAIRED_BRACKETS = 64
"""Limits of repair: the time of `json_repair` grows with the square of length and of depth."""

MOST_NESTED = 64
"""Deepest nesting of a call's objects and lists: showing, storing and validating a call recurses."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call as the policy wrote it; `arguments` is a JSON object, not yet validated against any schema.

    `repaired`: its JSON was repaired; a repaired call equals the same one written well.
    """

    name: str
    arguments: Mapping[str, Any]
    repaired: bool = dataclasses.field(default=False, compare=False)


@dataclasses.dataclass(frozen=True)
class ParseError:
    """A call that could not be read; `message` is the observation of the policy."""

    kind: ErrorKind
    message: str


PARSE_MESSAGES: Mapping[ErrorKind, str] = {
    "unclosed_tag": "Error: the tool call is not closed.",
    "bad_json": "Error: the tool call is not valid JSON.",
    "not_an_object": "Error: the tool call is not a JSON object.",
    "missing_name": "Error: the tool call has no name.",
    "missing_arguments": "Error: the tool call has no arguments.",
    "arguments_not_an_object": "Error: the arguments are not a JSON object.",
}


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a text in the common format.

    Attributes:
      kind: `text`, `call`, `unclosed` (a call that lacks its end) or `answer`.
      text: of a call or an answer, the text between its tags.
      source: with the tags.
    """

    kind: SegmentKind
    text: str
    source: str


def segments(text: str) -> Iterator[Segment]:
    """Yield the parts of a text; their sources, joined, are the text. Text inside a call is no answer."""
    at = 0
    for match in _PART.finditer(text):
        if match.start() > at:
            yield Segment("text", text[at : match.start()], text[at : match.start()])
        if match["answer"] is None:
            yield Segment("call" if match["end"] else "unclosed", match["call"], match[0])
        else:
            yield Segment("answer", match["answer"], match[0])
        at = match.end()
    if at < len(text):
        yield Segment("text", text[at:], text[at:])


def parse_tool_calls(text: str, lenient: bool = False) -> list[ToolCall | ParseError]:
    """Return every call of a text in order, each as a call or as a typed error. Lenient: see `repair_call`."""
    return [read_call(part, lenient) for part in segments(text) if part.kind in ("call", "unclosed")]


def read_call(part: Segment, lenient: bool = False) -> ToolCall | ParseError:
    """Return a segment of kind `call` or `unclosed` as a call or a typed error."""
    call: ToolCall | ParseError
    try:
        call = _check_call(json.loads(part.text))
    except (ValueError, RecursionError):
        call = _error("bad_json")
    if part.kind == "unclosed":
        # Only its end was forgotten; half a call, as of a truncated response, must not be guessed.
        if lenient and isinstance(call, ToolCall):
            return dataclasses.replace(call, repaired=True)
        return _error("unclosed_tag")
    if lenient and isinstance(call, ParseError):
        return repair_call(part.text) or call
    return call


def repair_call(body: str) -> ToolCall | None:
    """Return the call that `json_repair` makes of unreadable JSON; None without arguments, or where it is too long.

    None also for two calls between one pair of tags, of which it would keep one.
    """
    if len(body) > REPAIRED_CHARACTERS or len(re.findall(r"[\[{(]", body)) > REPAIRED_BRACKETS:
        return None
    if len(_NAMED.findall(body)) > 1:
        return None
    try:
        call = _check_call(json_repair.loads(body, skip_json_loads=True))
    except Exception:  # A guess at what a policy meant; whatever stops it, there is none.
        return None
    if isinstance(call, ToolCall) and call.arguments:
        return dataclasses.replace(call, repaired=True)
    return None


def extract_answer(text: str) -> str | None:
    """Return the stripped text of the last complete `<answer>...</answer>` outside of calls, None if there is none."""
    answers = [part.text for part in segments(text) if part.kind == "answer"]
    return answers[-1].strip() if answers else None


def action_key(calls: Sequence[ToolCall | ParseError], answer: str | None, otherwise: str) -> str:
    """Return the canonical form of an action, equal for responses that do the same.

    Args:
      calls: the calls of the response; all of them together are its action: names, arguments with sorted keys, and the
        kind of error of a call that cannot be read.
      answer: the answer of a response without calls.
      otherwise: key of a response that has neither.
    """
    if calls:
        done = [[c.name, dict(c.arguments)] if isinstance(c, ToolCall) else c.kind for c in calls]
        return json.dumps(done, sort_keys=True)
    return otherwise if answer is None else f"answer: {answer}"


def render_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as text that `parse_tool_calls` reads unchanged. Raises ValueError on NaN and infinities."""
    body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False, allow_nan=False)
    # A closing tag inside a string would end the call; JSON reads an escaped slash as a slash.
    escaped = body.replace("</", r"<\/")
    return f"{OPEN}{escaped}{CLOSE}"


def render_answer(answer: str) -> str:
    """Return an answer as text, set off by spaces so that its first word is tokenised as anywhere else."""
    return f"<answer> {answer} </answer>"


def _is_nested_deeper(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        outer = [item for item in level if isinstance(item, dict | list)]
        level = [inner for item in outer for inner in (item.values() if isinstance(item, dict) else item)]
    return any(isinstance(item, dict | list) for item in level)


def _error(kind: ErrorKind) -> ParseError:
    return ParseError(kind, PARSE_MESSAGES[kind])


def _check_call(record: Any) -> ToolCall | ParseError:
    """Return a decoded call. Raises ValueError or RecursionError if it is no strict JSON or nested too deep."""
    if _is_nested_deeper(record, MOST_NESTED):
        raise ValueError(f"it is nested more than {MOST_NESTED} deep")
    # NaN, infinities and lone surrogates pass json.loads.
    json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    if not isinstance(record, dict):
        return _error("not_an_object")
    if not isinstance(record.get("name"), str) or not record["name"]:
        return _error("missing_name")
    if "arguments" not in record:
        return _error("missing_arguments")
    if not isinstance(record["arguments"], dict):
        return _error("arguments_not_an_object")
    return ToolCall(record["name"], record["arguments"])

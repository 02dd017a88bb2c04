"""The CallFormat contract, and what formats share: escapes, and pieces of text in the common format."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentr1_jax.text.tokenizer import match_any
from agentr1_jax.text.tool_calls import CLOSE, OPEN, ParseError, ToolCall, parse_tool_calls

Schemas = Sequence[Mapping[str, Any]]
Parse = Callable[[str, Schemas], str]

OF_ANY_POLICY = ("<answer>", "</answer>", "<think>", "</think>")
"""Tags that policies of every format write, and data must not."""


@dataclasses.dataclass(frozen=True)
class Results:
    """Text around results within one user turn: before the first, between two, and after the last."""

    before: str
    between: str
    after: str


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """Format in which a policy writes tool calls and answers, and in which tools and results are shown to it.

    Attributes:
      name: its name in configs.
      parse: (text of a response, schemas of the available tools) -> the same in the common format. Never raises. Tags
        of the common format that are not tags of this one become data (`<\\tool_call>`).
      render: text of an expert in the common format -> the same in this format; parsing it gives the same calls and
        answer, but for marks of this format outside of calls, which become data (`<\\code>`).
      marks: delimiters of the format; escaped in results where they are plain text to the tokenizer.
      results: text around results; None where the chat template renders them, in turns of role `tool`.
      instructions: schemas -> text for the system message about tools and format.
      tools_in_template: True if the chat template describes the tools; else `instructions` do.
    """

    name: str
    parse: Parse
    render: Callable[[str], str]
    marks: tuple[str, ...]
    results: Results | None = None
    instructions: Callable[[Schemas], str] = lambda tools: ""
    tools_in_template: bool = True


def escape(text: str, delimiters: Iterable[str], *, ignore_case: bool = False) -> str:
    r"""Return data text in which delimiters are visibly broken: `</tool_response>` becomes `<\/tool_response>`."""
    case = re.IGNORECASE if ignore_case else 0
    return re.sub(f"(?={match_any(delimiters)})(.)", lambda found: f"{found[1]}\\", text, flags=re.DOTALL | case)


def escape_common_tags(text: str) -> str:
    """Return text in which the tags of the common format are data."""
    return escape(text, [OPEN])


def common_call(body: str, closed: bool = True) -> str:
    """Return a call in the common format, with any text for its body."""
    inner = body.replace(CLOSE, CLOSE.replace("/", r"\/"))
    return f"{OPEN}{inner}{CLOSE if closed else ''}"


def dump_json(record: Any) -> str:
    """Return JSON in one line, without needless escapes."""
    return json.dumps(record, ensure_ascii=False)


def strip_fence(body: str, language: str) -> str:
    """Return the content of a ``` block that is the whole body, of a language (a regular expression) or of none."""
    fenced = re.fullmatch(rf"\s*```[ \t]*(?:{language})?[ \t]*\n(.*?)\n?[ \t]*```\s*", body, re.DOTALL | re.IGNORECASE)
    return fenced[1] if fenced else body


def choose_rendering(call: ToolCall | ParseError, candidates: Sequence[str], parse: Parse) -> str:
    """Return the first candidate that parses as `call`, or as any error where `call` is one; else the last."""
    for candidate in candidates[:-1]:
        read = parse_tool_calls(parse(candidate, ()))
        if read == [call] or (len(read) == 1 and isinstance(read[0], ParseError) and isinstance(call, ParseError)):
            return candidate
    return candidates[-1]


def list_tools(tools: Schemas) -> str:
    """Return the schemas of the tools, one a line."""
    return "\n".join(dump_json(tool.get("function", tool)) for tool in tools)

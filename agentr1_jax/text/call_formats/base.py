r"""The Dialect contract, and what dialects share: escapes, and pieces of house text.

Delimiters that are meant as data get a backslash behind their first character (`<\/tool_response>`), one more where
they have some already, so that it can be undone.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentr1_jax.text.tool_calls import CLOSE, OPEN, ParseError, ToolCall, parse_tool_calls

Schemas = Sequence[Mapping[str, Any]]
Parse = Callable[[str, Schemas], str]

OF_ANY_POLICY = ("<answer>", "</answer>", "<think>", "</think>")
"""What policies of every dialect write, and data must not."""


@dataclasses.dataclass(frozen=True)
class Results:
    """How results are told within one user turn: what stands before the first, between two, and after the last."""

    before: str
    between: str
    after: str


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How a policy writes tool calls and answers, and how it is told of tools and results.

    Attributes:
      name: its name in configs.
      to_house: (what a policy said, schemas of the tools on offer) -> the same as house text. Never raises. What the
        policy wrote in the house's tags, where they are not its own, is data (`<\\tool_call>`).
      from_house: an expert's house text -> the same in the dialect; `to_house` of it has the same calls and answer.
      marks: delimiters of the dialect; escaped in results where they are plain text to the tokenizer.
      results: None where the chat template tells them, in turns of role `tool`.
      instructions: schemas -> what the system message says of tools and format.
      tools_in_template: whether the chat template tells the tools; else `instructions` are given.
    """

    name: str
    parse: Parse
    render: Callable[[str], str]
    marks: tuple[str, ...]
    results: Results | None = None
    instructions: Callable[[Schemas], str] = lambda tools: ""
    tools_in_template: bool = True


def common_call(body: str, closed: bool = True) -> str:
    """House text of one call with whatever JSON or other text for its body."""
    inner = body.replace(CLOSE, CLOSE.replace("/", r"\/"))
    return f"{OPEN}{inner}{CLOSE if closed else ''}"


def escape_common_tags(text: str) -> str:
    """Text of a policy to whom the house's tags mean nothing."""
    return text.replace(OPEN, f"{OPEN[0]}\\{OPEN[1:]}")


def dump_json(record: Any) -> str:
    """JSON text in one line, without escapes that are not needed."""
    return json.dumps(record, ensure_ascii=False)


def restore_marks(text: str, marks: Iterable[str]) -> str:
    """Undoes `marks_broken`."""
    return _with_backslashes(marks, r"\\").sub(lambda found: found[0][0] + found[0][2:], text)


def break_marks(text: str, marks: Iterable[str]) -> str:
    r"""Data text in which no mark occurs: `<code>` becomes `<\code>`, `<\code>` becomes `<\\code>`."""
    return _with_backslashes(marks, "").sub(lambda found: f"{found[0][0]}\\{found[0][1:]}", text)


def _with_backslashes(marks: Iterable[str], least: str) -> re.Pattern[str]:
    ordered = sorted(marks, key=len, reverse=True)
    choose_rendering = (rf"{re.escape(mark[0])}{least}\\*{re.escape(mark[1:])}" for mark in ordered)
    return re.compile("|".join(choose_rendering) or r"(?!)", re.IGNORECASE)


def strip_fence(body: str, language: str) -> str:
    """What a ``` block holds, where it is all of the body and of a language (a regular expression), or of none."""
    fenced = re.fullmatch(rf"\s*```[ \t]*(?:{language})?[ \t]*\n(.*?)\n?[ \t]*```\s*", body, re.DOTALL | re.IGNORECASE)
    return fenced[1] if fenced else body


def choose_rendering(call: ToolCall | ParseError, candidates: Sequence[str], parse: Parse) -> str:
    """The first candidate that reads as `call`, or as an error of whatever kind where `call` is one; else the last."""
    for candidate in candidates[:-1]:
        read = parse_tool_calls(parse(candidate, ()))
        if read == [call] or (len(read) == 1 and isinstance(read[0], ParseError) and isinstance(call, ParseError)):
            return candidate
    return candidates[-1]


def list_tools(tools: Schemas) -> str:
    """The tools' schemas, one a line."""
    return "\n".join(dump_json(tool.get("function", tool)) for tool in tools)

"""Llama 3: calls as bare JSON, `{"name": ..., "parameters": {...}}`, several on lines of their own or behind `;`, `,`.

A call begins where a line does, be it as the first of a JSON list, or behind `<|python_tag|>`, behind which everything
is meant as a call.
"""

from __future__ import annotations

import json
import re
from typing import Any

from agentr1_jax.text.call_formats.base import (
    OF_ANY_POLICY,
    CallFormat,
    Schemas,
    choose_rendering,
    common_call,
    dump_json,
    escape,
    escape_common_tags,
    list_tools,
)
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.text.tool_calls import ParseError, ToolCall, read_call, segments

TAG = "<|python_tag|>"
_KEY = r"""\s*["']?(?:name|type|function|parameters|arguments)\b"""
_START = re.compile(rf"{re.escape(TAG)}\s*|^[ \t]*\[?[ \t]*(?=\{{{_KEY})", re.MULTILINE)
_NEXT = re.compile(rf"[\s;,]*(?=\{{{_KEY})")
_OBJECT = re.compile(rf"\{{(?={_KEY})")
# Where a call that is no JSON ends at the latest.
_END = re.compile(rf"{_START.pattern}|<answer>", re.MULTILINE)
_APART = re.compile(rf"\n|<answer>|{re.escape(TAG)}")
_DECODER = json.JSONDecoder()


def call_format(tokenizer: Tokenizer) -> CallFormat:
    """Return the call format; its instructions describe the tools where the chat template does not."""
    return CallFormat(
        "llama3", parse, render, (TAG, *OF_ANY_POLICY), None, instructions, template_tells_tools(tokenizer)
    )


def parse(text: str, tools: Schemas = ()) -> str:
    """See `CallFormat.parse`."""
    out, at = [], 0
    while start := _START.search(text, at):
        out.append(escape_common_tags(text[at : start.start()]))
        begin: re.Match[str] | None = start
        while begin:
            body, at = _call(text, begin.end())
            out.append(common_call(body))
            begin = _NEXT.match(text, at)
    return "".join([*out, escape_common_tags(text[at:])])


def render(text: str) -> str:
    """See `CallFormat.render`. Text behind a broken call, which only a call or an answer would end, is left out."""
    out, broken = "", False
    for part in segments(text):
        if part.kind in ("text", "answer"):
            if part.kind == "answer" or not broken:
                out += _OBJECT.sub(r"{\\", escape(part.source, [TAG]))
                broken = False
            continue
        call = read_call(part)
        said = _broken_call(part.text)
        if isinstance(call, ToolCall):
            said = (TAG if broken else "") + dump_json({"name": call.name, "parameters": call.arguments})
        broken = not isinstance(call, ToolCall)
        out += f"{said}\n" if not out or out.endswith("\n") else f"\n{said}\n"
    return out.removesuffix("\n") if out.endswith("}\n") else out


def instructions(tools: Schemas) -> str:
    """Return the description of the tools for the system message."""
    if not tools:
        return ""
    return (
        f"You can call these functions:\n{list_tools(tools)}\n"
        'To call one, write {"name": FUNCTION, "parameters": {ARGUMENT: VALUE, ...}} on a line of its own.'
    )


def template_tells_tools(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template describes tools."""
    name = "look_up_xyz"
    function = {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}}
    try:
        return name in tokenizer.render_chat([{"role": "user", "content": "?"}], [{"function": function}])
    except ValueError:
        return False


def _broken_call(body: str) -> str:
    """Return a call that parses as an error, if possible with these words."""
    raw = body.replace('"arguments"', '"parameters"', 1)
    # What else could be read otherwise where something follows it.
    candidates = [raw, TAG + raw] if raw.startswith("{") and not _APART.search(raw) else []
    return choose_rendering(ParseError("bad_json", ""), [*candidates, TAG + "{"], parse)


def _call(text: str, at: int) -> tuple[str, int]:
    """Return the call that begins at a position as JSON of the common format, and its end."""
    try:
        record, end = _DECODER.raw_decode(text, at)
        return dump_json(_common_record(record)), end
    except (ValueError, RecursionError):
        following = _END.search(text, at + text.startswith("{", at))
        end = following.start() if following else len(text)
        raw = text[at:end]
        return raw if '"arguments"' in raw else raw.replace('"parameters"', '"arguments"', 1), end


def _common_record(record: Any) -> Any:
    if not isinstance(record, dict):
        return record
    inner = record.get("function")
    if isinstance(inner, dict):
        record = inner
    elif isinstance(inner, str):
        record = {"name": inner, **record}
    if "arguments" not in record and "parameters" in record:
        record = {**record, "arguments": record["parameters"]}
    return {key: record[key] for key in ("name", "arguments") if key in record}

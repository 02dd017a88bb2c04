"""ReTool: Python code is run, and its output comes back between `<interpreter>` and `</interpreter>`.

    <code>
    ```python
    print(6 * 7)
    ```
    </code>

is a call of the tool `python` with the argument `code`; so is a ```` ```python ```` fence alone. Other tools are called
as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import re

from agentr1_jax.text.call_formats.base import (
    OF_ANY_POLICY,
    CallFormat,
    Results,
    Schemas,
    choose_rendering,
    common_call,
    dump_json,
    escape,
    list_tools,
    strip_fence,
)
from agentr1_jax.text.tool_calls import CLOSE, OPEN, ToolCall, read_call, segments

TOOL, ARGUMENT = "python", "code"
_PYTHON = r"py(?:thon)?3?"
_OWN = ("<code>", "</code>", "```py", "<interpreter>")
_PART = re.compile(
    rf"{OPEN}(?P<json>.*?)(?P<json_end>{CLOSE}|\Z)"
    r"|(?i:<code>(?P<code>.*?)(?P<code_end></code>|\Z))"
    rf"|^```(?i:{_PYTHON})[ \t]*\n(?P<fence>.*?)(?P<fence_end>^[ \t]*```|\Z)"
    r"|(?P<made_up>(?i:<interpreter>))",
    re.DOTALL | re.MULTILINE,
)


def call_format() -> CallFormat:
    """Return the call format."""
    marks = (*_OWN, "</interpreter>", "```", OPEN, CLOSE, *OF_ANY_POLICY)
    results = Results("<interpreter>\n", "\n</interpreter>\n<interpreter>\n", "\n</interpreter>")
    return CallFormat("code", parse, render, marks, results, instructions, tools_in_template=False)


def parse(text: str, tools: Schemas = ()) -> str:
    """See `CallFormat.parse`. Output that the policy invented, and all behind it, is dropped."""
    out, at = [], 0
    for match in _PART.finditer(text):
        out.append(text[at : match.start()])
        at = match.end()
        if match["made_up"]:
            return "".join(out)
        if match["json"] is not None:
            out.append(match[0])
            continue
        body = match["fence"].removesuffix("\n") if match["code"] is None else match["code"]
        closed = bool(match["code_end"] or match["fence_end"])
        out.append(common_call(dump_json({"name": TOOL, "arguments": {ARGUMENT: strip_fence(body, _PYTHON)}}), closed))
    return "".join([*out, text[at:]])


def render(text: str) -> str:
    """See `CallFormat.render`."""
    out = []
    for part in segments(text):
        if part.kind in ("text", "answer"):
            out.append(escape(part.source, _OWN, ignore_case=True))
            continue
        call = read_call(part)
        candidates = [part.source]
        if isinstance(call, ToolCall) and call.name == TOOL and call.arguments.keys() == {ARGUMENT}:
            candidates.insert(0, f"<code>\n```python\n{call.arguments[ARGUMENT]}\n```\n</code>")
        out.append(choose_rendering(call, candidates, parse))
    return "".join(out)


def instructions(tools: Schemas) -> str:
    """Return the description of the tools for the system message."""
    names = [tool["function"]["name"] for tool in tools]
    others = [tool for tool in tools if tool["function"]["name"] != TOOL]
    said = []
    if TOOL in names:
        said.append(
            "You can run Python: write the program between <code> and </code>, in a ```python block. What it prints "
            "comes back between <interpreter> and </interpreter>."
        )
    if others:
        said.append(
            f"You can call these functions:\n{list_tools(others)}\n"
            f'To call one, write {OPEN}{{"name": FUNCTION, "arguments": {{ARGUMENT: VALUE, ...}}}}{CLOSE}. Its result '
            "comes back between <interpreter> and </interpreter>."
        )
    return "\n".join([*said, "Give the final answer between <answer> and </answer>."]) if said else ""

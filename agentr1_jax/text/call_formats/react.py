"""ReAct: fields on lines of their own.

    Thought: I look for the film.
    Action: search
    Action Input: {"query": "Kabalci"}

`Action: search[Kabalci]` will do as well, `Action: Finish[Ostra]` and `Final Answer: Ostra` end the episode. Results
come back as `Observation: ...`; an invented one is dropped with all behind it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping

from agentr1_jax.text.call_formats.base import (
    OF_ANY_POLICY,
    CallFormat,
    Results,
    Schemas,
    choose_rendering,
    common_call,
    dump_json,
    escape_common_tags,
    list_tools,
    strip_fence,
)
from agentr1_jax.text.tool_calls import ToolCall, extract_answer, read_call, render_answer, segments

_FIELD_LABEL = r"^[ \t]*(?i:thought|action(?:[ \t]+input)?|final[ \t]+answer)(?:[ \t]*\d+)?[ \t]*"
_OBSERVED_LABEL = r"(?:^[ \t]*(?i:observation)|\bObservation)(?:[ \t]*\d+)?[ \t]*"
_FIELD = re.compile(f"{_FIELD_LABEL}:", re.MULTILINE)
_OBSERVED = re.compile(f"{_OBSERVED_LABEL}:", re.MULTILINE)
_LABEL = re.compile(rf"({_FIELD_LABEL}|{_OBSERVED_LABEL}):", re.MULTILINE)
_BRACKETS = re.compile(r"([\w.-]+)[ \t]*\[(.*?)\][ \t]*(?:\n.*)?", re.DOTALL)
_WHOLE_CALL = "Action Input:"


def call_format() -> CallFormat:
    """Return the call format."""
    marks = ("Thought:", "Action:", "Action Input:", "Observation:", "Final Answer:", *OF_ANY_POLICY)
    results = Results("Observation: ", "\nObservation: ", "")
    return CallFormat("react", parse, render, marks, results, instructions, tools_in_template=False)


def parse(text: str, tools: Schemas = ()) -> str:
    """See `CallFormat.parse`. The text of a tool's only argument need not be JSON."""
    made_up = _OBSERVED.search(text)
    said = text[: made_up.start()] if made_up else text
    fields = _fields(said)
    out = []
    name: str | None = None
    for (label, content), (following, _) in itertools.pairwise([*fields, ("", "")]):
        if label == "action" and following == "action input":
            name = content.strip()
        elif label == "action input":
            out.append(common_call(content.strip()) if name is None else _action(name, content, tools))
            name = None
        elif label == "action":
            match = _BRACKETS.fullmatch(content.strip())
            out.append(
                _action(match[1], match[2], tools) if match else common_call(dump_json({"name": content.strip()}))
            )
        elif label == "final answer":
            out.append(_answer(content))
        else:
            out.append(escape_common_tags(content))
    return "\n".join(out)


def render(text: str) -> str:
    """See `CallFormat.render`."""
    out = []
    for part in segments(text):
        if part.kind == "text":
            out += [f"Thought: {_escape_labels(part.text.strip())}"] if part.text.strip() else []
        elif part.kind == "answer":
            out.append(f"Final Answer: {_escape_labels(part.text.strip())}")
        else:
            call = read_call(part)
            # Within a string of JSON a colon may be written as its number.
            body = _LABEL.sub(r"\1\\u003a", part.text)
            candidates = [f"{_WHOLE_CALL} {body}", f"{_WHOLE_CALL} {{"]
            if isinstance(call, ToolCall):
                arguments = _LABEL.sub(r"\1\\u003a", dump_json(call.arguments))
                candidates = [f"Action: {call.name}\nAction Input: {arguments}", candidates[0]]
            out.append(choose_rendering(call, candidates, parse))
    return "\n".join(out)


def instructions(tools: Schemas) -> str:
    """Return the description of tools and format for the system message."""
    if not tools:
        return ""
    return (
        f"You can use these tools:\n{list_tools(tools)}\n"
        "Write:\n"
        "Thought: what to do next\n"
        "Action: the name of a tool\n"
        "Action Input: its arguments, as a JSON object\n"
        "The result comes back behind `Observation:`. When you know the answer, write:\n"
        "Thought: why it is the answer\n"
        "Final Answer: the answer"
    )


def _fields(text: str) -> list[tuple[str, str]]:
    """Return label and content of each field; text before the first has the label ""."""
    labels = list(_FIELD.finditer(text))
    ends = [*(match.start() for match in labels), len(text)]
    fields = [("", text[: ends[0]])] if ends[0] else []
    for match, end in zip(labels, ends[1:], strict=True):
        label = " ".join(re.findall("[a-z]+", match[0].lower()))
        content = text[match.end() : end]
        fields.append((label, match[0] + content if label == "thought" else content))
    return fields


def _action(name: str, given: str, tools: Schemas) -> str:
    """Return an action with its input in the common format."""
    if name.lower() == "finish":
        return _answer(given)
    given = strip_fence(given, "json").strip()
    try:
        value = json.loads(given)
        dump_json(value)
    except (ValueError, RecursionError):
        if given.startswith("{"):
            return common_call(f'{{"name": {dump_json(name)}, "arguments": {given}}}')
        value = given
    if not isinstance(value, dict):
        argument, is_text = _only_argument(name, tools)
        value = {argument: given if is_text and not isinstance(value, str) else value}
    return common_call(dump_json({"name": name, "arguments": value}))


def _only_argument(name: str, tools: Schemas) -> tuple[str, bool]:
    """Return the argument that an input without JSON stands for, and whether it is a text."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    schema = schemas.get(name, {})
    properties, required = schema.get("properties", {}), schema.get("required", [])
    names = list(required if len(required) == 1 else properties)
    if len(names) != 1:
        return "input", True
    given = properties.get(names[0])
    return names[0], "string" in (given.get("type", "string") if isinstance(given, Mapping) else "string")


def _answer(content: str) -> str:
    """Return an answer in the common format; of an answer between its tags already, their content."""
    text = escape_common_tags(content)
    inside = extract_answer(text)
    return render_answer(re.sub("<(?=/?answer>)", r"<\\", text.strip()) if inside is None else inside)


def _escape_labels(text: str) -> str:
    return _LABEL.sub(r"\1\\:", text)

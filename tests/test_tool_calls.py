"""Reading and writing of tool calls and answers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr1_jax.text.tool_calls import (
    ParseError,
    ToolCall,
    extract_answer,
    parse_tool_calls,
    render_answer,
    render_call,
)

# Fragments that make broken calls likely, among arbitrary text.
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<answer>",
    "</answer>",
    '{"name": "a", "arguments": {}}',
    "{",
    "}",
    "[",
    '"',
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=12).map("".join)
STRINGS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(FRAGMENTS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)


@given(TEXTS)
def test_no_text_raises_and_every_call_is_strict_json(text):
    for call in parse_tool_calls(text):
        if isinstance(call, ToolCall):
            json.dumps(dict(call.arguments), allow_nan=False, ensure_ascii=False).encode()
        else:
            assert call.message.startswith("Error: ")
    answer = extract_answer(text)
    assert answer is None or (answer == answer.strip() and "</answer>" not in answer)


@given(STRINGS.filter(bool), st.dictionaries(STRINGS, JSON, max_size=3), TEXTS.filter(lambda t: "<tool_call>" not in t))
def test_a_rendered_call_is_read_back(name, arguments, before):
    rendered = render_call(name, arguments)
    assert parse_tool_calls(before + rendered + rendered) == [ToolCall(name, arguments)] * 2


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('{"name": "search"', "bad_json"),
        ('{"name": "search", "arguments": {"query": "x"}', "bad_json"),
        ('{"name": "search", "arguments": {"x": NaN}}', "bad_json"),
        ('{"name": "search", "arguments": {"x": 1e999}}', "bad_json"),
        ('{"name": "search", "arguments": {"x": "\\ud800"}}', "bad_json"),
        ("[" * 100_000, "bad_json"),
        ("9" * 5000, "bad_json"),
        ("[1]", "not_an_object"),
        ('{"arguments": {}}', "missing_name"),
        ('{"name": 3, "arguments": {}}', "missing_name"),
        ('{"name": "", "arguments": {}}', "missing_name"),
        ('{"name": "search"}', "missing_arguments"),
        ('{"name": "search", "arguments": ["x"]}', "arguments_not_an_object"),
    ],
)
def test_errors_are_typed(body, kind):
    (error,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
    assert isinstance(error, ParseError) and error.kind == kind


def test_an_unclosed_call_takes_the_rest_and_keeps_what_came_before():
    calls = parse_tool_calls(render_call("a", {}) + "<tool_call>" + '{"name": "b", "arguments": {}}')
    assert calls[0] == ToolCall("a", {})
    assert isinstance(calls[1], ParseError) and calls[1].kind == "unclosed_tag" and len(calls) == 2


def test_white_space_around_a_call_is_no_error():
    text = '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>'
    assert parse_tool_calls(text) == [ToolCall("a", {"x": 1})]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("nothing", None),
        ("<answer> open", None),
        ("closed </answer>", None),
        ("</answer><answer>", None),
        (render_answer("Ada Corvin"), "Ada Corvin"),
        ("<answer></answer>", ""),
        ("<answer>a</answer> so <answer>\nb\nc </answer>", "b\nc"),
        ("<answer>a <answer> b </answer>", "b"),
        ("<answer>a</answer> <answer> open", "a"),
        ("<answer>a</answer> </answer>", "a"),
    ],
)
def test_the_last_complete_answer_counts(text, answer):
    assert extract_answer(text) == answer

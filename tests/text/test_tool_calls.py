"""Reading and writing of tool calls and answers."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr1_jax.envs.base import Action
from agentr1_jax.report.inspector import write_report
from agentr1_jax.tasks import qa
from agentr1_jax.text.tool_calls import (
    MOST_NESTED,
    ParseError,
    ToolCall,
    extract_answer,
    parse_tool_calls,
    render_answer,
    render_call,
    repair_call,
    segments,
)
from agentr1_jax.tools.search import BM25, Passage, SearchTool
from agentr1_jax.trajectory import Outcome, Step, Trajectory
from agentr1_jax.trajectory_io import read_jsonl, write_jsonl

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


@given(TEXTS)
def test_segments_are_the_whole_text(text):
    parts = list(segments(text))
    assert "".join(part.source for part in parts) == text
    assert all(part.source for part in parts) and all(a.kind != "text" or b.kind != "text" for a, b in pairwise(parts))


@given(STRINGS.filter(bool), st.dictionaries(STRINGS, JSON, max_size=3), TEXTS.filter(lambda t: "<tool_call>" not in t))
def test_a_rendered_call_is_read_back(name, arguments, before):
    rendered = render_call(name, arguments)
    assert parse_tool_calls(before + rendered + rendered) == [ToolCall(name, arguments)] * 2


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('{"name": "search", "arguments": {"query": "x"}', "bad_json"),
        ('{"name": "search", "arguments": {"x": NaN}}', "bad_json"),
        ('{"name": "search", "arguments": {"x": "\\ud800"}}', "bad_json"),
        ("[" * 100_000, "bad_json"),
        ("9" * 5000, "bad_json"),
        ("[1]", "not_an_object"),
        ('{"arguments": {}}', "missing_name"),
        ('{"name": "", "arguments": {}}', "missing_name"),
        ('{"name": "search"}', "missing_arguments"),
        ('{"name": "search", "arguments": ["x"]}', "arguments_not_an_object"),
    ],
)
def test_errors_are_typed(body, kind):
    (error,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
    assert isinstance(error, ParseError) and error.kind == kind


def deep_call(levels):
    """A call whose objects and lists stand in each other so many levels deep."""
    inner = "[" * (levels - 2) + "]" * (levels - 2)
    return f'<tool_call>{{"name": "search", "arguments": {{"query": {inner}}}}}</tool_call>'


@pytest.mark.parametrize("levels", [3, MOST_NESTED, MOST_NESTED + 1, 975, 100_000])
def test_calls_are_read_up_to_a_depth(levels):
    (call,) = parse_tool_calls(deep_call(levels))
    if levels <= MOST_NESTED:
        assert isinstance(call, ToolCall)
    else:
        assert isinstance(call, ParseError) and call.kind == "bad_json"
    assert all(isinstance(c, ToolCall) == (levels <= MOST_NESTED) for c in parse_tool_calls(deep_call(levels), True))


@pytest.mark.parametrize("levels", [MOST_NESTED, 975])
def test_what_a_deep_call_leads_to_is_shown_and_stored(levels, tmp_path):
    env = qa.search_env([SearchTool(BM25([Passage("p", "Ostra", "a city")]), 1)], {"format": 0.1}, "Search.")

    async def step():
        await env.reset({"id": "r", "question": "?", "answers": ["x"]}, 0)
        return await env.step(Action(np.zeros(0, np.int32), deep_call(levels)))

    done = asyncio.run(step())
    ids = np.arange(3, dtype=np.int32)
    made = Step(
        ids, ids, np.zeros(3, np.float32), done.reward, observation=done.observation.text, tool_calls=done.tool_calls
    )
    trajectory = Trajectory("u", 0, 0, "t", 0, [made], Outcome.MAX_STEPS)
    write_report(tmp_path / "page.html", [trajectory], decode=str, title="t")
    write_jsonl(tmp_path / "one.jsonl.gz", [trajectory])
    (again,) = read_jsonl(tmp_path / "one.jsonl.gz")
    assert again.steps[0].tool_calls == list(done.tool_calls)
    assert done.tool_calls[0]["error"] == ("bad_arguments" if levels <= MOST_NESTED else "bad_json")


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
        ("</answer><answer>", None),
        (render_answer("Ada Corvin"), "Ada Corvin"),
        ("<answer></answer>", ""),
        ("<answer>a</answer> so <answer>\nb\nc </answer>", "b\nc"),
        ("<answer>a <answer> b </answer>", "b"),
        ("<answer>a</answer> <answer> open", "a"),
        ("<answer>a</answer><tool_call><answer>b</answer></tool_call>", "a"),
        ("<answer>a<tool_call></tool_call>b</answer>", None),
        ("<tool_call><answer>a</answer>", None),
    ],
)
def test_the_last_complete_answer_counts(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ('{"name": "a", "arguments": {"x": 1}', ToolCall("a", {"x": 1})),
        ("{'name': 'a', 'arguments': {'x': 1}}", ToolCall("a", {"x": 1})),
        ('{"name": "a", "arguments": {"x": 1,},}', ToolCall("a", {"x": 1})),
        ('{name: "a", arguments: {x: "b"}}', ToolCall("a", {"x": "b"})),
        ('{"name": "a", "arguments": {"x": {"name": "c"}}', ToolCall("a", {"x": {"name": "c"}})),
        ('{"name": "a", "arguments": {"x": "b\nc"}}', ToolCall("a", {"x": "b\nc"})),
    ],
)
def test_broken_json_is_mended_only_where_that_is_allowed(body, call):
    text = f"<tool_call>{body}</tool_call>"
    (strict,), (lenient,) = parse_tool_calls(text), parse_tool_calls(text, lenient=True)
    assert isinstance(strict, ParseError) and strict.kind == "bad_json"
    assert lenient == call and lenient.repaired


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("search for it", "bad_json"),
        ('{"name": "a", "arguments": ', "bad_json"),
        ('{"name": "", "arguments": {"x": 1}', "bad_json"),
        ('{"arguments": {"x": 1}', "bad_json"),
        ('{"name": "a", "arguments": {"x": 1}} {"name": "b", "arguments": {"x": 1}}', "bad_json"),
        ('[{"name": "a", "arguments": {"x": 1}, {"name": "b", "arguments": {"x": 1}}]', "bad_json"),
        ('{"name": "a", "arguments": "x"}', "arguments_not_an_object"),
        ("[1]", "not_an_object"),
        ('{"name": "a", "arguments": {"x": "' + "b" * 2000, "bad_json"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 70, "bad_json"),
    ],
)
def test_what_cannot_be_mended_keeps_its_error(body, kind):
    (error,) = parse_tool_calls(f"<tool_call>{body}</tool_call>", lenient=True)
    assert isinstance(error, ParseError) and error.kind == kind


def test_a_forgotten_closing_tag_is_mended_and_half_a_call_is_not():
    whole = '{"name": "a", "arguments": {"x": 1}}'
    (call,) = parse_tool_calls(f"<tool_call>{whole}", lenient=True)
    assert call == ToolCall("a", {"x": 1}) and call.repaired
    (error,) = parse_tool_calls(f"<tool_call>{whole[:-1]}", lenient=True)
    assert error == ParseError("unclosed_tag", "Error: the tool call is not closed.")


@given(STRINGS.filter(bool), st.dictionaries(STRINGS, JSON, max_size=3))
def test_what_is_well_written_is_not_called_mended(name, arguments):
    (call,) = parse_tool_calls(render_call(name, arguments), lenient=True)
    assert call == ToolCall(name, arguments) and not call.repaired


@given(st.lists(st.sampled_from([*FRAGMENTS, "'", ",", ":", "\\", "//", "\n"]) | st.text(max_size=4), max_size=200))
def test_mending_gives_a_call_with_arguments_or_nothing(fragments):
    call = repair_call("".join(fragments))
    assert call is None or (call.repaired and call.name and call.arguments)

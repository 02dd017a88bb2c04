"""Call formats: parsing and rendering invert each other; no text whatever breaks the parsing."""

from __future__ import annotations

import asyncio
import collections
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from letters import Letters
from test_llama_tokenizer import BARE, write

from agentr1_jax.envs.base import Action, Transition
from agentr1_jax.tasks import qa
from agentr1_jax.text.call_formats import CALL_FORMATS, code, hermes, llama3, make_call_format, react
from agentr1_jax.text.tokenizer import load_tokenizer
from agentr1_jax.text.tool_calls import (
    OPEN,
    PARSE_MESSAGES,
    ParseError,
    ToolCall,
    extract_answer,
    parse_tool_calls,
    render_answer,
    render_call,
)
from agentr1_jax.tools import base
from agentr1_jax.tools.base import ToolResult


class Search:
    """A tool with one argument."""

    name, description, blocking = "search", "Searches passages.", False
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}

    def execute(self, arguments):
        return ToolResult(f"found {arguments['query']}")


class Count:
    """A tool whose only argument is a number."""

    name, description, blocking = "count", "", False
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}

    def execute(self, arguments):
        return ToolResult(str(arguments))


TOOLS = (Search(), Count())
SCHEMAS = [base.schema(tool) for tool in TOOLS]
SPOKEN = {
    "hermes": hermes.call_format(),
    "brackets": hermes.call_format(hermes.CallTags("[CALL]", "[/CALL]")),
    "llama3": llama3.call_format(Letters()),
    "code": code.call_format(),
    "react": react.call_format(),
}


def read(name, text):
    """Calls and answer of what a policy said."""
    common = SPOKEN[name].parse(text, SCHEMAS)
    return parse_tool_calls(common), extract_answer(common)


def search(query):
    return ToolCall("search", {"query": query})


def python(text):
    return ToolCall("python", {"code": text})


def error(kind):
    return ParseError(kind, PARSE_MESSAGES[kind])


JSON_X, JSON_Y = '{"name": "search", "parameters": {"query": "x"}}', '{"name": "search", "parameters": {"query": "y"}}'


@pytest.mark.parametrize(
    ("text", "calls", "answer"),
    [
        (JSON_X, [search("x")], None),
        (f"<|python_tag|>{JSON_X}; {JSON_Y}", [search("x"), search("y")], None),
        (f"I look. {JSON_X}", [], None),
        ('{"type": "function", "name": "search", "parameters": {"query": "x"}}', [search("x")], None),
        ('{"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}', [search("x")], None),
        ('{\n  "name": "search",\n  "parameters": {"query": "x"}\n}', [search("x")], None),
        ('{"type": "function", "function": "search", "parameters": {"query": "x"}}', [search("x")], None),
        ('{"parameters": {"query": "x"}}', [error("missing_name")], None),
        ('{"name": "search"}', [error("missing_arguments")], None),
        ('{"name": "search", "parameters": "x"}', [error("arguments_not_an_object")], None),
        ('{"name": "search", "parameters": {"query": NaN}}', [error("bad_json")], None),
        (f'{{"name": "search", "parameters": {{"query": x}}\n{JSON_Y}', [error("bad_json"), search("y")], None),
        ('{"name": "search"<answer> a </answer>', [error("bad_json")], "a"),
        ("<|python_tag|>print(1)", [error("bad_json")], None),
        (f"I look.\n[{JSON_X}, {JSON_Y}]", [search("x"), search("y")], None),
        (f"[\n  {JSON_X},\n  {JSON_Y}\n]\n<answer> a </answer>", [search("x"), search("y")], "a"),
        ('{"year": 1962}', [], None),
        (f"{OPEN}{JSON_X}</tool_call><answer> a </answer>", [], "a"),
        ("[" * 100_000 + "<answer> a </answer>", [], "a"),
        ('{"name": ' + "[" * 100_000, [error("bad_json")], None),
    ],
)
def test_llama3(text, calls, answer):
    assert read("llama3", text) == (calls, answer)


@pytest.mark.parametrize(
    ("text", "calls", "answer"),
    [
        ("<code>\n```python\nprint(1)\n```\n</code>", [python("print(1)")], None),
        ("<code>print(1)</code>", [python("print(1)")], None),
        (
            "So:\n```python\nprint(1)\nprint(2)\n```\nthen\n```py\n3\n```",
            [python("print(1)\nprint(2)"), python("3")],
            None,
        ),
        ("inline ```python\nprint(1)\n```", [], None),
        ("<code>print('<answer>a</answer>')</code>", [python("print('<answer>a</answer>')")], None),
        ("<code>'</tool_call>'</code><answer> a </answer>", [python("'</tool_call>'")], "a"),
        ("<code>print(1)", [error("unclosed_tag")], None),
        (f"{render_call('search', {'query': '<code>'})}<code>1</code>", [search("<code>"), python("1")], None),
        ("<code>1</code>\n<interpreter>\n1\n</interpreter>\n<answer> a </answer>", [python("1")], None),
        ("<interpreter>1</interpreter><code>2</code>", [], None),
    ],
)
def test_code(text, calls, answer):
    assert read("code", text) == (calls, answer)


@pytest.mark.parametrize(
    ("text", "calls", "answer"),
    [
        ('Thought: a\nAction: search\nAction Input: {"query": "x"}', [search("x")], None),
        ("Thought 1: a\nAction 1: search[x [y]]\n", [search("x [y]")], None),
        ("Action: search\nAction Input: x y", [search("x y")], None),
        ('Action: search\nAction Input: ```json\n{"query": "x"}\n```', [search("x")], None),
        ('Action: search\nAction Input:\n```\n{\n"query": "x"\n}```\nObservation: y', [search("x")], None),
        ("Action: search\nAction Input: 1962", [search("1962")], None),
        ("Action: count\nAction Input: 1962", [ToolCall("count", {"n": 1962})], None),
        ("Action: find\nAction Input: x", [ToolCall("find", {"input": "x"})], None),
        ("action: search\naction input: x\nACTION: search[y]", [search("x"), search("y")], None),
        ("Action: search[x]\nObservation: y\nFinal Answer: y", [search("x")], None),
        ("Action: search[x] Observation 1: y]\nAction: search[z]", [search("x")], None),
        ("Action: search", [error("missing_arguments")], None),
        ("Action:\nAction Input: x", [error("missing_name")], None),
        ('Action: search\nAction Input: {"query": "x"', [error("bad_json")], None),
        ("Action Input: [1]", [error("not_an_object")], None),
        ("Action: Finish[Ostra]", [], "Ostra"),
        ("Thought: b\nFinal Answer: Corvin\nHale", [], "Corvin\nHale"),
        ("Final Answer: a</answer>b", [], r"a<\/answer>b"),
        ("Final Answer: <answer> Paris </answer>", [], "Paris"),
        ("Final Answer: It is <answer>Paris</answer>.", [], "Paris"),
        ("Final Answer: <answer> Paris", [], r"<\answer> Paris"),
        (f"Thought: {render_call('search', {})}", [], None),
        ("My action: search[x]", [], None),
        ("so <answer> a </answer>", [], "a"),
    ],
)
def test_react(text, calls, answer):
    assert read("react", text) == (calls, answer)


def test_tags_of_its_own():
    call = '{"name": "search", "arguments": {"query": "</tool_call><tool_call>"}}'
    assert read("brackets", f"[CALL]{call}[/CALL]") == ([search("</tool_call><tool_call>")], None)
    assert read("brackets", f"<tool_call>{call}</tool_call>") == ([], None)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[CALL]", "[/CALL]", r"[\CALL]", "<answer>", "</answer>", "<|python_tag|>"),
    *('{"name": "a"', '{"name": "a", "parameters": {"x": 1}}', '{"parameters"', "; ", "\n", "}", '"', "\\", "[", "]"),
    *("<code>", "</code>", "```python\n", "```", "<interpreter>", r"<\code>", "print(1)"),
    *(
        "Thought:",
        "Action: a",
        "Action Input: ",
        "\nObservation:",
        "Observation 2:",
        "Final Answer:",
        "Action: Finish[",
    ),
]
STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(FRAGMENTS)
MIXED = st.lists(STRINGS, max_size=4).map("".join)
ARGUMENTS = st.dictionaries(MIXED, MIXED | st.integers() | st.none() | st.lists(MIXED, max_size=2), max_size=2)
NAMES = st.sampled_from(["search", "python", "finish", "Finish[x]", "a b", "Observation: x"]) | MIXED.filter(bool)
CALLS = st.builds(render_call, NAMES, ARGUMENTS) | st.builds(lambda text: render_call("python", {"code": text}), MIXED)
PROSE = MIXED.filter(lambda text: OPEN not in text and "answer>" not in text)
BROKEN = MIXED.filter(lambda text: "tool_call>" not in text).map(lambda text: f"{OPEN}{text}</tool_call>") | CALLS.map(
    lambda call: call.replace("}}</tool_call>", "}</tool_call>")
)


@pytest.mark.parametrize("name", SPOKEN)
@settings(max_examples=100)
@given(parts=st.lists(PROSE | CALLS, max_size=4), answer=st.none() | PROSE)
@example(parts=[render_call("python", {"code": "print('```')"}), render_call("a", {"": "[/CALL]"})], answer="Action: x")
def test_an_expert_is_understood_whatever_it_says(name, parts, answer):
    text = "".join([*parts, "" if answer is None else render_answer(answer)])
    spoken = SPOKEN[name].render(text)
    common = SPOKEN[name].parse(spoken, ())
    assert parse_tool_calls(common) == parse_tool_calls(text)
    said, read = (answer and answer.replace("\\", "") for answer in (extract_answer(text), extract_answer(common)))
    assert read == said  # But for marks, which are escaped.


@pytest.mark.parametrize("name", SPOKEN)
@settings(max_examples=60)
@given(parts=st.lists(CALLS | BROKEN, min_size=1, max_size=3))
def test_broken_calls_of_an_expert_stay_broken(name, parts):
    read = [
        [call if isinstance(call, ToolCall) else None for call in parse_tool_calls(text)]
        for text in ("".join(parts), SPOKEN[name].parse(SPOKEN[name].render("".join(parts)), ()))
    ]
    assert read[0] == read[1]


@pytest.mark.parametrize("name", SPOKEN)
def test_a_flawed_demonstration_says_what_is_wrong(name):
    flawed = render_call("search", {"query": "x"}).replace("}</tool_call>", "</tool_call>")
    spoken = SPOKEN[name].render(flawed)
    assert '{"query": "x"' in spoken and read(name, spoken) == ([error("bad_json")], None)


def test_how_demonstrations_look():
    text = f"I look. {render_call('search', {'query': 'x'})}"
    assert SPOKEN["llama3"].render(text) == f"I look. \n{JSON_X}"
    assert SPOKEN["react"].render(text) == 'Thought: I look.\nAction: search\nAction Input: {"query": "x"}'
    assert SPOKEN["react"].render(f"So.{render_answer('a')}") == "Thought: So.\nFinal Answer: a"
    assert SPOKEN["code"].render(text) == text
    run = render_call("python", {"code": "print(1)"})
    assert SPOKEN["code"].render(run) == "<code>\n```python\nprint(1)\n```\n</code>"


SEEDS = [
    (name, SPOKEN[name].render(text))
    for name in SPOKEN
    for text in (
        "I look. " + render_call("search", {"query": "the film"}) + render_call("count", {"n": 3}),
        "Now. " + render_call("python", {"code": "print(6 * 7)\nprint('x')"}),
        "So it is. " + render_answer("Ada Corvin"),
    )
]
EDITS = st.lists(
    st.tuples(
        st.integers(0, 200),
        st.integers(0, 12),
        st.sampled_from(["", "", *FRAGMENTS, "'", ",", "\x00", "é", "\ud800"]) | st.text(max_size=2),
    ),
    max_size=5,
)


def mutated(text, edits):
    """A text in which some places are cut out and others written in."""
    for place, length, given_text in edits:
        at = place % (len(text) + 1)
        text = text[:at] + given_text + text[at + length :]
    return text


def check_mutations(max_examples):
    """Every mutated call of every call format gives typed results, strict and lenient, and a Transition."""
    env = qa.search_env(TOOLS, {"format": 0.1}, "Search.")
    row = {"id": "r", "question": "Who?", "answers": ["Ada"]}
    seen = collections.Counter()

    async def step(text, lenient):
        await env.reset(row, 0)
        return await env.step(Action(np.zeros(0, np.int32), text, lenient=lenient))

    with asyncio.Runner() as runner:

        @settings(max_examples=max_examples, database=None, derandomize=True)
        @given(st.sampled_from(SEEDS), EDITS)
        def check(seed, edits):
            name, text = seed[0], mutated(seed[1], edits)
            for lenient in (False, True):
                common = SPOKEN[name].parse(text, SCHEMAS)
                transition = runner.run(step(common, lenient))
                assert isinstance(transition, Transition)
                calls = parse_tool_calls(common, lenient)
                assert len(calls) == len(transition.tool_calls)
                for call in calls:
                    assert isinstance(call, ToolCall | ParseError)
                    kind = call.kind if isinstance(call, ParseError) else "repaired" if call.repaired else "call"
                    assert lenient or kind != "repaired"
                    seen[name, kind] += 1
                seen[name, "ended"] += transition.terminated
                json.dumps([transition.tool_calls, transition.info], allow_nan=False)

        check()
    return seen


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_calls_give_typed_results(count):
    """The same in every run; each kind of result is among them in every call format."""
    seen = check_mutations(count)
    kinds = ("call", "bad_json", "repaired", "ended")
    assert all(seen[name, kind] for name in SPOKEN for kind in kinds), seen


@settings(max_examples=100)
@given(st.sampled_from(FRAGMENTS), st.sampled_from(FRAGMENTS), st.sampled_from(FRAGMENTS))
def test_long_texts_are_read(a, b, c):
    for call_format in SPOKEN.values():
        text = ((a + b) * 3000)[:6000] + c
        common = call_format.parse(text, SCHEMAS)
        assert all(isinstance(call, ToolCall | ParseError) for call in parse_tool_calls(common, lenient=True))
        assert "<answer>" not in (extract_answer(common) or "")


def test_the_call_format_is_the_one_of_the_template_unless_named(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, call=BARE))
    assert make_call_format("auto", tokenizer).name == "llama3"
    assert not make_call_format("auto", tokenizer).tools_in_template
    tagged = load_tokenizer(
        write(tmp_path / "tagged", call=BARE.replace("parameters", "arguments").join(["<c>", "</c>"]))
    )
    assert make_call_format("auto", tagged).name == "hermes"
    for name in CALL_FORMATS[2:]:
        assert make_call_format(name, tokenizer).name == name
    with pytest.raises(ValueError, match=r"or set agent\.call_format to one that needs none: llama3, code or react"):
        make_call_format("hermes", tokenizer)
    with pytest.raises(ValueError, match="unknown call format 'xml'; choose one of auto, hermes, llama3, code, react"):
        make_call_format("xml", tokenizer)


@pytest.mark.parametrize(
    ("name", "mark"), [("llama3", '"parameters"'), ("code", "<interpreter>"), ("react", "Action Input:")]
)
def test_instructions_tell_every_tool_and_the_format(name, mark):
    said = SPOKEN[name].instructions(SCHEMAS)
    assert "Searches passages." in said and '"count"' in said and mark in said
    assert SPOKEN[name].instructions([]) == ""


def test_code_is_explained_where_there_is_an_interpreter():
    schema = {"type": "function", "function": {"name": "python", "description": "", "parameters": {}}}
    said = SPOKEN["code"].instructions([schema])
    assert "<code>" in said and "<tool_call>" not in said

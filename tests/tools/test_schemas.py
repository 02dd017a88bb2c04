"""Validation of arguments: as jsonschema has it, but nothing is fetched, and it ends in time."""

from __future__ import annotations

import asyncio
import functools
import http.server
import threading

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_doubles import FINE, Does, run

from agentr1_jax.tools import base, schemas
from agentr1_jax.tools.base import ToolError

DEFINITIONS = {
    "word": {"type": "string", "pattern": "^[ab]+$"},
    "tree": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/word"}]}},
}
SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"], "additionalProperties": False},
    {"patternProperties": {"^a": {"type": "string"}, "b": {"maxLength": 1}}, "additionalProperties": {"type": "null"}},
    {"patternProperties": {"^a": True}, "additionalProperties": False},
    {"properties": {"a": {"$ref": "#/$defs/word"}, "b": {"$ref": "#/$defs/tree"}}, "$defs": DEFINITIONS},
    {
        "properties": {"a": {"$ref": "#"}, "b": {"pattern": "b|^$"}},
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False, "propertyNames": {"pattern": "a"}},
    {"properties": {"b": {"uniqueItems": True, "contains": {"const": "a"}}}, "dependentRequired": {"a": ["b"]}},
    {"not": {"required": ["a"]}, "if": {"minProperties": 2}, "then": False, "else": {"maxProperties": 1}},
]
TEXT = st.text("abc", max_size=3)
VALUES = st.recursive(
    TEXT | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("schema", SCHEMAS)
@given(value=st.dictionaries(TEXT, VALUES, max_size=3))
def test_it_finds_the_errors_of_jsonschema(schema, value):
    errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(value), key=lambda e: [*map(str, e.path)])
    found = schemas.find_error(schema, value)
    assert (found is None) == (not errors)
    # That lists the patterns, too.
    assert not errors or found == errors[0].message or "match any of the regexes" in errors[0].message
    schemas.check_schema(schema)


@pytest.fixture
def asked():
    """URL of a server of a schema, and the paths that it was asked for."""
    paths = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type": "string"}')

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/a.json", paths
        server.shutdown()


@pytest.mark.filterwarnings("ignore:Automatically retrieving remote references")
def test_references_are_not_fetched(asked, tmp_path):
    url, paths = asked
    (tmp_path / "a.json").write_text('{"type": "string"}')
    tool = Does(lambda arguments: FINE)
    for reference in (url, (tmp_path / "a.json").as_uri(), "a.json", "#/$defs/none"):
        tool.parameters = {"properties": {"a": {"$ref": reference}}}
        result = run(tool, {"a": "x"})
        assert result.error == ToolError("exception", "infrastructure") and reference in result.content
        with pytest.raises(ValueError, match="is no place within it"):
            schemas.check_schema(tool.parameters)
    assert paths == []


EXPONENTIAL = {
    **{f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)},
    "a40": {"type": "string"},
}
NESTED = functools.reduce(lambda inner, _: {"anyOf": [inner], "unevaluatedItems": False}, range(25), {})


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"a": {"pattern": "^(a|aa)+$"}}}, {"a": "a" * 60 + "!"}),
        ({"patternProperties": {"^(a|aa)+$": {}}}, {"a" * 60 + "!": 1}),
        ({"patternProperties": {"^(a|aa)+$": {}}, "additionalProperties": False}, {"a" * 60 + "!": 1}),
        ({"additionalProperties": {"$ref": "#/$defs/a0"}, "$defs": EXPONENTIAL}, {"a": "x"}),
        ({"properties": {"a": NESTED}}, {"a": [1, 2]}),
    ],
)
def test_what_would_take_forever_ends_in_time_beside_the_event_loop(monkeypatch, schema, arguments):
    monkeypatch.setattr(schemas, "SECONDS", 0.1)
    tool = Does(lambda arguments: FINE)
    tool.parameters = {"type": "object", **schema}

    async def main():
        call, ticks = asyncio.create_task(base.call(tool, arguments)), 0
        while not call.done():
            await asyncio.sleep(0.001)
            ticks += 1
        return call.result(), ticks

    result, ticks = asyncio.run(main())
    assert result.error == ToolError("bad_arguments", "model") and "cannot be checked within 0.1 s" in result.content
    assert ticks > 3


def test_items_are_compared_as_json_in_one_pass():
    unique = {"uniqueItems": True}
    for items in ([1, True, "1", None, [1], {"a": 1}], [{"a": i} for i in range(20_000)]):
        assert schemas.find_error(unique, items) is None
    for items in ([1, 1.0], [{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}], [None, None]):
        assert schemas.find_error(unique, items) == "the items of a list are not unique"


def test_a_number_too_large_for_its_schema_is_the_models_fault():
    assert schemas.find_error({"multipleOf": 0.01}, 10**400) == "they hold a number that is too large"


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": 7}, "7 is not valid"),
        ({"pattern": "("}, "is not a 'regex'"),
        ({"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#"}}}, "a \\$schema of its own"),
        ({"patternProperties": {"a": {}}, "unevaluatedProperties": False}, "both"),
    ],
)
def test_schemas_that_cannot_be_used(schema, why):
    with pytest.raises(ValueError, match=why):
        schemas.check_schema(schema)


def test_a_schema_that_is_nested_too_deep_is_refused():
    schema = {}
    for _ in range(5000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match="nested too deep"):
        schemas.check_schema(schema)

"""The function documents of the data: what the policy is told of a function, and what its results look like."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from agentr1_jax.contrib.bfcl.base import check
from agentr1_jax.tools.records import DAMAGE, damaged, read_records

WHAT = "not a function document"
TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array"}
"""Types of the documents that JSON Schema names otherwise; `any` has none there."""
PLAIN_TYPES = ("object", "array", "string", "integer", "number", "boolean")
NONE = "None"
"""The text by which documents write a default that is no value."""

_OF_A_CLASS = "Tool description:"
"""Begins what a description says of its function; before it stands what all of the class say."""

_OBJECT: Mapping[str, Any] = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"const": "dict"},
        "properties": {"type": "object", "additionalProperties": {"type": "object", "required": ["type"]}},
        "required": {"type": "array", "items": {"type": "string"}},
    },
}
SHAPE: Mapping[str, Any] = {
    "type": "object",
    "required": ["name", "description", "parameters", "response"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": {"type": "string"},
        "parameters": _OBJECT,
        "response": _OBJECT,
    },
}


@dataclasses.dataclass(frozen=True)
class Function:
    """A function as its document describes it.

    Attributes:
      name: by which it is called.
      about: what its description says of all functions of its class; "" where it says nothing.
      description: what it says of this one.
      parameters: JSON Schema of the arguments, in their order.
      response: JSON Schema of the result.
      optional: parameters for which the text `None` stands for no value.
    """

    name: str
    about: str
    description: str
    parameters: Mapping[str, Any]
    response: Mapping[str, Any]
    optional: frozenset[str]

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Valid arguments as the implementation takes them: whole numbers as int, no `None` written as text."""
        kept = {name: x for name, x in arguments.items() if not (name in self.optional and x == NONE)}
        return _whole_numbers(self.parameters, kept)


def read_documents(path: str | os.PathLike[str]) -> dict[str, Function]:
    """The functions of a file, by name.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is no function document, or describes a function again; the message names file and line.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file of function documents; is the data folder whole?")
    functions: dict[str, Function] = {}
    for where, record in read_records(path, WHAT):
        try:
            function = _function(record)
            if function.name in functions:
                raise ValueError(f"the function {function.name!r} is described twice")
        except DAMAGE as error:
            raise damaged(where, WHAT, error) from error
        functions[function.name] = function
    return functions


def to_schema(spec: Mapping[str, Any]) -> dict[str, Any]:
    """JSON Schema of what a document says of a value.

    Raises:
      ValueError: it has a type that is not known.
    """
    kind = TYPES.get(spec["type"], spec["type"])
    if kind not in (*PLAIN_TYPES, "any"):
        raise ValueError(f"unknown type {kind!r}; known are {', '.join((*TYPES, *PLAIN_TYPES, 'any'))}")
    schema: dict[str, Any] = {} if kind == "any" else {"type": kind}
    if "description" in spec:
        schema["description"] = spec["description"].strip()
    if "enum" in spec:
        schema["enum"] = spec["enum"]
    if spec.get("default", NONE) != NONE:
        schema["default"] = spec["default"]
    if "items" in spec:
        schema["items"] = to_schema(spec["items"])
    if "properties" in spec:
        schema["properties"] = {name: to_schema(inner) for name, inner in spec["properties"].items()}
        schema["required"] = list(spec.get("required", ()))
        schema["additionalProperties"] = False
    return schema


def _function(record: Any) -> Function:
    check(record, SHAPE, "it")
    about, mark, description = record["description"].rpartition(_OF_A_CLASS)
    parameters = {"properties": {}, **record["parameters"]}
    optional = [name for name, spec in parameters["properties"].items() if spec.get("default") == NONE]
    return Function(
        name=record["name"],
        about=about.strip(),
        description=description.strip(),
        parameters=to_schema(parameters),
        response=to_schema(record["response"]),
        optional=frozenset(optional),
    )


def _whole_numbers(schema: Mapping[str, Any], value: Any) -> Any:
    """A copy of a valid value in which what the schema calls an integer is one: `3.0` is valid, too."""
    if isinstance(value, Mapping):
        inner = schema.get("properties", {})
        return {name: _whole_numbers(inner.get(name, {}), x) for name, x in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(schema.get("items", {}), x) for x in value]
    return int(value) if schema.get("type") == "integer" else value

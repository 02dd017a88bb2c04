"""Function documents of the data: names, descriptions and schemas of the functions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from agentr1_jax.contrib.bfcl.base import TEXT, Schema, array, check, mapping
from agentr1_jax.tools.records import DAMAGE, damage_error, read_records

WHAT = "not a function document"
TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array"}
"""Types that JSON Schema names otherwise; `any` has no counterpart there."""
PLAIN_TYPES = ("object", "array", "string", "integer", "number", "boolean")
NONE = "None"
"""Default in the documents of a parameter without default value."""

_SEPARATOR = "Tool description:"
"""Text between the description of the class and that of the function."""

_OBJECT: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"const": "dict"},
        "properties": mapping({"type": "object", "required": ["type"]}),
        "required": array(TEXT),
    },
}
SHAPE: Schema = {
    "type": "object",
    "required": ["name", "description", "parameters", "response"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": TEXT,
        "parameters": _OBJECT,
        "response": _OBJECT,
    },
}


@dataclasses.dataclass(frozen=True)
class Function:
    """A function as its document describes it.

    Attributes:
      name: name of the function.
      class_description: the part of its description that all functions of the class share; "" for none.
      description: description of this function.
      parameters: JSON Schema of the arguments, in order.
      response: JSON Schema of the result.
      optional: parameters whose text value `None` means no value.
    """

    name: str
    class_description: str
    description: str
    parameters: Mapping[str, Any]
    response: Mapping[str, Any]
    optional: frozenset[str]

    def convert(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return valid arguments as the implementation takes them: integers as int, without `None` written as text."""
        present = {name: x for name, x in arguments.items() if not (name in self.optional and x == NONE)}
        return _convert_integers(self.parameters, present)


def read_documents(path: str | os.PathLike[str]) -> dict[str, Function]:
    """Return the functions of a file, by name.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is no function document, or a function is described twice; the message names file and line.
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
            raise damage_error(where, WHAT, error) from error
        functions[function.name] = function
    return functions


def to_schema(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a value as a document describes it.

    Raises:
      ValueError: unknown type.
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
    class_description, _, description = record["description"].rpartition(_SEPARATOR)
    parameters = {"properties": {}, **record["parameters"]}
    optional = [name for name, spec in parameters["properties"].items() if spec.get("default") == NONE]
    return Function(
        name=record["name"],
        class_description=class_description.strip(),
        description=description.strip(),
        parameters=to_schema(parameters),
        response=to_schema(record["response"]),
        optional=frozenset(optional),
    )


def _convert_integers(schema: Mapping[str, Any], value: Any) -> Any:
    """Return a copy of a valid value whose integers by the schema are of type int: `3.0` is valid, too."""
    if isinstance(value, Mapping):
        inner = schema.get("properties", {})
        return {name: _convert_integers(inner.get(name, {}), x) for name, x in value.items()}
    if isinstance(value, list):
        return [_convert_integers(schema.get("items", {}), x) for x in value]
    return int(value) if schema.get("type") == "integer" else value

"""Functions as the documents of the data describe them: names, descriptions and schemas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentr1_jax.contrib.bfcl.base import TEXT, Schema, array, mapping

TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array"}
"""Types that JSON Schema names otherwise; `any` has no counterpart there."""
PLAIN_TYPES = ("object", "array", "string", "integer", "number", "boolean")
NONE = "None"
"""Default in the documents of a parameter without default value."""

_OBJECT: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"const": "dict"},
        "properties": mapping({"type": "object", "required": ["type"]}),
        "required": array(TEXT),
    },
}
DOCUMENT: Schema = {
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
    """A documented function.

    Attributes:
      class_description: the part of its description that all functions of the class share; "" for none.
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


def read_document(record: Mapping[str, Any]) -> Function:
    """Return the function of a record of the form `DOCUMENT`. Raises ValueError on an unknown type."""
    class_description, _, description = record["description"].rpartition("Tool description:")
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


def to_schema(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a value as a document describes it. Raises ValueError on an unknown type."""
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


def _convert_integers(schema: Mapping[str, Any], value: Any) -> Any:
    """Return a copy of a valid value whose integers by the schema are of type int: `3.0` is valid, too."""
    if isinstance(value, Mapping):
        inner = schema.get("properties", {})
        return {name: _convert_integers(inner.get(name, {}), x) for name, x in value.items()}
    if isinstance(value, list):
        return [_convert_integers(schema.get("items", {}), x) for x in value]
    return int(value) if schema.get("type") == "integer" else value

"""Shared parts of the function sets: failed calls, and checks of the data by JSON Schema.

A function set is a dataclass whose fields are its state, plain JSON, and whose public methods the policy may call.
`from_config` makes the initial state of a row's `initial_config`; it raises ValueError where that is invalid.
A method takes valid arguments. It returns JSON, or raises `CallFailed` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import jsonschema

Schema = Mapping[str, Any]
TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}


class CallFailed(Exception):
    """A call with valid arguments that cannot be executed: short name of the error, and what the policy reads."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def check(value: Any, schema: Schema, what: str) -> None:
    """Raise ValueError, with the place and the mistake, unless `value` is valid by a JSON Schema."""
    errors = jsonschema.Draft202012Validator(dict(schema)).iter_errors(value)
    error = jsonschema.exceptions.best_match(errors)
    if error is not None:
        raise ValueError(f"{what}{error.json_path.removeprefix('$')}: {error.message:.200}")


def record(required: Sequence[str] = (), /, **fields: Schema) -> dict[str, Any]:
    """Return the JSON Schema of an object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def array(items: Schema, **rules: Any) -> dict[str, Any]:
    """Return the JSON Schema of an array."""
    return {"type": "array", "items": items, **rules}


def mapping(values: Schema, keys: str = "") -> dict[str, Any]:
    """Return the JSON Schema of an object with any keys, or with those that match the pattern `keys`."""
    return {"type": "object", "additionalProperties": values, "propertyNames": {"pattern": keys}}


def free_number(first: int, taken: Container[int]) -> int:
    """Return the least number from `first` on that is not taken."""
    while first in taken:
        first += 1
    return first

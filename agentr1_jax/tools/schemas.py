"""Validation by JSON Schema, draft 2020-12: nothing is fetched, and it ends in time whatever schema and value are.

A reference leads to a place within its schema, or to a published draft. Patterns are matched by `regex`, which has a
time limit and lets other threads run: with `re`, a pattern like `(a|aa)+$` would stop the whole process for hours.
"""

from __future__ import annotations

import contextvars
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jsonschema
import referencing.exceptions
from jsonschema_specifications import REGISTRY
from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY

SECONDS = 1.0
"""Time limit of a validation."""
Keyword = Callable[[Any, Any, Any, Any], Iterator[jsonschema.ValidationError] | None]

_SLOW = re.compile(r"\$ref\b|\$dynamicRef\b|'pattern|'unevaluated|'uniqueItems'")
_deadline = contextvars.ContextVar("deadline", default=0.0)


def is_slow(schema: Any) -> bool:
    """Return True where validation may take longer than the event loop should wait."""
    return bool(_SLOW.search(repr(schema)))


def find_error(schema: Any, value: Any) -> str | None:
    """Return in one line what is wrong with a value by a schema; None if nothing is.

    Raises:
      Exception: whatever `check_schema` refuses.
    """
    if isinstance(schema, Mapping):
        schema = {key: item for key, item in schema.items() if key != "$schema"}  # Else it chooses the validator.
    token = _deadline.set(time.monotonic() + SECONDS)
    try:
        errors = list(_Validator(schema, registry=EMPTY_REGISTRY).iter_errors(value))
    except OverflowError:
        return "they hold a number that is too large"
    except TimeoutError:
        return f"they cannot be checked within {SECONDS:g} s"
    finally:
        _deadline.reset(token)
    return min(errors, key=lambda error: list(map(str, error.absolute_path))).message if errors else None


def check_schema(schema: Any) -> None:
    """Raise ValueError, with the reason, for what is no schema or one that `find_error` cannot use."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        resource = DRAFT202012.create_resource(schema)
        _check_parts(resource, REGISTRY.resolver_with_root(resource))
    except jsonschema.SchemaError as error:
        raise ValueError(error.message) from error
    except referencing.exceptions.Unresolvable as error:
        raise ValueError(f"{error.ref!r} is no place within it, and references are not fetched") from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if "'unevaluatedProperties'" in repr(schema) and "'patternProperties'" in repr(schema):
        raise ValueError("it has both unevaluatedProperties and patternProperties")


def _check_parts(part: Any, outer: Any) -> None:
    resolver = outer.in_subresource(part)
    for inner in part.subresources():
        if isinstance(inner.contents, Mapping) and "$schema" in inner.contents:
            raise ValueError("a part of it has a $schema of its own")
        _check_parts(inner, resolver)
    for key in ("$ref", "$dynamicRef"):
        if isinstance(part.contents, Mapping) and key in part.contents:
            resolver.lookup(part.contents[key])


def _matches(pattern: str, text: str) -> bool:
    import regex  # Here, because few schemas have patterns.

    return regex.search(pattern, text, timeout=max(_deadline.get() - time.monotonic(), 1e-6)) is not None


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(instance, "object"):
        for pattern, subschema in patterns.items():
            for key, value in instance.items():
                if _matches(pattern, key):
                    yield from validator.descend(value, subschema, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    patterns = schema.get("patternProperties", {})
    if validator.is_type(instance, "object"):
        instance = {key: x for key, x in instance.items() if not any(_matches(pattern, key) for pattern in patterns)}
    schema = {key: x for key, x in schema.items() if key != "patternProperties"}
    yield from _KEYWORDS["additionalProperties"](validator, allowed, instance, schema) or ()


def _unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    # In one pass; jsonschema compares every two.
    if wanted and validator.is_type(instance, "array") and len(set(map(_hashable, instance))) < len(instance):
        yield jsonschema.ValidationError("the items of a list are not unique")


def _hashable(value: Any) -> Any:
    """Return what is equal for equal JSON; True is not 1."""
    if isinstance(value, Mapping):
        return "object", frozenset((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list):
        return "array", *map(_hashable, value)
    return isinstance(value, bool), value


def _within_time(keyword: Keyword) -> Keyword:
    def validate(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if time.monotonic() > _deadline.get():
            raise TimeoutError
        return keyword(validator, value, instance, schema)

    return validate


_KEYWORDS: Mapping[str, Keyword] = jsonschema.Draft202012Validator.VALIDATORS
_OWN: Mapping[str, Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}
_Validator: Any = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {name: _within_time(keyword) for name, keyword in {**_KEYWORDS, **_OWN}.items()}
)

"""What the function sets share: what one is, how a call fails, how its part of a row is checked."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Container, Mapping
from typing import Any, ClassVar, Protocol, Self

import jsonschema


class CallFailed(Exception):
    """A call that cannot be done as it was made.

    Attributes:
      kind: a short typed name, e.g. `no_such_file`; the message is what the policy reads.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class FunctionSet(Protocol):
    """A dataclass whose fields are its state, plain JSON. Its public methods are functions that the policy may call.

    A function takes valid arguments, which it may keep. It returns JSON, or changes nothing and raises `CallFailed`.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The initial state by a row's `initial_config`, which it may keep. Raises ValueError where that is no such."""
        ...


def functions_of(cls: type) -> dict[str, Callable[..., Any]]:
    """The functions that a function set has, by name."""
    return {name: x for name, x in vars(cls).items() if inspect.isfunction(x) and not name.startswith("_")}


def check(value: Any, schema: Mapping[str, Any], what: str) -> None:
    """Raises ValueError, which says what is wrong and where, unless `value` is valid by a JSON Schema."""
    errors = jsonschema.Draft202012Validator(dict(schema)).iter_errors(value)
    error = jsonschema.exceptions.best_match(errors)
    if error is not None:
        raise ValueError(f"{what}{error.json_path.removeprefix('$')}: {error.message:.200}")


def free_number(first: int, taken: Container[int]) -> int:
    """The first number from `first` on that is not taken."""
    while first in taken:
        first += 1
    return first

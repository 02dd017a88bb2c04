"""Checked settings: frozen dataclasses whose fields state their type and range, made from sections of a config.

A package that can be configured declares one such dataclass:

    @dataclass(frozen=True, config=STRICT)          # pydantic.dataclasses.dataclass
    class SamplingConfig:
        temperature: NonNegative = 1.0
        top_p: Share = 1.0
        reuse: Literal["all", "own", "none"] = "all"

and `experiments/setup.py` makes it with `from_section`, which tells the user what is wrong with which key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import pydantic
from annotated_types import Ge, Gt, Le, Lt

from agentr1_jax.errors import UserError

T = TypeVar("T")

STRICT = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
"""No conversion but int to float, no unknown field, only finite numbers."""

INT32 = 2**31
"""Integers are less: devices compute with 32 bits."""
Count = Annotated[int, Ge(1), Lt(INT32)]
"""1, 2, 3 ..."""
Whole = Annotated[int, Ge(0), Lt(INT32)]
"""0, 1, 2 ...; where it is a limit, 0 mostly means none."""
Seed = Annotated[int, Ge(0), Lt(2**32)]
"""What a random generator is seeded with."""
Finite = Annotated[float, pydantic.AllowInfNan(False)]
"""Any number but infinities and NaN."""
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Gt(0), Le(1)]
"""0 < x <= 1: a probability mass, a discount."""
Fraction = Annotated[float, Ge(0), Le(1)]
"""0 <= x <= 1."""
Decay = Annotated[float, Ge(0), Lt(1)]
"""0 <= x < 1: the decay of a running mean."""


def from_section(cls: type[T], section: str, values: Mapping[str, Any]) -> T:
    """Make checked settings from one section of a config.

    Args:
      cls: dataclass declared with `STRICT`.
      section: name of the section, e.g. `rollout`; empty for keys at the top of the config.
      values: field name -> value; lists stand for tuples, mappings for the fields that are such dataclasses themselves.

    Raises:
      UserError: a field is unknown, missing, of another type or out of range; the message names its key, its value and
        what it may be.
    """
    nested: dict[str, Any] = {
        name: field.annotation
        for name, field in getattr(cls, "__pydantic_fields__", {}).items()
        if dataclasses.is_dataclass(field.annotation)
    }

    def convert(key: str, value: Any) -> Any:
        if key in nested and isinstance(value, Mapping):
            return from_section(nested[key], f"{section}.{key}" if section else key, value)
        return tuple(value) if isinstance(value, list) else value

    try:
        return cls(**{key: convert(key, value) for key, value in values.items()})
    except pydantic.ValidationError as error:
        raise UserError("\n".join(_message(section, fault) for fault in error.errors())) from error


def to_section(cls: type) -> dict[str, Any]:
    """Return the defaults of checked settings as a section of a config, nested settings as dicts."""
    return dataclasses.asdict(cls())


def _message(section: str, fault: Any) -> str:
    """One line for one fault: the dotted key, its value, what it may be."""
    path = ".".join(str(part) for part in fault["loc"] if not (isinstance(part, str) and "[" in part))
    key = ".".join(part for part in (section, path) if part)
    if fault["type"] == "value_error":  # Raised by `__post_init__`, whose message names what it is about.
        return f"{key}: {fault['ctx']['error']}" if key else str(fault["ctx"]["error"])
    if fault["type"] == "unexpected_keyword_argument":
        return f"unknown key {key!r}"
    if fault["type"] == "missing_argument":
        return f"{key} is missing"
    _, _, allowed = fault["msg"].partition(" should ")
    return f"{key} is {fault['input']!r}; it must {allowed or fault['msg']}"

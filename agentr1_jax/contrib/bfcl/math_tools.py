"""Function set `MathAPI`: arithmetic, statistics and conversion of units, without state."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from agentr1_jax.contrib.bfcl.base import CallFailed

DIGITS = 17
"""Significant digits of a float."""

_PREFIXES = {"": 0, "T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "c": -2, "m": -3, "u": -6, "µ": -6, "n": -9, "p": -12}
_BASES = ("m", "g", "s", "A", "K", "mol", "cd", "L", "l", "N", "J", "W", "Pa", "Hz", "V")
SI = {prefix + unit: (unit.lower(), 10.0**power) for unit in _BASES for prefix, power in _PREFIXES.items()}
"""Unit -> (kind, number of the kind's base unit)."""

IMPERIAL = {
    name: (kind, one)
    for names, kind, one in (
        ("in inch inches", "m", 0.0254),
        ("ft foot feet", "m", 0.3048),
        ("yd yard yards", "m", 0.9144),
        ("mi mile miles", "m", 1609.344),
        ("oz ounce ounces", "g", 28.349523125),
        ("lb lbs pound pounds", "g", 453.59237),
        ("gal gallon gallons", "l", 3.785411784),
    )
    for name in names.split()
}
"""US customary units in the same form; the international foot and pound, the US gallon."""

TEMPERATURES = {"celsius": (1.0, 0.0), "fahrenheit": (5 / 9, -160 / 9)}
"""Degrees Celsius = factor · degrees + offset."""


@dataclasses.dataclass
class MathTools:
    """Arithmetic, statistics and units."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls()

    def absolute_value(self, number: float) -> dict[str, Any]:
        return _result(lambda: abs(number))

    def add(self, a: float, b: float) -> dict[str, Any]:
        return _result(lambda: a + b)

    def subtract(self, a: float, b: float) -> dict[str, Any]:
        return _result(lambda: a - b)

    def multiply(self, a: float, b: float) -> dict[str, Any]:
        return _result(lambda: a * b)

    def divide(self, a: float, b: float) -> dict[str, Any]:
        return _result(lambda: a / b)

    def power(self, base: float, exponent: float) -> dict[str, Any]:
        # Not `**`: powers of integers can be huge, and some powers are complex.
        return _result(lambda: math.pow(base, exponent))

    def percentage(self, part: float, whole: float) -> dict[str, Any]:
        return _result(lambda: 100 * part / whole)

    def square_root(self, number: float, precision: int) -> dict[str, Any]:
        return _result(lambda: _round(math.sqrt(number), precision))

    def logarithm(self, value: float, base: float, precision: int) -> dict[str, Any]:
        return _result(lambda: _round(math.log(value) / math.log(base), precision))

    def round_number(self, number: float, decimal_places: int = 0) -> dict[str, Any]:
        return _result(lambda: round(float(number), decimal_places))

    def max_value(self, numbers: Sequence[float]) -> dict[str, Any]:
        return _result(lambda: max(numbers))

    def min_value(self, numbers: Sequence[float]) -> dict[str, Any]:
        return _result(lambda: min(numbers))

    def sum_values(self, numbers: Sequence[float]) -> dict[str, Any]:
        return _result(lambda: sum(numbers))

    def mean(self, numbers: Sequence[float]) -> dict[str, Any]:
        return _result(lambda: statistics.fmean(numbers))

    def standard_deviation(self, numbers: Sequence[float]) -> dict[str, Any]:
        """Return the population standard deviation."""
        return _result(lambda: statistics.pstdev(map(float, numbers)))

    def si_unit_conversion(self, value: float, unit_in: str, unit_out: str) -> dict[str, Any]:
        return _result(lambda: _convert(value, unit_in, unit_out, SI))

    def imperial_si_conversion(self, value: float, unit_in: str, unit_out: str) -> dict[str, Any]:
        names = [unit_in.lower(), unit_out.lower()]
        if set(names) <= set(TEMPERATURES):
            (factor, offset), (to_factor, to_offset) = (TEMPERATURES[name] for name in names)
            return _result(lambda: (factor * value + offset - to_offset) / to_factor)
        return _result(lambda: _convert(value, unit_in, unit_out, {**SI, **IMPERIAL}))


def _result(compute: Callable[[], float]) -> dict[str, Any]:
    """Return the result in the form of the data. Raises CallFailed where it is undefined or not finite."""
    try:
        result = compute()
        # Raises OverflowError for integers beyond the range of floats.
        if math.isfinite(result):
            return {"result": result}
    except (ArithmeticError, ValueError) as error:
        raise CallFailed("undefined", f"there is no result ({error})") from error
    raise CallFailed("undefined", "the result is not a finite number")


def _round(value: float, precision: int) -> float:
    """Return a value with `precision` significant digits."""
    if precision < 1:
        raise ValueError(f"precision is {precision}; it must be at least 1")
    return float(f"{value:.{min(precision, DIGITS)}g}")


def _convert(value: float, unit_in: str, unit_out: str, units: Mapping[str, tuple[str, float]]) -> float:
    for unit in (unit_in, unit_out):
        if unit not in units:
            raise ValueError(f"unknown unit {unit!r}; units are written like km, mg, ml, ft or lb")
    (kind, one), (other_kind, other) = units[unit_in], units[unit_out]
    if kind != other_kind:
        raise ValueError(f"{unit_in} and {unit_out} do not measure the same")
    return value * one / other

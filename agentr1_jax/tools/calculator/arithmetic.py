"""Arithmetic that is exact where it can be, never takes long, and prints without noise."""

from __future__ import annotations

import decimal
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

Number = Fraction | float
"""A Fraction is exact; a float is what an irrational function made, or what would have been too long."""

MAX_BITS = 4096
"""Length of the numerator and of the denominator of an exact number; beyond, it becomes a float."""
EXACT_DIGITS, ROUNDED_DIGITS = 20, 12
"""Decimals that end within the first are printed whole; all others are rounded to the second."""
MAX_PLACES = 100
"""Places of `round`."""


class CalculationError(Exception):
    """Why an expression has no value.

    Attributes:
      kind: `syntax`, `division_by_zero`, `too_large` or `domain`.
      message: in a few words, with the place in the expression where it is known.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def apply(function: Callable[..., Number | int], *values: Number | str) -> Number:
    """Return `function` of these values, within bounds.

    Raises:
      CalculationError: it has no value there, or one that is too large or too small.
    """
    try:
        return _keep_in_bounds(function(*values))
    except ZeroDivisionError as error:
        raise CalculationError("division_by_zero", "division by zero") from error
    except OverflowError as error:
        raise CalculationError("too_large", "the result is too large") from error
    except ValueError as error:
        raise CalculationError("domain", "not defined for this value") from error


def _keep_in_bounds(value: Number | int) -> Number:
    if isinstance(value, float):
        if math.isnan(value):
            raise ValueError
        if math.isinf(value):
            raise OverflowError
        return value
    exact = Fraction(value)
    if max(exact.numerator.bit_length(), exact.denominator.bit_length()) <= MAX_BITS:
        return exact
    rounded = float(exact)
    if not rounded:
        raise CalculationError("too_large", "the result is too close to 0")
    return rounded


def power(base: Number, exponent: Number) -> Number:
    """Return base ** exponent; exact for whole exponents as long as it fits."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if base in (-1, 0, 1) or bits * abs(exponent) <= MAX_BITS:
            return base**exponent.numerator
    if not base and exponent < 0:
        raise ZeroDivisionError
    result = math.pow(base, exponent)
    if base and not result:
        raise CalculationError("too_large", "the result is too close to 0")
    return result


def _sqrt(value: Number) -> Number:
    if isinstance(value, Fraction) and value >= 0:
        roots = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if roots[0] ** 2 == value.numerator and roots[1] ** 2 == value.denominator:
            return Fraction(*roots)
    return math.sqrt(value)


def _round(value: Number, places: Number = Fraction(0)) -> Number:
    digits = _whole(places)
    if abs(digits) > MAX_PLACES:
        raise CalculationError("domain", f"round goes to at most {MAX_PLACES} places")
    return Fraction(round(value, digits)) if isinstance(value, Fraction) else round(value, digits)


def _log(value: Number, base: Number = math.e) -> float:
    if value <= 0 or base <= 0:
        raise CalculationError("domain", "a logarithm needs a value above 0")
    # Whole numbers as such: they may be beyond a float.
    logarithm = math.log(int(value) if value == int(value) else value)
    return logarithm if base == math.e else logarithm / math.log(base)


def _periodic(function: Callable[[float], float]) -> Callable[[Number], float]:
    """Without the noise that a float near a multiple of π makes: sin(pi) is 0, and tan(pi/2) has no value."""

    def of(value: Number) -> float:
        angle = float(value)
        result = function(angle)
        if abs(result) > 1e15:
            raise ValueError
        return 0.0 if abs(result) < 1e-15 and abs(angle) > 1 else result

    return of


def _factorial(value: Number) -> int:
    count = _whole(value)
    if count < 0:
        raise ValueError
    if count > MAX_BITS:  # Far too long by then, and not yet slow.
        raise OverflowError
    return math.factorial(count)


def _of_whole(function: Callable[..., int]) -> Callable[..., int]:
    return lambda *values: function(*map(_whole, values))


def _whole(value: Number) -> int:
    if value != int(value):
        raise CalculationError("domain", "it needs a whole number")
    return int(value)


def _floor_division(a: Number, b: Number) -> Number | int:
    return a // b


OPERATORS: Mapping[str, Callable[[Number, Number], Number | int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": _floor_division,
    "%": operator.mod,
    "**": power,
}

FUNCTIONS: Mapping[str, tuple[Callable[..., Number | int], int, int]] = {
    "sqrt": (_sqrt, 1, 1),
    "abs": (abs, 1, 1),
    "min": (lambda *values: min(values), 1, 1000),
    "max": (lambda *values: max(values), 1, 1000),
    "round": (_round, 1, 2),
    "floor": (math.floor, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "trunc": (math.trunc, 1, 1),
    "pow": (power, 2, 2),
    "exp": (math.exp, 1, 1),
    "ln": (_log, 1, 1),
    "log": (_log, 1, 2),
    "log2": (lambda value: _log(value, 2.0), 1, 1),
    "log10": (lambda value: _log(value, 10.0), 1, 1),
    "sin": (_periodic(math.sin), 1, 1),
    "cos": (_periodic(math.cos), 1, 1),
    "tan": (_periodic(math.tan), 1, 1),
    "asin": (math.asin, 1, 1),
    "acos": (math.acos, 1, 1),
    "atan": (math.atan, 1, 1),
    "degrees": (math.degrees, 1, 1),
    "radians": (math.radians, 1, 1),
    "factorial": (_factorial, 1, 1),
    "gcd": (_of_whole(math.gcd), 1, 1000),
    "lcm": (_of_whole(math.lcm), 1, 1000),
}
"""A function's name -> what it does, and its least and most number of arguments."""

CONSTANTS: Mapping[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}


def format_number(value: Number) -> str:
    """Return the number as text: whole numbers whole, decimals that end soon exactly, all else to 12 digits."""
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value.numerator)
    with decimal.localcontext(prec=EXACT_DIGITS) as context:
        digits = _decimal(value)
        if isinstance(value, float) or context.flags[decimal.Inexact]:
            context.prec = ROUNDED_DIGITS
            digits = +_decimal(value)
        digits = digits.normalize()
        if not digits:
            return "0"
        return f"{digits:f}" if -7 <= digits.adjusted() <= EXACT_DIGITS else f"{digits:e}"


def _decimal(value: Number) -> decimal.Decimal:
    if isinstance(value, float):
        return decimal.Decimal(repr(value))
    return decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)

"""A calculator that is exact where it can be: Python's own parser and a whitelist of the nodes of its syntax tree.

Nothing that a policy writes is ever executed, and no expression takes long.

Beside Python's notation an expression may have `^` for `**`, `×`, `÷`, the typographic minus, `1,234,567` (directly
within the brackets of a function, commas always separate arguments), and `15%` for 15/100: a `%` is a percent sign
unless an operand follows.
"""

from __future__ import annotations

import ast
import decimal
import math
import operator
import re
import textwrap
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from agentr1_jax.tools.base import ToolResult, failure

Number = Fraction | float
"""A Fraction is exact; a float is what an irrational function made, or what would have been too long."""

MAX_CHARACTERS = 1000
MAX_EXPONENT = 1000
"""Exponent of a number such as 1e1000."""
MAX_BITS = 4096
"""Length of the numerator and of the denominator of an exact number; beyond, it becomes a float."""
MAX_PLACES = 100
"""Places of `round`."""
EXACT_DIGITS, ROUNDED_DIGITS = 20, 12
"""Decimals that end within the first are printed whole; all others are rounded to the second."""


class CalculationError(Exception):
    """Why an expression has no value.

    Attributes:
      kind: `syntax`, `division_by_zero`, `too_large` or `domain`.
      message: in a few words, with the part of the expression where it is known.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def _power(base: Number, exponent: Number) -> Number:
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
    """Return the function without the noise that a float near a multiple of π makes: sin(pi) is 0."""

    def of(value: Number) -> float:
        angle = float(value)
        result = function(angle)
        return 0.0 if abs(result) < 1e-15 and abs(angle) > 1 else result

    return of


def _factorial(value: Number) -> int:
    count = _whole(value)
    if count > MAX_BITS:  # Far too long by then, and not yet slow.
        raise OverflowError
    return math.factorial(count)


def _whole(value: Number) -> int:
    if value != int(value):
        raise CalculationError("domain", "it needs a whole number")
    return int(value)


OPERATORS: Mapping[type[ast.operator], Callable[..., Number | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
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
    "pow": (_power, 2, 2),
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
    "gcd": (lambda *values: math.gcd(*map(_whole, values)), 1, 1000),
    "lcm": (lambda *values: math.lcm(*map(_whole, values)), 1, 1000),
}
"""A function's name -> what it does, and its least and most number of arguments."""

CONSTANTS: Mapping[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}

_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_EXPONENT = r"(?:[eE][+-]?[0-9]+)?"
_GROUPED = re.compile(rf"(?P<number>[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9,])(?:\.[0-9]*)?{_EXPONENT})")
_TOKEN = re.compile(
    rf"(?P<number>(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS}){_EXPONENT})"
    r"|(?P<name>[A-Za-z_][A-Za-z_0-9]*)|(?P<symbol>\*\*|//|[-+*/%(),])"
)
_PERCENT = "[0]"
"""What Python reads for a percent sign: a subscript binds as tightly."""


def evaluate(expression: str) -> Number:
    """Return the value of an expression, in bounded time.

    Raises:
      CalculationError: it has none, or it is out of bounds; the message quotes the part that is at fault.
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculationError("too_large", f"the expression is longer than {MAX_CHARACTERS} characters")
    source = _python_source(expression.translate(_SPELLINGS))
    try:
        tree = ast.parse(source, mode="eval")
    except SyntaxError as error:
        rest = source[error.offset - 1 :] if error.offset and error.lineno == 1 else ""
        raise CalculationError("syntax", f"invalid syntax at {_quote(rest) if rest else 'the end'}") from error
    except (MemoryError, RecursionError) as error:
        raise CalculationError("too_large", "nested too deep") from error
    values: dict[ast.AST, Number] = {}
    # Parts before the whole, without recursion: a sum of many terms is a tree as deep as it is long.
    for node in reversed(list(ast.walk(tree.body))):
        if isinstance(node, ast.expr) and not (isinstance(node, ast.Name) and node.id in FUNCTIONS):
            part = source[node.col_offset : node.end_col_offset]
            try:
                values[node] = _keep_in_bounds(_value(node, part, values))
            except CalculationError as error:
                raise CalculationError(error.kind, f"{error.message} in {_quote(part)}") from error
            except ZeroDivisionError as error:
                raise CalculationError("division_by_zero", f"division by zero in {_quote(part)}") from error
            except OverflowError as error:
                raise CalculationError("too_large", f"the result is too large in {_quote(part)}") from error
            except ValueError as error:
                raise CalculationError("domain", f"not defined for this value in {_quote(part)}") from error
    return values[tree.body]


def _python_source(text: str) -> str:
    """Return an expression as Python reads it, its tokens separated by spaces: numbers, known names and symbols."""
    tokens: list[str] = []
    in_call: list[bool] = []  # For each open bracket.
    text = text.strip()
    while text:
        match = (None if in_call and in_call[-1] else _GROUPED.match(text)) or _TOKEN.match(text)
        if match is None:
            raise CalculationError("syntax", f"{text[0]!r} is not understood")
        token, text = match[0], text[match.end() :].lstrip()
        if match.lastgroup == "number":
            token = _checked_number(token)
        elif match.lastgroup == "name":
            token = _checked_name(token, text)
        elif token == "(":
            in_call.append(bool(tokens) and tokens[-1] in FUNCTIONS)
        elif token == ")" and in_call:
            in_call.pop()
        elif token == "%":
            if text.startswith(("+", "-")):
                message = "% before a sign may be percent or a remainder; write (5%) - 3 or 5 % (-3)"
                raise CalculationError("syntax", message)
            token = "%" if re.match(r"[\w.(]", text) else _PERCENT
        tokens.append(token)
    return " ".join(tokens)


def _checked_number(token: str) -> str:
    exponent = token.lower().partition("e")[2]
    if exponent and (len(exponent) > 6 or abs(int(exponent)) > MAX_EXPONENT):
        raise CalculationError("too_large", f"an exponent beyond {MAX_EXPONENT} in {_quote(token)}")
    return re.sub("^0+(?=[0-9])", "", token.replace(",", "").replace("_", ""))


def _checked_name(token: str, after: str) -> str:
    name = token.lower()
    if name not in FUNCTIONS and name not in CONSTANTS:
        known = ", ".join([*FUNCTIONS, *CONSTANTS])
        raise CalculationError("syntax", f"unknown name {_quote(token)}; known are {known}")
    if name in FUNCTIONS and not after.startswith("("):
        raise CalculationError("syntax", f"( after {name} is expected")
    return name


def _value(node: ast.expr, part: str, values: Mapping[ast.AST, Number]) -> Number | int:
    """Return the value of a node whose children have theirs; `part` is its source."""
    match node:
        case ast.Constant():
            return Fraction(part)
        case ast.Name(id=name):
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign):
            return -values[node.operand] if isinstance(sign, ast.USub) else values[node.operand]
        case ast.Subscript():
            return values[node.value] / 100
        case ast.BinOp():
            return OPERATORS[type(node.op)](values[node.left], values[node.right])
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            function, least, most = FUNCTIONS[name]
            if not least <= len(node.args) <= most:
                needed = f"{least}" if least == most else f"{least} to {most}"
                raise CalculationError("syntax", f"{name} takes {needed} values, not {len(node.args)}")
            return function(*(values[value] for value in node.args))
    raise CalculationError("syntax", "invalid syntax")


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


def _quote(part: str) -> str:
    return repr(textwrap.shorten(part.replace(f" {_PERCENT}", "%"), 100, placeholder=" ..."))


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


class CalculatorTool:
    """Tool `calculator(expression)`: the value of an expression.

    An expression without a value fails with the kind of its CalculationError, a fault of the model.
    """

    name = "calculator"
    description = (
        "Computes an arithmetic expression with + - * / // % ** and brackets; "
        f"knows {', '.join(FUNCTIONS)}, {', '.join(CONSTANTS)}."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "minLength": 1, "description": "e.g. (12.5 + 7) * 3"}},
        "required": ["expression"],
        "additionalProperties": False,
    }
    blocking = False

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Compute one expression; see the class."""
        try:
            return ToolResult(format_number(evaluate(arguments["expression"])))
        except CalculationError as error:
            return failure(error.kind, f"Error: {error.message}.")

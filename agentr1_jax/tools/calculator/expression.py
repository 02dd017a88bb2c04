"""Value of the text of an expression: Python's own parser, and a whitelist of the nodes of its syntax tree.

Beside Python's notation an expression may have `^` for `**`, `×`, `÷`, the typographic minus, `1,234,567` (directly
within the brackets of a function, commas always separate arguments), and `15%` for 15/100: a `%` is a percent sign
unless an operand follows.

The text is rewritten to what Python reads: numbers become the names `_0`, `_1`, ..., whose values are exact, and a
percent sign becomes the subscript `[_]`, which binds as tightly. No words of the policy but names of functions and
constants reach the parser, and nothing is compiled.
"""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, NoReturn

from agentr1_jax.tools.calculator.arithmetic import CONSTANTS, FUNCTIONS, OPERATORS, CalculationError, Number, apply

MAX_CHARACTERS = 1000
MAX_DEPTH = 50
"""Levels of brackets, signs and powers within each other."""
MAX_EXPONENT = 1000
"""Exponent of a number such as 1e1000."""

_SYMBOLS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
}
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_TAIL = r"(?:[eE](?P<exponent>[+-]?[0-9]+))?"
_GROUPED = re.compile(rf"\s*(?P<number>[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9,])(?:\.[0-9]*)?{_TAIL})")
_TOKEN = re.compile(
    rf"\s*(?:(?P<number>(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS}){_TAIL})"
    r"|(?P<name>[A-Za-z_][A-Za-z_0-9]*)|(?P<symbol>\*\*|//|[-+*/%^(),])|(?P<end>$))"
)


class _Token(NamedTuple):
    """A token: kind `number`, `name`, `symbol` or `end`; text; index of its first character."""

    kind: str
    text: str
    at: int


def evaluate(expression: str) -> Number:
    """Return the value of an expression, in bounded time.

    Raises:
      CalculationError: it has none, or it is out of bounds; the message names the place.
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculationError("too_large", f"the expression is longer than {MAX_CHARACTERS} characters")
    return _Expression(expression.translate(_SPELLINGS)).value()


class _Expression:
    """An expression as Python source, with the values of its numbers and the places of its tokens in the text."""

    def __init__(self, text: str) -> None:
        self._numbers: dict[str, Number] = {}
        self._columns: list[int] = []
        self._places: list[int] = []
        self._source = ""
        tokens = _tokenize(text)
        for token, after in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
            self._columns.append(len(self._source))
            self._places.append(token.at)
            self._source += self._rewrite(token, after) + " "

    def value(self) -> Number:
        """Parse and compute."""
        try:
            tree = ast.parse(self._source.strip(), mode="eval")
        except SyntaxError as error:
            column = error.offset - 1 if error.offset and error.lineno == 1 else len(self._source)
            _fail("syntax", "invalid syntax", self._place(column))
        except (MemoryError, RecursionError):
            _fail("too_large", f"nested deeper than {MAX_DEPTH}", 0)
        return self._compute(tree.body, 0)

    def _rewrite(self, token: _Token, after: _Token) -> str:
        if token.kind == "number":
            name = f"_{len(self._numbers)}"
            self._numbers[name] = _number(token)
            return name
        if token.kind == "name":
            name = token.text.lower()
            if name not in FUNCTIONS and name not in CONSTANTS:
                known = ", ".join([*FUNCTIONS, *CONSTANTS])
                _fail("syntax", f"unknown name {token.text!r}; known are {known}", token.at)
            return name
        if token.text == "%":
            if after.text in ("+", "-"):
                message = "% before a sign may be percent or a remainder; write (5%) - 3 or 5 % (-3)"
                _fail("syntax", message, token.at)
            return "%" if after.kind in ("number", "name") or after.text == "(" else "[_]"
        return "**" if token.text == "^" else token.text

    def _compute(self, node: ast.expr, depth: int) -> Number:
        place = self._place(node.col_offset)
        if depth > MAX_DEPTH:
            _fail("too_large", f"nested deeper than {MAX_DEPTH}", place)
        if isinstance(node, ast.BinOp):
            return self._compute_chain(node, depth)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
            value = self._compute(node.operand, depth + 1)
            return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.Subscript):
            return _apply(place, OPERATORS["/"], self._compute(node.value, depth), Fraction(100))
        if isinstance(node, ast.Name):
            if node.id in FUNCTIONS:
                _fail("syntax", f"( after {node.id} is expected", place)
            return self._numbers[node.id] if node.id in self._numbers else CONSTANTS[node.id]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            name, (function, least, most) = node.func.id, FUNCTIONS[node.func.id]
            if not least <= len(node.args) <= most:
                needed = f"{least}" if least == most else f"{least} to {most}"
                _fail("syntax", f"{name} takes {needed} values, not {len(node.args)}", place)
            if not node.keywords:
                return _apply(place, function, *(self._compute(value, depth + 1) for value in node.args))
        _fail("syntax", "invalid syntax", place)

    def _compute_chain(self, node: ast.BinOp, depth: int) -> Number:
        """Compute operators from left to right: a sum of many terms is a tree as deep as it is long."""
        chain, first = [node], node.left
        while isinstance(first, ast.BinOp):
            chain.append(first)
            first = first.left
        value = self._compute(first, depth + 1)
        for operation in reversed(chain):
            right = self._compute(operation.right, depth + 1)
            gap = self._source[operation.left.end_col_offset : operation.right.col_offset]
            place = self._place((operation.left.end_col_offset or 0) + len(gap) - len(gap.lstrip(" )")))
            value = _apply(place, OPERATORS[_SYMBOLS[type(operation.op)]], value, right)
        return value

    def _place(self, column: int) -> int:
        """Return the index in the text of the token at a column of the source."""
        return self._places[max(bisect.bisect_right(self._columns, column) - 1, 0)]


def _tokenize(text: str) -> list[_Token]:
    """Split the text into tokens; the last is `end`."""
    tokens: list[_Token] = []
    in_call: list[bool] = []  # For each open bracket.
    at = 0
    while not tokens or tokens[-1].kind != "end":
        match = None if in_call and in_call[-1] else _GROUPED.match(text, at)
        match = match or _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            _fail("syntax", f"{text[at]!r} is not understood", at)
        kind = next(name for name in ("number", "name", "symbol", "end") if match.groupdict().get(name) is not None)
        token = _Token(kind, match[kind], match.start(kind))
        if token.text == "(":
            in_call.append(bool(tokens) and tokens[-1].kind == "name")
            if len(in_call) > MAX_DEPTH:
                _fail("too_large", f"nested deeper than {MAX_DEPTH}", token.at)
        elif token.text == ")" and in_call:
            in_call.pop()
        tokens.append(token)
        at = match.end()
    return tokens


def _number(token: _Token) -> Number:
    """Return the value of a number, exactly."""
    digits = token.text.replace(",", "").replace("_", "")
    exponent = digits.lower().partition("e")[2]
    if exponent and (len(exponent) > 6 or abs(int(exponent)) > MAX_EXPONENT):
        _fail("too_large", f"an exponent beyond {MAX_EXPONENT}", token.at)
    return _apply(token.at, Fraction, digits)


def _apply(place: int, function: Callable[..., Number | int], *values: Number | str) -> Number:
    try:
        return apply(function, *values)
    except CalculationError as error:
        _fail(error.kind, error.message, place, error)


def _fail(kind: str, message: str, place: int, cause: Exception | None = None) -> NoReturn:
    """Raise CalculationError with the place in the text."""
    raise CalculationError(kind, f"{message} (at character {place + 1})") from cause

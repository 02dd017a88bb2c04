"""From the text of an expression to its value: a precedence-climbing parser that computes as it reads.

As in Python, `**` binds tighter than a sign to its left and groups to the right, and `//` and `%` round down. Beside
Python's notation it reads `^` for `**`, `×`, `÷`, the typographic minus, `1,234,567` (directly within the brackets of a
function, commas always separate arguments), and `15%` for 15/100: a `%` is a percent sign unless an operand follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from agentr1_jax.tools.calculator.arithmetic import CONSTANTS, FUNCTIONS, OPERATORS, CalculationError, Number, apply

MOST_CHARACTERS = 1000
MOST_DEPTH = 50
"""Of brackets, signs and powers within each other."""
MOST_EXPONENT = 1000
"""Of a number such as 1e1000."""

_BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "**": 4}
_SIGN_BINDS = 3
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_TAIL = r"(?:[eE](?P<exponent>[+-]?[0-9]+))?"
_NUMBER = re.compile(rf"(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS}){_TAIL}")
_GROUPED = re.compile(rf"[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9,])(?:\.[0-9]*)?{_TAIL}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_SYMBOL = re.compile(r"\*\*|//|[-+*/%^(),]")
_SPACE = re.compile(r"\s*")


class _Token(NamedTuple):
    """`kind` is `number`, `name`, `end`, or the symbol itself."""

    kind: str
    text: str
    at: int
    end: int


def evaluate(expression: str) -> Number:
    """The value of an expression, soon.

    Raises:
      CalculationError: it has none, or it is out of bounds; the message names the place.
    """
    if len(expression) > MOST_CHARACTERS:
        raise CalculationError("too_large", f"the expression is longer than {MOST_CHARACTERS} characters")
    return _Parser(expression.translate(_SPELLINGS)).whole()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._depth = 0
        self._grouped = True  # Whether a comma may stand within a number here.
        self._token = self._read(0)

    def whole(self) -> Number:
        value = self._operation(0)
        if self._token.kind != "end":
            raise self._unexpected("an operator")
        return value

    def _operation(self, least: int) -> Number:
        """An operand and the operators after it that bind tighter than `least`."""
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise self._error("too_large", f"nested deeper than {MOST_DEPTH}", self._token)
        value = self._operand()
        while _BINDS.get(self._token.kind, 0) > least:
            sign = self._advance()
            # A power groups to the right, and a sign may stand before its exponent.
            right = self._operation(_SIGN_BINDS if sign.kind == "**" else _BINDS[sign.kind])
            value = self._at(sign, OPERATORS[sign.kind], value, right)
        self._depth -= 1
        return value

    def _operand(self) -> Number:
        token = self._token
        if token.kind in ("+", "-"):
            self._advance()
            value = self._operation(_SIGN_BINDS)
            return value if token.kind == "+" else -value
        if token.kind == "number":
            return self._percent(self._number(self._advance()))
        if token.kind == "(":
            return self._percent(self._bracketed(grouped=True)[0])
        if token.kind == "name":
            return self._percent(self._named(self._advance()))
        raise self._unexpected("a number")

    def _named(self, token: _Token) -> Number:
        name = token.text.lower()
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name not in FUNCTIONS:
            known = ", ".join([*FUNCTIONS, *CONSTANTS])
            raise self._error("syntax", f"unknown name {token.text!r}; known are {known}", token)
        if self._token.kind != "(":
            raise self._unexpected(f"( after {name}")
        function, least, most = FUNCTIONS[name]
        arguments = self._bracketed(grouped=False)
        if not least <= len(arguments) <= most:
            needed = f"{least}" if least == most else f"{least} to {most}"
            raise self._error("syntax", f"{name} takes {needed} values, not {len(arguments)}", token)
        return self._at(token, function, *arguments)

    def _bracketed(self, grouped: bool) -> list[Number]:
        """The values within a pair of brackets: one where they group, as many as there are where they call."""
        before, self._grouped = self._grouped, grouped
        opening = self._advance()
        values = [self._operation(0)]
        while self._token.kind == "," and not grouped:
            self._advance()
            values.append(self._operation(0))
        if self._token.kind == "end":
            raise self._error("syntax", "the bracket is not closed", opening)
        if self._token.kind != ")":
            raise self._unexpected("an operator or )")
        self._grouped = before  # Before the next token is read.
        self._advance()
        return values

    def _percent(self, value: Number) -> Number:
        while self._token.kind == "%":
            after = self._read(self._token.end)
            if after.kind in ("number", "name", "("):
                break
            if after.kind in ("+", "-"):
                message = "% before a sign may be percent or a remainder; write (5%) - 3 or 5 % (-3)"
                raise self._error("syntax", message, self._token)
            sign = self._advance()
            value = self._at(sign, OPERATORS["/"], value, Fraction(100))
        return value

    def _number(self, token: _Token) -> Number:
        match = (_GROUPED if "," in token.text else _NUMBER).fullmatch(token.text)
        exponent = match["exponent"] if match else None
        if exponent and (len(exponent) > 6 or abs(int(exponent)) > MOST_EXPONENT):
            raise self._error("too_large", f"an exponent beyond {MOST_EXPONENT}", token)
        return self._at(token, Fraction, token.text.replace(",", "").replace("_", ""))

    def _at(self, token: _Token, function: Callable[..., Number | int], *values: Number | str) -> Number:
        try:
            return apply(function, *values)
        except CalculationError as error:
            raise self._error(error.kind, error.message, token) from error

    def _advance(self) -> _Token:
        token = self._token
        self._token = self._read(token.end)
        return token

    def _read(self, at: int) -> _Token:
        start = _end(_SPACE, self._text, at)
        if start == len(self._text):
            return _Token("end", "", start, start)
        patterns = [("number", _NUMBER), ("name", _NAME), ("", _SYMBOL)]
        for kind, pattern in [("number", _GROUPED), *patterns] if self._grouped else patterns:
            if match := pattern.match(self._text, start):
                text = "**" if match[0] == "^" else match[0]
                return _Token(kind or text, match[0], start, match.end())
        raise self._error("syntax", f"{self._text[start]!r} is not understood", _Token("", "", start, start))

    def _unexpected(self, wanted: str) -> CalculationError:
        found = repr(self._token.text) if self._token.text else "the end"
        return self._error("syntax", f"{wanted} is expected, not {found}", self._token)

    def _error(self, kind: str, message: str, token: _Token) -> CalculationError:
        return CalculationError(kind, f"{message} (at character {token.at + 1})")


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at

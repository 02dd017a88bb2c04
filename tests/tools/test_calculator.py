"""What the calculator computes and prints, also of hostile expressions."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tool_doubles import run

from agentr1_jax.tools.base import Tool, ToolError
from agentr1_jax.tools.calculator import (
    FUNCTIONS,
    MAX_BITS,
    MAX_CHARACTERS,
    CalculatorTool,
    evaluate,
    format_number,
)

KINDS = {"syntax", "division_by_zero", "too_large", "domain"}
MOST_SECONDS = 5.0  # The slowest takes milliseconds; an endless one takes for ever.


@pytest.mark.parametrize(
    ("expression", "value"),
    {
        "0.1 + 0.2": "0.3",
        "1 / 4": "0.25",
        "1/3": "0.333333333333",
        "-2**2 - -2**-2": "-3.75",
        "1 - 2 - 3 / 4 / 5 // 6 * 7": "-1",
        "2**-1**2": "0.5",
        "2**3**2": "512",
        "2^10": "1024",
        "7 // 2 + 7 % 4": "6",
        "6 ÷ 3 × 2 − 1": "3",
        "1,234,567.5 * 2": "2469135",
        "max(1,234)": "234",
        "max((1,234), 5)": "1234",
        "1_000 + .5 + 5. + 007": "1012.5",
        "15%": "0.15",
        "50% * 2": "1",
        "17 % (-5)": "-3",
        "sqrt(16) + sqrt(2.25)": "5.5",
        "Min(3, 1, 2) + ABS(-4)": "5",
        "round(2.675, 2)": "2.68",
        "round(1234, -2)": "1200",
        "floor(-0.5) + ceil(0.5) + trunc(-1.5)": "-1",
        "log(8, 2)": "3",
        "log10(10**400)": "400",
        "ln(e)": "1",
        "sin(pi)": "0",
        "sin(1e-20)": "1e-20",
        "gcd(12, 18) + lcm(4, 6)": "18",
        "123456789012.25 + 0": "123456789012.25",
        "1e30": "1" + "0" * 30,
        "1e30 / 7": "1.42857142857e+29",
        "1/1024/1024/1024": "9.31322574615e-10",
        "1.0001**100000": "22015.4560485",
        "(-1)**1e999": "1",
        "+".join(["1"] * 500): "500",
        "-" * 60 + "1": "1",
        "-0.0 * pi": "0",
    }.items(),
)
def test_what_it_computes_and_prints(expression, value):
    assert run(CalculatorTool(), {"expression": expression}).content == value


@pytest.mark.parametrize(
    ("expression", "kind", "says"),
    [
        ("2 + 1 / 0", "division_by_zero", "division by zero in '1 / 0'."),
        ("5 % (2 - 2)", "division_by_zero", "in '5 % ( 2 - 2 )'."),
        ("0 ** -1", "division_by_zero", "in '0 ** - 1'."),
        ("log(5, 1)", "division_by_zero", "in 'log ( 5 , 1 )'."),
        ("9^9^9", "too_large", "the result is too large in '9 ** 9 ** 9'."),
        ("9**9**-9**9**9", "too_large", "too large"),
        ("2**-99999", "too_large", "too close to 0"),
        ("1 / 10**999 / 10**999", "too_large", "too close to 0"),
        ("1 + 1e999999999", "too_large", "an exponent beyond 1000 in '1e999999999'."),
        ("factorial(factorial(20))", "too_large", "in 'factorial ( factorial ( 20 ) )'."),
        ("1+" * MAX_CHARACTERS + "1", "too_large", "longer than"),
        ("(-8) ** 0.5", "domain", "not defined"),
        ("2 * sqrt(-1)", "domain", "not defined for this value in 'sqrt ( - 1 )'."),
        ("log(0)", "domain", "above 0"),
        ("factorial(-1)", "domain", "not defined"),
        ("factorial(2.5)", "domain", "whole number"),
        ("round(1, 1e9)", "domain", "places"),
        ("1 +", "syntax", "invalid syntax at the end."),
        ("(1 + 5%", "syntax", "invalid syntax at '( 1 + 5%'."),
        ("1 2", "syntax", "invalid syntax at '"),
        ("2(3)", "syntax", "invalid syntax in '2 ( 3 )'."),
        ("12,34", "syntax", "invalid syntax in '12 , 34'."),
        ("1,2345", "syntax", "invalid syntax"),
        ("max()", "syntax", "max takes 1 to 1000 values, not 0"),
        ("sqrt(1, 2)", "syntax", "sqrt takes 1 values, not 2"),
        ("sqrt + 1", "syntax", "( after sqrt is expected"),
        ("foo(1)", "syntax", "unknown name 'foo'; known are sqrt"),
        ("5% - 3", "syntax", "may be percent or a remainder"),
        ("(5 - 3)[0]", "syntax", "'[' is not understood"),
        ("__import__('os')", "syntax", "unknown name '__import__'"),
        ("1if 1 else 2", "syntax", "unknown name 'if'"),
        ("$5", "syntax", "'$' is not understood"),
        (" ", "syntax", "invalid syntax"),
        ("(" * 999, "syntax", "invalid syntax"),
    ],
)
def test_what_has_no_value_is_typed_and_quoted(expression, kind, says):
    result = run(CalculatorTool(), {"expression": expression})
    assert result.error == ToolError(kind, "model"), result.content
    assert result.content.startswith("Error: ") and says in result.content and len(result.content) < 400


def test_it_is_a_tool_that_names_all_it_knows():
    tool = CalculatorTool()
    assert isinstance(tool, Tool) and not tool.blocking
    assert all(name in tool.description for name in FUNCTIONS)
    assert run(tool, {"expression": 3}).error.kind == "bad_arguments"


PIECES = [*"0123456789.,%()+-*/^ eE_\u0663", "**", "//", "9**9", "1e999", "sqrt(", "factorial(", "max(", "lcm(", "pi"]


@given(st.lists(st.sampled_from(PIECES), max_size=400).map("".join) | st.text(max_size=1100))
@example("factorial(4000)*" * 60 + "1")
@example("lcm(" + ",".join(f"2**4000-{n}" for n in range(1, 80)) + ")")
@example("*".join(["(10**1000)"] * 90))
@example("+".join(f"1/{n}" for n in range(10**4 - 120, 10**4)))
def test_whatever_is_asked_it_answers_soon_and_raises_nothing(expression):
    start = time.process_time()
    result = CalculatorTool().execute({"expression": expression})
    assert time.process_time() - start < MOST_SECONDS
    assert result.ok or (result.error.kind in KINDS and result.error.fault == "model")
    assert result.content and len(result.content) < max(400, MAX_BITS)


@given(st.fractions(max_denominator=10**12) | st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_printed_to_twelve_digits_and_can_be_read_again(value):
    text = format_number(value)
    assert math.isclose(float(Fraction(text)), float(value), rel_tol=1e-11)
    assert evaluate(text) == Fraction(text)

"""The calculator as a Tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentr1_jax.tools.base import ToolResult, failure
from agentr1_jax.tools.calculator.arithmetic import CONSTANTS, FUNCTIONS, CalculationError, format_number
from agentr1_jax.tools.calculator.expression import evaluate


class CalculatorTool:
    """Tool `calculator(expression)`: the value of an expression.

    An expression without a value fails with `syntax`, `division_by_zero`, `too_large` or `domain`, all faults of the
    model.
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

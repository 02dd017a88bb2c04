"""A calculator with exact arithmetic; nothing that a policy writes is ever executed."""

from agentr1_jax.tools.calculator.arithmetic import CalculationError, format_number
from agentr1_jax.tools.calculator.expression import evaluate
from agentr1_jax.tools.calculator.tool import CalculatorTool

__all__ = ["CalculationError", "CalculatorTool", "evaluate", "format_number"]

"""A calculator: exact arithmetic behind a parser of its own, so that nothing a policy writes is ever evaluated."""

from agentr1_jax.tools.calculator.arithmetic import CalculationError, shown
from agentr1_jax.tools.calculator.parser import evaluate
from agentr1_jax.tools.calculator.tool import CalculatorTool

__all__ = ["CalculationError", "CalculatorTool", "evaluate", "shown"]

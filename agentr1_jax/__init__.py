"""agentr1_jax: reinforcement learning of multi-step tool-using LLM agents, native to JAX.

The names below are for notebooks; see `agentr1_jax/notebook.py`. They are imported when they are first used, so that
`import agentr1_jax` does not import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentr1_jax.notebook import Policy, assign_credit, compare_credit, describe, load_policy, roll_out, update
    from agentr1_jax.report.tables import markdown_table
    from agentr1_jax.tasks import make_task

__all__ = [
    "Policy",
    "assign_credit",
    "compare_credit",
    "describe",
    "load_policy",
    "make_task",
    "markdown_table",
    "roll_out",
    "update",
]
__version__ = "0.2.0"

_ELSEWHERE = {"make_task": "agentr1_jax.tasks", "markdown_table": "agentr1_jax.report.tables"}

if not TYPE_CHECKING:  # Else mypy would find every name here.

    def __getattr__(name: str) -> Any:
        """Import one of `__all__` from its module."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_ELSEWHERE.get(name, "agentr1_jax.notebook")), name)

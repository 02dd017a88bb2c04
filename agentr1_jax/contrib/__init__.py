"""Tasks and tools that the core never imports: each module is imported when a config names it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

TASKS: Mapping[str, str] = {
    "bfcl": "bfcl.task",
    "gymnasium": "gymnasium.task",
    "http": "http_env.client",
    "sokoban": "sokoban",
    "verifiers": "verifiers",
}
"""Task name -> the module in this package that registers it."""


def import_task(name: str) -> None:
    """Import the module that registers the task `name`; do nothing where the task is not one of `TASKS`."""
    if name in TASKS:
        importlib.import_module(f"{__name__}.{TASKS[name]}")
